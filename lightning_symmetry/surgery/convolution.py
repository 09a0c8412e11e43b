"""Convolve with a weight of one's own and the settings of a plain layer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

SETTINGS = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)


def take_settings(layer: Any, plain: nn.Module) -> None:
    """Give a layer the settings of a plain convolution."""
    for name in SETTINGS:
        setattr(layer, name, getattr(plain, name))
    if layer.padding_mode != "zeros":
        layer._pad = list(plain._reversed_padding_repeated_twice)


def convolve(layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with the settings of a layer, as ``nn.Conv1d`` and ``nn.Conv2d`` do."""
    convolution = F.conv1d if weight.ndim == 3 else F.conv2d
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input, padding = F.pad(input, layer._pad, mode=layer.padding_mode), 0
    return convolution(input, weight, bias, layer.stride, padding, layer.dilation, layer.groups)
