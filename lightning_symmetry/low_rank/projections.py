"""The projections of attention: dense ones, factorised ones, and those of a plain module."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_symmetry.low_rank.decomposition import Decomposition
from lightning_symmetry.low_rank.layer import MatrixMap
from lightning_symmetry.low_rank.rank import Rank, choose_rank, is_worthwhile

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class LowRankProjection(MatrixMap):
    """A linear map without bias, of shape ``(N, M)``: ``left`` is U, ``(N, r)``; ``right`` is V, ``(M, r)``."""

    def __init__(self, left: Tensor, right: Tensor, like: nn.Parameter) -> None:
        super().__init__()
        self.set_factors(left, right, like)

    def forward(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map ``(..., M)`` to ``(..., N)``."""
        return F.linear(input @ self.right, self.left, bias)

    def extra_repr(self) -> str:
        """Describe sizes and rank."""
        return f"{len(self.right)}, {len(self.left)}, rank={self.rank}"


class DenseProjection(nn.Module):
    """A linear map without bias that is not factorised; ``weight`` has the shape ``(N, M)``."""

    def __init__(self, weight: Tensor, like: nn.Parameter) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=like.requires_grad)

    def canonical_weight(self) -> Tensor:
        """Return the weight."""
        return self.weight

    def forward(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map ``(..., M)`` to ``(..., N)``."""
        return F.linear(input, self.weight, bias)

    def extra_repr(self) -> str:
        """Describe sizes."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


def projection_rank(decomposition: Decomposition, rank: Rank, min_saving: float) -> int:
    """Return the rank of a projection; 0 if it stays dense, since factors would not save enough.

    Args:
        decomposition: That of its weight.
        rank: The rank that is asked for; a number beyond a projection's full rank, where it has to save, is that.
        min_saving: Share of its parameters that factors must save.

    Raises:
        ValueError: If a number that need not save is beyond the full rank.
    """
    beyond = isinstance(rank, int) and rank > decomposition.full_rank and min_saving >= 0
    number = decomposition.full_rank if beyond else choose_rank(rank, decomposition)
    return number if is_worthwhile(number, decomposition.rows, decomposition.columns, min_saving) else 0


def projections_of(layer: nn.MultiheadAttention) -> dict[str, tuple[Tensor, float, nn.Parameter]]:
    """Return the weight of each projection, the variance of its usual initialisation, and its parameter."""
    size = layer.embed_dim
    if layer.in_proj_weight is not None:
        parts = layer.in_proj_weight.detach().chunk(3)
        found = {key: (part, 0.5 / size, layer.in_proj_weight) for key, part in zip(PROJECTIONS, parts, strict=False)}
    else:
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
        found = {key: (w.detach(), 2 / sum(w.shape), w) for key, w in zip(PROJECTIONS, weights, strict=False)}
    out = layer.out_proj.weight
    return {**found, "out_proj": (out.detach(), 1 / (3 * size), out)}


def biases_of(module: Any) -> tuple[nn.Parameter | None, ...]:
    """Return the biases of an attention module, plain or factorised."""
    out = module.out_proj.bias if isinstance(module, nn.MultiheadAttention) else module.out_proj_bias
    return module.in_proj_bias, out, module.bias_k, module.bias_v
