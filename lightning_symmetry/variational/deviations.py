"""Standard deviations of outputs, from a linear map of squared inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_symmetry.variational.sums import at_least_single


def squares_of(input: Tensor) -> Tensor:
    """Return the squares of an input, in float32 at least."""
    return at_least_single(input).square()


def map_squares(
    function: Callable[[Tensor, Tensor, Tensor | None], Tensor], squares: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Map squared inputs in the type in which the layer computes, but never in float16, which sums of them overflow.

    Args:
        function: The layer's linear map, of input, weight and bias.
        squares: The squares.
        weight: Variances of the weight.
        bias: Variances of the bias, or None.
    """
    device, dtype = squares.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        if torch.get_autocast_dtype(device) != torch.float16:
            return function(squares, weight, bias)
        dtype = torch.float32
    dtype = torch.float32 if dtype == torch.float16 else dtype
    with torch.autocast(device, enabled=False):
        return function(squares.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def root(variance: Tensor) -> Tensor:
    """Return standard deviations whose gradient is finite, namely zero, where the variance is zero.

    There, for inputs that are all zero and no bias, the deviation is the root of the smallest normal number.
    """
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
