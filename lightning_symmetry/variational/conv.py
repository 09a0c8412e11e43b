"""Variational convolutions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_symmetry.surgery.convolution import convolve, take_settings
from lightning_symmetry.variational.deviations import map_squares, root, squares_of
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.settings import VARIANCE, Diagonal, Mode, Posterior, Prior


class _VariationalConv(VariationalLayer):
    """What the convolutions share; subclasses name the plain class."""

    _plain: type[nn.Conv1d] | type[nn.Conv2d]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        rank: int = 4,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        diagonal: Diagonal = "constant",
        variance: float = VARIANCE,
        prior: Prior = "fan_in",
        mode: Mode = "local",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        posterior = Posterior(rank, diagonal, variance, prior, mode)
        self._adopt(self._plain(*sizes, device, dtype), posterior, seed, "")

    def _take_settings(self, layer: nn.Module) -> None:
        take_settings(self, layer)

    def _map(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(self, input, weight, bias)

    def _low_rank_noise(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.ndim == self.weight.ndim - 1:
            return self._low_rank_noise(input.unsqueeze(0), weight, bias).squeeze(0)
        kernels = self._by_group(weight)
        hidden = convolve(self, input, kernels, None if bias is None else self._by_group(bias))
        z = self._z(input).to(hidden.dtype)
        hidden = hidden.unflatten(1, (self.groups, self.posterior.rank, -1))
        if self.groups == 1:
            pixels = hidden.shape[4:]
            return torch.bmm(z.unsqueeze(1), hidden.flatten(1, 2).flatten(2)).reshape(
                len(z), self.out_channels, *pixels
            )
        return torch.einsum("bk,bgko...->bgo...", z, hidden).flatten(1, 2)

    def _by_group(self, factors: Tensor) -> Tensor:
        """Return the K kernels of each output as one kernel with K times the outputs, a group's next to each other."""
        return factors.unflatten(1, (self.groups, -1)).transpose(0, 1).flatten(0, 2)

    def _deviation(self, input: Tensor) -> Tensor:
        if input.ndim == self.weight.ndim - 1:
            return self._deviation(input.unsqueeze(0)).squeeze(0)
        squares = squares_of(input)
        if self.weight_log_variance is not None:
            return root(map_squares(self._map, squares, *self._variances()))
        if self._trainable is None:
            sums = squares.unflatten(1, (self.groups, -1)).sum(2)
            ones = sums.new_ones(self.groups, 1, *self.kernel_size)
            sums = map_squares(self._map, sums, ones, None)
            sums = sums if self.groups == 1 else sums.repeat_interleave(self.out_channels // self.groups, 1)
        else:
            sums = map_squares(self._map, squares, *self._variances())
        return root(sums if self.bias is None else sums + 1) * math.sqrt(self.posterior.variance)

    def extra_repr(self) -> str:
        """Describe sizes and posterior."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, bias={self.bias is not None}, {self._describe()}"
        )


class VariationalConv1d(_VariationalConv):
    """One-dimensional convolution with a Gaussian posterior; all is as for :class:`VariationalConv2d` but the axes."""

    _plain = nn.Conv1d


class VariationalConv2d(_VariationalConv):
    r"""Two-dimensional convolution with a Gaussian posterior over kernel and bias; see :class:`VariationalLayer`.

    .. math:: y = W * x + b + \sqrt{d_w * x^2 + d_b} \odot \epsilon + K^{-1/2} \sum_k z_k (V_k * x + v_{bk})

    In the mode ``"local"`` an example has one z for all pixels, which is exact, and an :math:`\epsilon` for each pixel
    and channel of the output, an approximation: variances are exact, covariances between pixels are those of the
    low-rank part only. The noise goes through the same stride, padding, dilation and groups as the mean.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        kernel_size: Size of the kernel.
        rank: K; 0 is mean-field.
        stride: As in ``nn.Conv2d``.
        padding: As in ``nn.Conv2d``.
        dilation: As in ``nn.Conv2d``.
        groups: As in ``nn.Conv2d``.
        bias: Whether to add a bias.
        padding_mode: As in ``nn.Conv2d``.
        diagonal: ``"constant"`` or ``"learned"``.
        variance: d at the beginning.
        prior: Variance of the prior, ``"fan_in"``, ``"fan_in:100"`` or ``"optimal"``.
        mode: ``"local"``, ``"shared"``, ``"weight"`` or ``"mean"``.
        seed: Seed of the first factors.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If a setting is none, see :class:`~lightning_symmetry.variational.settings.Posterior`.

    Source: Tomczak, Swaroop, Turner, Efficient Low Rank Gaussian Variational Inference for Neural Networks (2020).
    """

    _plain = nn.Conv2d
