"""Factorised linear layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.low_rank.layer import MatrixLayer


class LowRankLinear(MatrixLayer):
    r"""Linear layer with a factorised weight, :math:`y = U (V^\top x) + b`; see :class:`LowRankLayer`.

    ``left`` is U, of shape ``(out_features, rank)``; ``right`` is V, of shape ``(in_features, rank)``. The forward pass
    is two matrix products that read both as they lie in memory: ``(x @ right) @ left.T``.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        rank: Number of columns of the factors.
        bias: Whether to add a bias.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If the rank is beyond the smaller of the two sizes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._draw(nn.Linear(in_features, out_features, bias, device, dtype), rank)

    def _take_settings(self, layer: nn.Module) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def _note_costs(self) -> None:
        self._dense = self.out_features * self.in_features
        self._excess = self.rank * (self.out_features + self.in_features) - self._dense

    def _empty(self, **factory: Any) -> nn.Module:
        return skip_init(nn.Linear, self.in_features, self.out_features, bias=self.bias is not None, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        if self._excess > 0 and input.numel() // self.in_features * self._excess > self.rank * self._dense:
            return F.linear(input, self.canonical_weight(), self.bias)
        return F.linear(input @ self.right, self.left, self.bias)

    def extra_repr(self) -> str:
        """Describe sizes and rank."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}"
        )
