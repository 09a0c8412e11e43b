"""Low-rank factors: factorised layers, ``factorize``, Frobenius decay, effective rank."""

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.conv import LowRankConv1d, LowRankConv2d
from lightning_symmetry.low_rank.decay import (
    add_frobenius_decay_,
    decay_factors_,
    frobenius_decay,
    l2_decay,
    low_rank_maps,
)
from lightning_symmetry.low_rank.decomposition import Decomposition, DecompositionError
from lightning_symmetry.low_rank.embedding import LowRankEmbedding
from lightning_symmetry.low_rank.factorize import factorize
from lightning_symmetry.low_rank.initialisation import initial_factors
from lightning_symmetry.low_rank.layer import LowRankLayer, LowRankMap
from lightning_symmetry.low_rank.linear import LowRankLinear
from lightning_symmetry.low_rank.marchenko_pastur import marchenko_pastur_cdf, marchenko_pastur_quantiles
from lightning_symmetry.low_rank.rank import break_even, choose_rank, saving
from lightning_symmetry.low_rank.recompose import recompose
from lightning_symmetry.low_rank.report import FactorizationReport, FactorizedLayer
from lightning_symmetry.low_rank.spectrum import effective_rank, singular_values, stable_rank

__all__ = [
    "Decomposition",
    "DecompositionError",
    "FactorizationReport",
    "FactorizedLayer",
    "LowRankConv1d",
    "LowRankConv2d",
    "LowRankEmbedding",
    "LowRankLayer",
    "LowRankLinear",
    "LowRankMap",
    "LowRankMultiheadAttention",
    "add_frobenius_decay_",
    "break_even",
    "choose_rank",
    "decay_factors_",
    "effective_rank",
    "factorize",
    "frobenius_decay",
    "initial_factors",
    "l2_decay",
    "low_rank_maps",
    "marchenko_pastur_cdf",
    "marchenko_pastur_quantiles",
    "recompose",
    "saving",
    "singular_values",
    "stable_rank",
]
