"""Variational linear layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_symmetry.variational.deviations import map_squares, root, squares_of
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.settings import VARIANCE, Diagonal, Mode, Posterior, Prior


class VariationalLinear(VariationalLayer):
    r"""Linear layer with a Gaussian posterior over weight and bias; see :class:`VariationalLayer`.

    .. math:: y = W x + b + \sqrt{d_w x^2 + d_b} \odot \epsilon + K^{-1/2} \sum_k z_k (V_k x + v_{bk})

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        rank: K; 0 is mean-field.
        bias: Whether to add a bias.
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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 4,
        bias: bool = True,
        diagonal: Diagonal = "constant",
        variance: float = VARIANCE,
        prior: Prior = "fan_in",
        mode: Mode = "local",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        posterior = Posterior(rank, diagonal, variance, prior, mode)
        self._adopt(nn.Linear(in_features, out_features, bias, device, dtype), posterior, seed, "")

    def _take_settings(self, layer: nn.Module) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def _map(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def _low_rank_noise(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.ndim == 1:
            return self._low_rank_noise(input.unsqueeze(0), weight, bias).squeeze(0)
        hidden = F.linear(input, weight.flatten(0, 1), None if bias is None else bias.flatten())
        z = self._z(input).to(hidden.dtype)
        if input.ndim == 2:
            return torch.bmm(z.unsqueeze(1), hidden.unflatten(-1, (-1, self.out_features))).squeeze(1)
        return torch.einsum("bk,b...ko->b...o", z, hidden.unflatten(-1, (-1, self.out_features)))

    def _deviation(self, input: Tensor) -> Tensor:
        squares = squares_of(input)
        if self.weight_log_variance is None:
            sums = squares.sum(-1, keepdim=True) if self._trainable is None else self._variance(squares)
            return root(sums if self.bias is None else sums + 1) * math.sqrt(self.posterior.variance)
        return root(self._variance(squares))

    def _variance(self, squares: Tensor) -> Tensor:
        return map_squares(F.linear, squares, *self._variances())

    def extra_repr(self) -> str:
        """Describe sizes and posterior."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self._describe()}"
