r"""Sums of a layer of units over many scalars, without computing each unit of each scalar.

A unit of :math:`\phi(x) = \mathrm{ReLU}(\mathrm{LayerNorm}(x u + e))` is a function of one number x. With centred
:math:`\bar u, \bar e` and the mean square :math:`s(x)^2 = a x^2 + 2 b x + c + \epsilon` of :math:`x \bar u + \bar e`,

.. math:: \phi_h(x) = \max\Bigl(0, \frac{A_h x + E_h}{s(x)} + \beta_h\Bigr), \qquad
          A = \gamma \odot \bar u,\; E = \gamma \odot \bar e,

is positive between two numbers, or everywhere but between two numbers. So its sum over n sorted scalars follows from
running sums of :math:`x / s(x)` and :math:`1 / s(x)`: B (n log n + H log n) operations in place of B n H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


def summed_units(ordered: Tensor, scale: Tensor, embedding: Tensor, norm: nn.LayerNorm) -> Tensor:
    r"""Return :math:`\sum_i \mathrm{ReLU}(\mathrm{LayerNorm}(x_i u + e))`; differentiable in all arguments.

    Args:
        ordered: The scalars x in ascending order, shape ``(B, n)``.
        scale: u, shape ``(H,)``.
        embedding: e, shape ``(H,)``.
        norm: Layer normalisation of H numbers.

    Returns:
        Sums, shape ``(B, H)``, of the type of ``scale``. Running sums are in float64.
    """
    x, u, e = ordered.double(), scale.double(), embedding.double()
    gain, shift = norm.weight.double(), norm.bias.double()
    u, e = u - u.mean(), e - e.mean()
    a, b, c = u.square().mean(), (u * e).mean(), e.square().mean() + norm.eps
    with torch.no_grad():
        low, high, inside = positive_between(gain * u, gain * e, shift, a, b, c)
        bounds = torch.stack([low, high]).flatten().expand(len(x), -1).contiguous()
        places = torch.searchsorted(x.detach(), bounds)
    inverse = (a * x.square() + 2 * b * x + c).clamp(min=norm.eps).rsqrt()  # 1 / s; rounding may take eps away
    total = x.new_zeros(())
    for factor, values in ((gain * u, x * inverse), (gain * e, inverse), (shift, torch.ones_like(x))):
        running = pad(values.cumsum(1), (1, 0))
        start, stop = running.gather(1, places).chunk(2, dim=1)
        total = total + factor * torch.where(inside, stop - start, running[:, -1:] - (stop - start))
    return total.to(scale.dtype)


def positive_between(
    slope: Tensor, offset: Tensor, shift: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Find where :math:`(A x + E) / \sqrt{a x^2 + 2 b x + c} + \beta > 0`.

    With :math:`\cot\theta = \sqrt{a}\,(x + b/a) / d`, :math:`d^2 = c - b^2/a`, the line is a half circle
    :math:`0 < \theta < \pi`, on which this is :math:`R \cos(\theta - \varphi) + \beta > 0`.

    Args:
        slope: A, shape ``(H,)``.
        offset: E, shape ``(H,)``.
        shift: :math:`\beta`, shape ``(H,)``.
        a: At least 0, a scalar.
        b: A scalar.
        c: Greater than :math:`b^2/a`, a scalar.

    Returns:
        Numbers ``low <= high``, each of shape ``(H,)``, maybe infinite, and whether it is positive between them, rather
        than everywhere else.
    """
    root = a.sqrt().clamp(min=1e-150)  # all u may be the same; then b is 0 too
    centre = b / root  # sqrt(a) times the x of the least root
    depth = (c - centre.square()).clamp(min=1e-300).sqrt()
    cosine, sine = slope / root, (offset - slope * centre / root) / depth
    angle = torch.atan2(sine, cosine)
    half = torch.acos((-shift / torch.hypot(cosine, sine)).nan_to_num(1.0).clamp(-1, 1))
    first, last = angle - half, angle + half
    inside = first >= -math.pi  # else it goes around: positive but between `last` and `first` a turn on
    start, stop = torch.where(inside, first, last), torch.where(inside, last, first + 2 * math.pi)

    def on_the_line(theta: Tensor) -> Tensor:
        number = (depth / torch.tan(theta) - centre) / root
        number = torch.where(theta <= 0, torch.inf, number)
        return torch.where(theta >= math.pi, -torch.inf, number)

    low, high = on_the_line(stop), on_the_line(start)  # the cotangent falls
    return torch.minimum(low, high), high, inside
