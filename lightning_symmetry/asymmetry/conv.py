"""Convolutions with fixed entries."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.asymmetry.layer import AsymmetricLayer, Layout
from lightning_symmetry.surgery.convolution import SETTINGS, convolve, take_settings


class _AsymmetricConv(AsymmetricLayer):
    """What the convolutions share; subclasses name the plain class and the function."""

    _plain: type[nn.Conv1d] | type[nn.Conv2d]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        n_fix: int,
        kappa: float,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        layout: Layout = "entries",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = self._plain(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self._adopt(layer, n_fix, kappa, layout, seed, "")

    def _take_settings(self, layer: nn.Module) -> None:
        take_settings(self, layer)

    def to_layer(self) -> nn.Module:
        """Return the plain convolution with the canonical weight."""
        arguments = {attribute: getattr(self, attribute) for attribute in SETTINGS}
        layer = skip_init(
            self._plain,
            **arguments,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        return self._fill(layer)

    def extra_repr(self) -> str:
        """Describe sizes and constants."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, {self._describe()}"
        )


class AsymmetricConv1d(_AsymmetricConv):
    """One-dimensional convolution with fixed entries, see :class:`AsymmetricLayer`.

    Arguments are those of ``nn.Conv1d``, and those of :class:`AsymmetricLinear` for the constants: ``n_fix`` counts
    entries of the flattened fan-in (layout ``"entries"``) or input filters (``"filters"``) of each output channel. In
    a grouped convolution a row covers the ``in_channels / groups`` channels that it reads.
    """

    _plain = nn.Conv1d

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(N, C, L)``."""
        return convolve(self, input, self.canonical_weight(), self.bias)


class AsymmetricConv2d(_AsymmetricConv):
    """Two-dimensional convolution with fixed entries, see :class:`AsymmetricLayer`.

    Arguments are those of ``nn.Conv2d``, and those of :class:`AsymmetricLinear` for the constants: ``n_fix`` counts
    entries of the flattened fan-in (layout ``"entries"``) or input filters (``"filters"``) of each output channel. In
    a grouped convolution a row covers the ``in_channels / groups`` channels that it reads.
    """

    _plain = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(N, C, H, W)``."""
        return convolve(self, input, self.canonical_weight(), self.bias)
