"""Convolutions with fixed entries."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.asymmetry.layer import AsymmetricLayer, Layout
from lightning_symmetry.surgery.convolution import SETTINGS, convolve, take_settings


class _AsymmetricConv(AsymmetricLayer):
    """What the convolutions share; subclasses name the plain class."""

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
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        self._adopt(self._plain(*sizes, device, dtype), n_fix, kappa, layout, seed, "")

    def _take_settings(self, layer: nn.Module) -> None:
        take_settings(self, layer)

    def _empty(self, **factory: Any) -> nn.Module:
        settings = {name: getattr(self, name) for name in SETTINGS}
        return skip_init(self._plain, **settings, bias=self.bias is not None, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(batch, channels, *pixels)``, with or without the batch axis."""
        return convolve(self, input, self.canonical_weight(), self.bias)

    def extra_repr(self) -> str:
        """Describe sizes and constants."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, {self._describe()}"
        )


class AsymmetricConv1d(_AsymmetricConv):
    """One-dimensional convolution with fixed entries; all is as for :class:`AsymmetricConv2d`, but for the axes."""

    _plain = nn.Conv1d


class AsymmetricConv2d(_AsymmetricConv):
    r"""Two-dimensional convolution with fixed entries, :math:`y = W' * x + b`; see :class:`AsymmetricLayer`.

    A row of the mask belongs to an output channel. In a grouped convolution it covers the ``in_channels / groups``
    channels that this output reads.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        kernel_size: Size of the kernel.
        n_fix: Number of fixed entries of the flattened fan-in (layout ``"entries"``), or of fixed input filters
            (``"filters"``), of each output channel.
        kappa: Standard deviation of the constants; 0 gives fixed zeros (Theorem 3).
        stride: As in ``nn.Conv2d``.
        padding: As in ``nn.Conv2d``.
        dilation: As in ``nn.Conv2d``.
        groups: As in ``nn.Conv2d``.
        bias: Whether to add a bias.
        padding_mode: As in ``nn.Conv2d``.
        layout: ``"entries"`` fixes single entries of the kernel, ``"filters"`` whole connections between channels.
        seed: Seed of mask and constants.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If rows cannot be made distinct with at least one trainable entry each, kappa < 0, or the layout is
            unknown.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 4.1, eq. 2, figure 2.
    """

    _plain = nn.Conv2d
