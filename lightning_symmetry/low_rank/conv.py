"""Factorised convolutions."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.low_rank.layer import LowRankLayer
from lightning_symmetry.surgery.convolution import SETTINGS, convolve, take_settings

Scheme = Literal["kxk-1x1", "1xk-kx1"]


def check_scheme(scheme: str) -> None:
    """Check the name of a scheme.

    Raises:
        ValueError: If there is none of that name.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"Expected `scheme` to be 'kxk-1x1' or '1xk-kx1' but got {scheme!r}.")


class LowRankConv2d(LowRankLayer):
    r"""Convolution with a factorised kernel, two convolutions in a row; see :class:`LowRankLayer`.

    With C inputs and N outputs of each of the G groups, the kernel of a group is the matrix

    ============= ======================================= ======================================= =================
    scheme        matrix                                  ``right``                               ``left``
    ============= ======================================= ======================================= =================
    ``"kxk-1x1"`` ``(N, C k_h k_w)``                      ``(G r, C, k_h, k_w)``                  ``(G N, r, 1, 1)``
    ``"1xk-kx1"`` ``(N k_h, C k_w)``                      ``(G r, C, 1, k_w)``                    ``(G N, r, k_h, 1)``
    ============= ======================================= ======================================= =================

    ``right`` holds :math:`V^\top` and ``left`` holds U, both as kernels: they are applied as they lie in memory, first
    ``right``, then ``left`` and the bias. Stride, padding of every mode and dilation go to the convolution that has
    that axis of the kernel; padding commutes with the other one, so that the function is exact at the border.

    Args:
        in_channels: Number of input channels, G C.
        out_channels: Number of output channels, G N.
        kernel_size: Size of the kernel.
        rank: The number r of channels in between, in each group.
        scheme: Which two convolutions.
        stride: As in ``nn.Conv2d``.
        padding: As in ``nn.Conv2d``.
        dilation: As in ``nn.Conv2d``.
        groups: The number G of groups, each with factors of its own.
        bias: Whether to add a bias.
        padding_mode: As in ``nn.Conv2d``.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If the rank is beyond the smaller side of the matrix, or there is no such scheme.
    """

    settings_names = ("scheme",)
    _plain: type[nn.Conv1d] | type[nn.Conv2d] = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        rank: int,
        scheme: Scheme = "kxk-1x1",
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        self._draw(self._plain(*sizes, device, dtype), rank, scheme=scheme)

    @classmethod
    def matrices_of(cls, layer: nn.Module, scheme: Scheme = "kxk-1x1") -> Tensor:
        """Return the kernel of a plain convolution as one matrix a group, of shape ``(G, N, M)``."""
        check_scheme(scheme)
        weight = layer.weight.unflatten(0, (layer.groups, -1))
        if scheme == "kxk-1x1":
            return weight.flatten(2)
        if weight.ndim != 5:
            raise ValueError(f"Only a two-dimensional convolution has the scheme {scheme!r}.")
        return weight.transpose(2, 3).flatten(1, 2).flatten(2)

    def _take_settings(self, layer: nn.Module, scheme: Scheme = "kxk-1x1") -> None:
        take_settings(self, layer)
        self.scheme = scheme

    def _note_costs(self) -> None:
        size, stride = math.prod(self.kernel_size), math.prod(self.stride)
        self._dense = self.out_channels * (self.in_channels // self.groups) * size
        rows = self.stride[0] if self.scheme == "1xk-kx1" else 1  # of the first convolution for one of the second
        # Multiply-adds that factors cost more than the product does at one output pixel, and those of the product.
        self._excess = self.left.numel() + rows * self.right.numel() - self._dense
        self._product = self.rank * self._dense
        self._pixels = self.in_channels * stride

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return U and V, of shape ``(G, N, r)`` and ``(G, M, r)``."""
        left = self.left.flatten(2).unflatten(0, (self.groups, -1)).transpose(-1, -2).flatten(1, 2)
        right = self.right.flatten(1).unflatten(0, (self.groups, -1))
        return left, right.mT

    def pack(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return U and V as kernels."""
        outputs, inputs = self.out_channels, self.in_channels // self.groups
        high, wide = self._kernels()
        left = left.reshape(outputs, -1, left.shape[-1]).mT
        return left.unflatten(-1, high), right.mT.reshape(-1, inputs, *wide)

    def _kernels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the kernel sizes of the second and of the first convolution."""
        if self.scheme == "kxk-1x1":
            return (1,) * len(self.kernel_size), self.kernel_size
        return (self.kernel_size[0], 1), (1, self.kernel_size[1])

    def canonical_weight(self) -> Tensor:
        """Return the kernel of the plain convolution, differentiable in the factors."""
        left, right = self.factors()
        product = left @ right.mT
        inputs = self.in_channels // self.groups
        if self.scheme == "kxk-1x1":
            return product.flatten(0, 1).unflatten(-1, (inputs, *self.kernel_size))
        high, wide = self.kernel_size
        return product.flatten(0, 1).view(self.out_channels, high, inputs, wide).transpose(1, 2)

    def _empty(self, **factory: Any) -> nn.Module:
        settings = {name: getattr(self, name) for name in SETTINGS}
        return skip_init(self._plain, **settings, bias=self.bias is not None, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(batch, channels, *pixels)``, with or without the batch axis."""
        if self._excess > 0 and input.numel() // self._pixels * self._excess > self._product:
            return convolve(self, input, self.canonical_weight(), self.bias)
        if self.scheme == "1xk-kx1":
            hidden = self._along(input, 1, self.right, None)
            return self._along(hidden, 0, self.left, self.bias)
        hidden = convolve(self, input, self.right, None)
        second = F.conv1d if self.left.ndim == 3 else F.conv2d
        return second(hidden, self.left, self.bias, groups=self.groups)

    def _along(self, input: Tensor, axis: int, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve along one of the two axes of pixels, with the settings of that axis."""

        def only(value: tuple[int, int], other: int) -> tuple[int, int]:
            return (value[0], other) if axis == 0 else (other, value[1])

        padding = self.padding if isinstance(self.padding, str) else only(self.padding, 0)
        if self.padding_mode != "zeros":
            pad = [0, 0, *self._pad[2:]] if axis == 0 else [*self._pad[:2], 0, 0]
            input, padding = F.pad(input, pad, mode=self.padding_mode), 0
        return F.conv2d(input, kernel, bias, only(self.stride, 1), padding, only(self.dilation, 1), self.groups)

    def extra_repr(self) -> str:
        """Describe sizes and rank."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, rank={self.rank}, "
            f"scheme={self.scheme!r}, stride={self.stride}, padding={self.padding}, groups={self.groups}, "
            f"bias={self.bias is not None}"
        )


class LowRankConv1d(LowRankConv2d):
    """One-dimensional convolution with a factorised kernel, in the scheme ``"kxk-1x1"``; see :class:`LowRankConv2d`."""

    settings_names = ()
    _plain = nn.Conv1d
