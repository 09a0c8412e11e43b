"""Singular values of layers, and what they say of their rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.conv import LowRankConv2d, Scheme
from lightning_symmetry.low_rank.layer import LowRankMap

Matrix = nn.Module | Tensor | tuple[Tensor, Tensor]


@torch.no_grad()
def singular_values(layer: Matrix, scheme: Scheme = "kxk-1x1") -> Tensor:
    r"""Return the singular values of a layer's weight, largest first, in float64.

    Those of :math:`U V^\top` are those of :math:`R_U R_V^\top`, of size r x r, with the triangular factors of two thin
    QR decompositions: :math:`O((N + M) r^2 + r^3)`. There are r of them; the others are zero. A grouped convolution is
    a block-diagonal matrix and has those of all blocks.

    Args:
        layer: A factorised layer; a linear layer, embedding or convolution; a matrix of shape ``(..., N, M)``; or a
            pair of factors, ``(..., N, r)`` and ``(..., M, r)``.
        scheme: As which matrix to take the kernel of a plain two-dimensional convolution.

    Raises:
        ValueError: If the layer has no weight of its own, as attention, whose projections have.
    """
    if isinstance(layer, LowRankMap):
        layer = layer.factors()
    if isinstance(layer, tuple):
        left, right = (torch.linalg.qr(factor.double(), mode="r").R for factor in layer)
        matrix = left @ right.mT
    else:
        matrix = _matrix(layer, scheme).double()
    return torch.linalg.svdvals(matrix).flatten().sort(descending=True).values


def effective_rank(layer: Matrix, scheme: Scheme = "kxk-1x1") -> float:
    r"""Return :math:`\|W\|_* / \|W\|_{op}`, the sum of the singular values over the largest; 0 for W = 0.

    Args:
        layer: As for :func:`singular_values`.
        scheme: As there.

    Raises:
        ValueError: As there.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3; Martin and Mahoney (2018).
    """
    values = singular_values(layer, scheme)
    return float(values.sum() / values[0]) if values[0] else 0.0


def stable_rank(layer: Matrix, scheme: Scheme = "kxk-1x1") -> float:
    r"""Return :math:`\|W\|_F^2 / \|W\|_{op}^2`; 0 for W = 0.

    Args:
        layer: As for :func:`singular_values`.
        scheme: As there.

    Raises:
        ValueError: As there.
    """
    values = singular_values(layer, scheme)
    return float((values / values[0]).square().sum()) if values[0] else 0.0


def _matrix(layer: nn.Module | Tensor, scheme: Scheme) -> Tensor:
    if isinstance(layer, Tensor):
        if layer.ndim < 2:
            raise ValueError(f"Expected a matrix but got a tensor of shape {tuple(layer.shape)}.")
        return layer
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return LowRankConv2d.matrices_of(layer, scheme)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        raise ValueError(f"{type(layer).__name__} has no weight that is a matrix.")
    return weight.flatten(1)
