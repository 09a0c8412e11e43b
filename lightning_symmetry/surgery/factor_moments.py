r"""Moments of a weight's gradient, and directions of its motion, in the factors :math:`W = U V^\top`.

All of it in float64 on the CPU, for one matrix or one for each group: W is of shape ``(G, N, M)``, U ``(G, N, r)``, V
``(G, M, r)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 10**-1.5  # of the largest singular value of a factor: 1e-3 in the product of two like those of eq. 3


def factor_gradient(gradient: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return a gradient, or a sum of gradients, with respect to the factors: the chain rule.

    .. math:: G_U = G V, \qquad G_V = G^\top U

    Args:
        gradient: G, with respect to the product.
        left: U.
        right: V.
    """
    return gradient @ right, gradient.mT @ left


def factor_squares(
    squares: Tensor, mean: Tensor | None, left: Tensor, right: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    r"""Return second moments of the gradient with respect to the factors, each with the first moment squared in it.

    An entry of :math:`G V` is a sum over a row of G. Written as a mean :math:`\bar G` and noise, which is taken to be
    uncorrelated between the entries of G and has the variance :math:`s - \bar G^2` (s the second moment),

    .. math:: E[(G V)^2] = (\bar G V)^2 + (s - \bar G^2)_+ (V \circ V), \qquad
        E[(G^\top U)^2] = (\bar G^\top U)^2 + (s - \bar G^2)_+^\top (U \circ U),

    squares being taken entry by entry. It is no less than the first moment squared, so that Adam's first steps are no
    longer than its learning rate. Where no mean is known it is taken to be 0.

    Args:
        squares: s.
        mean: The mean of the gradient, or None.
        left: U.
        right: V.

    Returns:
        The two summands, each for U and for V.
    """
    if mean is None:
        mean = torch.zeros_like(squares)
    noise = (squares - mean.square()).clamp_min(0)
    means = tuple(part.square() for part in factor_gradient(mean, left, right))
    return means, factor_gradient(noise, left.square(), right.square())


def factor_direction(direction: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the motion of the factors that comes nearest to a motion D of the product.

    The product moves by :math:`dU\, V^\top + U\, dV^\top`, a direction in the tangent space of the matrices of rank r.
    Wanted are those of the least :math:`\|dU\|_F^2 + \|dV\|_F^2` among the minimisers of

    .. math:: \| dU\, V^\top + U\, dV^\top - D \|_F^2.

    With thin singular value decompositions :math:`U = P S A^\top` and :math:`V = Q T B^\top`, and :math:`\circ` for
    products entry by entry, they are

    .. math:: dU = P \Lambda T B^\top + (I - P P^\top) D Q T^{-1} B^\top, \qquad
        dV = Q \Lambda^\top S A^\top + (I - Q Q^\top) D^\top P S^{-1} A^\top, \qquad
        \Lambda_{ij} = \frac{(P^\top D Q)_{ij}}{S_i^2 + T_j^2}.

    Derivation: the parts outside the column spaces are determined by :math:`(I - P P^\top) D Q Q^\top` and its
    counterpart. Inside, :math:`X T^\top + S Y^\top = C` with :math:`C = P^\top D Q` has the solution of least norm
    :math:`X = \Lambda T, Y = \Lambda^\top S` (Lagrange), thus :math:`\Lambda T^2 + S^2 \Lambda = C`. Together the
    product moves by the projection :math:`P P^\top D + D Q Q^\top - P P^\top D Q Q^\top` on the tangent space. For
    factors with :math:`U^\top U = V^\top V`, as those of eq. 3 of the low-rank paper, that stays so to first order.

    Singular values of a factor below 10^-1.5 of its largest count as that much: along them the motion of the product
    is less than D's, since that of the factors would be larger than a step of first order is good for.

    Args:
        direction: D.
        left: U.
        right: V.
    """
    p, s, at = torch.linalg.svd(left, full_matrices=False)
    q, t, bt = torch.linalg.svd(right, full_matrices=False)
    s, t = (_bounded(values).unsqueeze(-1) for values in (s, t))
    core = p.mT @ direction @ q
    multiplier = core / (s.square() + t.square().mT)
    outside_left = direction @ q - p @ core
    outside_right = direction.mT @ p - q @ core.mT
    return (
        (p @ multiplier * t.mT + outside_left / t.mT) @ bt,
        (q @ multiplier.mT * s.mT + outside_right / s.mT) @ at,
    )


def _bounded(values: Tensor) -> Tensor:
    largest = values.amax(-1, keepdim=True)
    return torch.where(largest > 0, values.clamp_min(_SMALLEST * largest), 1)
