"""Multi-head attention with factorised projections."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from typing_extensions import Self

from lightning_symmetry.low_rank.attention_masks import additive, extend, merge
from lightning_symmetry.low_rank.decomposition import Decomposition
from lightning_symmetry.low_rank.initialisation import Init, initial_factors, kept_variance, layer_generator
from lightning_symmetry.low_rank.projections import (
    PROJECTIONS,
    DenseProjection,
    LowRankProjection,
    biases_of,
    projection_rank,
    projections_of,
)
from lightning_symmetry.low_rank.rank import Rank
from lightning_symmetry.surgery import ReparametrizedLayer


class LowRankMultiheadAttention(ReparametrizedLayer):
    r"""Multi-head attention with factorised projections; a drop-in for ``nn.MultiheadAttention``.

    The projections of queries, keys and values, which ``nn.MultiheadAttention`` holds in one fused ``in_proj_weight``,
    and that of the output have factors of their own, :math:`W_q = U_q V_q^\top` and so on. Those for which factors
    would not save enough stay as they are, as modules of their own. Biases keep their names. Attention is
    ``scaled_dot_product_attention`` where no weights are asked for. Nested tensors are not supported.

    Attributes:
        q_proj: Projection of the queries: :class:`LowRankProjection` or :class:`DenseProjection`.
        k_proj: That of the keys.
        v_proj: That of the values.
        out_proj: That of the output.
        in_proj_bias: Biases of queries, keys and values, of shape ``(3 embed_dim,)``, or None.
        out_proj_bias: Bias of the output, or None.
        bias_k: Row appended to the keys, or None.
        bias_v: Row appended to the values, or None.
    """

    in_proj_bias: nn.Parameter | None
    out_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    @classmethod
    def from_layer(
        cls,
        layer: nn.MultiheadAttention,
        rank: Rank = 0.25,
        init: Init = "spectral",
        *,
        seed: int = 0,
        name: str = "",
        min_saving: float = -1,
    ) -> Self:
        r"""Build the module from the plain one, whose biases it takes over.

        Args:
            layer: The plain module; it is not changed.
            rank: Rank of each projection, see :func:`~lightning_symmetry.low_rank.rank.choose_rank`.
            init: Initialisation of the factors. Entries of the products of random ones have the mean square of the
                projection's: of a new module that of its own initialisation.
            seed: Seed of random factors.
            name: Name of the module in its network.
            min_saving: Projections whose factors would save a smaller share of their parameters stay dense; at 0, so
                do those that would save nothing.

        Raises:
            ValueError: If the rank does not fit, the initialisation does not exist, or a weight is not finite.
        """
        generator = layer_generator(seed, name)

        def project(weight: Tensor, usual: float, like: nn.Parameter) -> LowRankProjection | DenseProjection:
            decomposition = Decomposition(weight.unsqueeze(0))
            number = projection_rank(decomposition, rank, min_saving)
            if not number:
                return DenseProjection(weight, like)
            precision, variance = torch.finfo(weight.dtype).eps, kept_variance(weight, usual)
            return LowRankProjection(
                *initial_factors(decomposition, number, init, variance, generator, precision), like
            )

        return cls._with({key: project(*found) for key, found in projections_of(layer).items()}, layer)

    @classmethod
    def of_ranks(cls, layer: nn.MultiheadAttention, ranks: Mapping[str, int]) -> Self:
        """Build the module from the plain one, whose biases it takes over, with factors that are zero.

        Args:
            layer: The plain module; it is not changed.
            ranks: The rank of each of the four projections by name; 0 for one that stays dense and keeps its weight.

        Raises:
            ValueError: If a projection has no rank.
        """
        if missing := [key for key in PROJECTIONS if key not in ranks]:
            raise ValueError(f"Expected a rank for each projection but there is none for {', '.join(missing)}.")

        def project(key: str, weight: Tensor, like: nn.Parameter) -> LowRankProjection | DenseProjection:
            if not ranks[key]:
                return DenseProjection(weight, like)
            return LowRankProjection(*(weight.new_zeros(1, size, ranks[key]) for size in weight.shape), like)

        found = projections_of(layer).items()
        return cls._with({key: project(key, weight, like) for key, (weight, _, like) in found}, layer)

    @classmethod
    def _with(cls, projections: Mapping[str, nn.Module], layer: nn.MultiheadAttention) -> Self:
        """Build the module from its projections and from what else the plain one has."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        for setting in ("embed_dim", "kdim", "vdim", "num_heads", "dropout", "batch_first", "head_dim"):
            setattr(self, setting, getattr(layer, setting))
        self.add_zero_attn, self._qkv_same_embed_dim = layer.add_zero_attn, layer._qkv_same_embed_dim
        for key, projection in projections.items():
            self.add_module(key, projection)
        self.register_parameter("in_proj_bias", layer.in_proj_bias)
        self.register_parameter("out_proj_bias", layer.out_proj.bias)
        self.register_parameter("bias_k", layer.bias_k)
        self.register_parameter("bias_v", layer.bias_v)
        return self.train(layer.training)

    def projections(self) -> dict[str, LowRankProjection | DenseProjection]:
        """Return the four projections by name."""
        return {key: getattr(self, key) for key in PROJECTIONS}

    def canonical_weight(self) -> Tensor:
        """Return the ``in_proj_weight`` that the plain module would have, of shape ``(3 embed_dim, embed_dim)``.

        Raises:
            ValueError: If keys or values have sizes of their own, so that there is no such tensor.
        """
        if not self._qkv_same_embed_dim:
            raise ValueError("Keys and values have sizes of their own: ask each of `projections()` for its weight.")
        return torch.cat([getattr(self, key).canonical_weight() for key in PROJECTIONS[:3]])

    @torch.no_grad()
    def to_layer(self) -> nn.MultiheadAttention:
        """Return the plain module with the products as its weights."""
        out = self.out_proj.canonical_weight()
        layer = skip_init(
            nn.MultiheadAttention,
            self.embed_dim,
            self.num_heads,
            self.dropout,
            bias=self.in_proj_bias is not None,
            add_bias_kv=self.bias_k is not None,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device=out.device,
            dtype=out.dtype,
        )
        values: list[tuple[nn.Parameter, Tensor]] = [(layer.out_proj.weight, out)]
        wanted = {layer.out_proj.weight: next(self.out_proj.parameters()).requires_grad}
        if self._qkv_same_embed_dim:
            values.append((layer.in_proj_weight, self.canonical_weight()))
            wanted[layer.in_proj_weight] = next(self.q_proj.parameters()).requires_grad
        else:
            for key in PROJECTIONS[:3]:
                parameter, projection = getattr(layer, f"{key}_weight"), getattr(self, key)
                values.append((parameter, projection.canonical_weight()))
                wanted[parameter] = next(projection.parameters()).requires_grad
        for parameter, mine in zip(biases_of(layer), biases_of(self), strict=True):
            if mine is not None:
                values.append((parameter, mine))
                wanted[parameter] = mine.requires_grad
        for parameter, value in values:
            parameter.copy_(value)
            parameter.requires_grad_(wanted[parameter])
        return layer.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments, shapes and results are those of ``nn.MultiheadAttention``.

        Raises:
            ValueError: If ``is_causal`` comes without the ``attn_mask`` that it describes, or a tensor is nested.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(f"{type(self).__name__} takes no nested tensors: pad them and give `key_padding_mask`.")
        if is_causal and attn_mask is None:
            raise ValueError("`is_causal` is a hint about `attn_mask` and needs it.")
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q = self.q_proj(query, biases[0])
        k, v = self._extended(self.k_proj(key, biases[1]), self.v_proj(value, biases[2]))
        padding = additive(key_padding_mask, q.dtype)
        mask = additive(attn_mask, q.dtype)
        appended = k.shape[1] - key.shape[1]
        causal = is_causal and padding is None and not need_weights
        mask = None if causal else merge(extend(mask, appended), extend(padding, appended), len(q), self.num_heads)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        output = self.out_proj(attended.transpose(1, 2).flatten(2), self.out_proj_bias)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned row and that of zeros, where there are any."""
        for rows in ((self.bias_k, self.bias_v), (0, 0) if self.add_zero_attn else (None, None)):
            if rows[0] is not None:
                key, value = (_append(x, row) for x, row in zip((key, value), rows, strict=True))
        return key, value

    def extra_repr(self) -> str:
        """Describe sizes."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _append(sequence: Tensor, row: Tensor | int) -> Tensor:
    if isinstance(row, int):
        return F.pad(sequence, (0, 0, 0, 1))
    return torch.cat([sequence, row.to(sequence.dtype).expand(len(sequence), -1, -1)], 1)
