"""Normalisation of images over their channels."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["layer", "batch"]


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each pixel of ``(N, C, H, W)`` images.

    In channels-last memory the permutations are views and nothing is copied.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each pixel."""
        pixels = input.permute(0, 2, 3, 1)
        pixels = F.layer_norm(pixels, self.normalized_shape, self.weight, self.bias, self.eps)
        return pixels.permute(0, 3, 1, 2)


def image_norm(norm: Norm, channels: int) -> nn.Module:
    """Return the normalisation of an image network.

    Raises:
        ValueError: If the name is unknown.
    """
    if norm == "layer":
        return ChannelNorm(channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    raise ValueError(f"Expected `norm` to be 'layer' or 'batch' but got {norm!r}.")


def normalise_and_activate(norm: nn.Module, activation: nn.Module, input: Tensor) -> Tensor:
    """Return ``activation(norm(input))``, in one step where the activation can and nobody listens to the modules."""
    fused = getattr(activation, "after_layer_norm", None)
    heard = any(m._forward_hooks or m._forward_pre_hooks for m in (norm, activation))
    if fused is not None and type(norm) is ChannelNorm and not heard:
        return fused(input, norm)
    return activation(norm(input))
