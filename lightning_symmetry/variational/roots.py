"""The square root of a variance."""

from __future__ import annotations

import torch
from torch import Tensor


def root(variance: Tensor) -> Tensor:
    """Return standard deviations whose gradient is finite, namely zero, where the variance is zero.

    There, for inputs that are all zero and no bias, the deviation is the root of the smallest normal number.
    """
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
