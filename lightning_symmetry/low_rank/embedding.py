"""Factorised embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.low_rank.layer import MatrixLayer


class LowRankEmbedding(MatrixLayer):
    r"""Embedding with a factorised table, :math:`W = U V^\top`; see :class:`LowRankLayer`.

    ``left`` is U, of shape ``(num_embeddings, rank)``, the table that is looked up; ``right`` is V, of shape
    ``(embedding_dim, rank)``, which maps what was found to ``embedding_dim`` entries. Where more is looked up than the
    table has rows the product is formed first. A row of zeros for ``padding_idx`` stays a row of zeros.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Number of columns.
        rank: Number of columns of the factors.
        padding_idx: Row that gets no gradient.
        sparse: Whether the gradient of ``left`` is sparse.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If the rank is beyond the smaller of the two sizes.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        padding_idx: int | None = None,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self._draw(nn.Embedding(num_embeddings, embedding_dim, padding_idx, sparse=sparse, **factory), rank)

    def _adopt(self, layer: nn.Module, left: Tensor, right: Tensor) -> None:
        super()._adopt(layer, left, right)
        padding = layer.padding_idx
        if padding is not None and not layer.weight.is_meta and not bool(layer.weight[padding].any()):
            with torch.no_grad():
                self.left[padding] = 0

    def _take_settings(self, layer: nn.Module) -> None:
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx, self.sparse = layer.padding_idx, layer.sparse

    def _note_costs(self) -> None:
        self._dense = self.num_embeddings * self.embedding_dim

    def _empty(self, **factory: Any) -> nn.Module:
        return skip_init(
            nn.Embedding,
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            sparse=self.sparse,
            **factory,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Map indices of any shape to vectors, ``(..., embedding_dim)``."""
        if input.numel() > self.num_embeddings and not self.sparse:
            return F.embedding(input, self._watched_rows() @ self.right.mT)
        return F.linear(F.embedding(input, self.left, self.padding_idx, sparse=self.sparse), self.right)

    def _watched_rows(self) -> Tensor:
        """Return U, without a gradient for the padding."""
        padding = self.padding_idx
        if padding is None:
            return self.left
        return torch.cat([self.left[:padding], self.left[padding : padding + 1].detach(), self.left[padding + 1 :]])

    def extra_repr(self) -> str:
        """Describe sizes and rank."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}{padding}"
