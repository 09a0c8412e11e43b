"""Variational embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.settings import VARIANCE, Diagonal, Mode, Posterior, Prior


class VariationalEmbedding(VariationalLayer):
    r"""Embedding with a Gaussian posterior over its table; see :class:`VariationalLayer`.

    .. math:: y = W_i + \sqrt{d_i} \odot \epsilon + K^{-1/2} \sum_k z_k V_{ki}

    In the mode ``"local"`` an example, an entry of the first axis of the indices, has one z; :math:`\epsilon` is drawn
    for each look-up, also where one example looks the same row up twice. Positions that are looked up once for a whole
    batch are no examples: give them the mode ``"weight"``. The row of ``padding_idx`` is fixed: it has no gradient, no
    noise and no part in the divergence.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Number of columns.
        rank: K; 0 is mean-field.
        padding_idx: Row that is fixed.
        diagonal: ``"constant"`` or ``"learned"``.
        variance: d at the beginning.
        prior: Variance of the prior, ``"fan_in"`` (1: an output has one input), ``"fan_in:100"`` or ``"optimal"``.
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
        num_embeddings: int,
        embedding_dim: int,
        rank: int = 4,
        padding_idx: int | None = None,
        diagonal: Diagonal = "constant",
        variance: float = VARIANCE,
        prior: Prior = "fan_in",
        mode: Mode = "local",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        table = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._adopt(table, Posterior(rank, diagonal, variance, prior, mode), seed, "")

    def _take_settings(self, layer: nn.Module) -> None:
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx = layer.padding_idx

    def _fixed_entries(self) -> tuple[Tensor | None, Tensor | None]:
        if self.padding_idx is None:
            return None, None
        rows = torch.arange(self.num_embeddings, device=self.weight.device).unsqueeze(1)
        return rows != self.padding_idx, None

    def _map(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding(input, weight, self.padding_idx)

    def _low_rank_noise(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.ndim == 0:
            return self._low_rank_noise(input.unsqueeze(0), weight, bias).squeeze(0)
        found = weight.index_select(1, input.flatten()).unflatten(1, input.shape)
        return torch.einsum("bk,kb...->b...", self._z(input), found)

    def _deviation(self, input: Tensor) -> Tensor:
        if self.weight_log_variance is None:
            deviation = self.weight.new_full((1,), math.sqrt(self.posterior.variance))
        else:
            deviation = torch.exp(0.5 * F.embedding(input, self.weight_log_variance))
        return deviation if self._trainable is None else deviation * (input != self.padding_idx).unsqueeze(-1)

    def extra_repr(self) -> str:
        """Describe sizes and posterior."""
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}{self._describe()}"
