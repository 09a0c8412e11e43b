"""Whitened convolutions with canonical parameters."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.whitening.layer import NewLayer, WhitenedLayer

_SETTINGS = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)


def convolve(layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with the settings of a layer, as ``nn.Conv1d`` and ``nn.Conv2d`` do."""
    convolution = F.conv1d if weight.ndim == 3 else F.conv2d
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input, padding = F.pad(input, _both_sides(layer), mode=layer.padding_mode), 0
    return convolution(input, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def _both_sides(layer: Any) -> list[int]:
    """Return the padding on both sides of each axis, last axis first, as ``F.pad`` wants it."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(padding, padding) for padding in layer.padding]
    return [size for pair in reversed(sides) for size in pair]


class ConvMap(NewLayer):
    """What the whitened convolutions share; subclasses name the plain class."""

    _plain: type[nn.Conv1d] | type[nn.Conv2d]

    def _take_settings(self, layer: nn.Module) -> None:
        for name in _SETTINGS:
            setattr(self, name, getattr(layer, name))

    def _empty(self, **factory: Any) -> nn.Module:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return skip_init(self._plain, **settings, bias=self.bias is not None, **factory)

    def extra_repr(self) -> str:
        """Describe sizes and coefficients."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, {self._describe()}"
        )


class _WhitenedConv(ConvMap, WhitenedLayer):
    """A convolution with gradients in whitened coordinates."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(batch, channels, *pixels)``, with or without the batch axis."""
        return convolve(self, input, *self.whitened_parameters())


class WhitenedConv1d(_WhitenedConv):
    """One-dimensional convolution with gradients in whitened coordinates; see :class:`WhitenedConv2d`."""

    _plain = nn.Conv1d


class WhitenedConv2d(_WhitenedConv):
    r"""Convolution with gradients in whitened coordinates; see :class:`WhitenedLayer`.

    Channels are whitened over samples and pixels, the same U for each tap of the kernel (the paper's 1x1 convolution),
    each group by itself. Where the input is padded with zeros the whitened layer sees :math:`U (0 - c)`, as if it were
    padded with c before: that is what each tap of the folded kernel :math:`W = V U` does, so that the function is
    exact at the border: :math:`\tilde g_b = g_b - \sum_k \tilde G_{W,k}\, c` over the taps k.
    """

    _plain = nn.Conv2d
