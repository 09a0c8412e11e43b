"""Whitened convolutions with canonical parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.surgery.convolution import SETTINGS, convolve, take_settings
from lightning_symmetry.whitening.layer import NewLayer, WhitenedLayer


class ConvMap(NewLayer):
    """What the whitened convolutions share; subclasses name the plain class."""

    _plain: type[nn.Conv1d] | type[nn.Conv2d]

    def _take_settings(self, layer: nn.Module) -> None:
        take_settings(self, layer)

    def _empty(self, **factory: Any) -> nn.Module:
        settings = {name: getattr(self, name) for name in SETTINGS}
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
        self._watch(input)
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
