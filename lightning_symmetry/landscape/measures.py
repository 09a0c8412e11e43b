"""Barrier, monotonicity and convexity of a loss curve over a segment."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDING = 16 * torch.finfo(torch.float64).eps


def chord(alphas: Tensor, loss: Tensor) -> Tensor:
    """Return the straight line between the two end points of the curve, at ``alphas``."""
    return loss[0] + (loss[-1] - loss[0]) * (alphas - alphas[0]) / (alphas[-1] - alphas[0])


def midpoint_barrier(alphas: Tensor, loss: Tensor) -> float:
    r"""Return :math:`L(\frac12) - \frac12 (L(0) + L(1))`, Table 1's test loss barrier.

    Raises:
        ValueError: If 0, 1/2 and 1 are not among the positions.
    """
    values = []
    for position in (0.0, 0.5, 1.0):
        hits = torch.nonzero((alphas - position).abs() < 1e-9).flatten()
        if len(hits) == 0:
            raise ValueError(
                f"The midpoint barrier needs the loss at alpha = {position:g}, which is not among the "
                f"{len(alphas)} positions; take an odd number of points."
            )
        values.append(loss[hits[0]].item())
    return values[1] - (values[0] + values[2]) / 2


def max_barrier(alphas: Tensor, loss: Tensor) -> float:
    r"""Return :math:`\max_\alpha L(\alpha) - [(1 - \alpha) L(0) + \alpha L(1)]`, at least 0 (at the ends)."""
    return (loss - chord(alphas, loss)).max().item()


def max_increase(loss: Tensor) -> float:
    r"""Return :math:`\Delta = \max_i L(\alpha_{i+1}) - L(\alpha_i)`, section 5.4; not positive if monotonic."""
    return loss.diff().max().item()


def local_convexity(alphas: Tensor, loss: Tensor) -> float:
    """Return the share of inner positions whose centred second difference is not negative (section 5.4).

    Divided differences, so positions need not be uniform. A difference within rounding of zero counts as zero.
    """
    slopes = loss.diff() / alphas.diff()
    tolerance = _ROUNDING * loss.abs().max() / alphas.diff().min()
    return _share(slopes.diff() >= -tolerance, loss)


def global_convexity(alphas: Tensor, loss: Tensor) -> float:
    """Return the share of inner positions where the curve is not above the chord of its end points (section 5.4).

    The end points lie on the chord whatever the curve and do not count: a concave curve scores 0.
    """
    above = (loss - chord(alphas, loss))[1:-1]
    return _share(above <= _ROUNDING * loss.abs().max(), loss)


def _share(holds: Tensor, loss: Tensor) -> float:
    if len(holds) == 0 or not torch.isfinite(loss).all():
        return float("nan")
    return holds.double().mean().item()
