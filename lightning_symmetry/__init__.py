"""Symmetries of neural network parameters: break them, find them, measure them, use them."""

# Break symmetries
from lightning_symmetry.asymmetry import (
    PRESETS,
    AsymmetricConv1d,
    AsymmetricConv2d,
    AsymmetricLinear,
    EmbeddedMLP,
    FiGLU,
    asymmetrize,
    embed,
    fixed_fraction,
    num_trainable,
)

# Lightning callbacks
from lightning_symmetry.callbacks import (
    PRONG,
    EffectiveRankMonitor,
    FisherConditioning,
    FrobeniusDecay,
    LinearInterpolation,
    SpectralFactorization,
    WaterfallLR,
)

# Data
from lightning_symmetry.data import ArxivData, DigitsData, DigitsGraph, PlanetoidData, TextData, VisionData

# Measure the loss landscape
from lightning_symmetry.landscape import (
    PathResult,
    evaluate_path,
    graph_step,
    interpolate,
    parameter_distance,
    repair,
    supervised_step,
)

# Low-rank factors
from lightning_symmetry.low_rank import (
    LowRankConv2d,
    LowRankEmbedding,
    LowRankLinear,
    effective_rank,
    factorize,
    frobenius_decay,
    marchenko_pastur_quantiles,
    recompose,
    stable_rank,
)

# LightningModules
from lightning_symmetry.modules import (
    AsymmetricModule,
    LowRankLayoutMixin,
    ReconstructionModule,
    SupervisedModule,
    warmup,
)

# The papers' networks
from lightning_symmetry.networks import (
    GNN,
    MLP,
    VGG,
    Autoencoder,
    ResNet,
    ResNet20,
    ResNet110,
    TransformerLM,
    WideResNet,
    token_cross_entropy,
)

# Find and certify symmetries, and align
from lightning_symmetry.permutation import (
    Alignment,
    DynamicNetworkError,
    NotEquivalentError,
    PermutationSpec,
    SymmetryReport,
    align,
    check_equivalence,
    effective_asymmetry,
    match_activations,
    match_weights,
    symmetries,
    trace_permutations,
)

# Natural coordinates
from lightning_symmetry.whitening import (
    collect_statistics,
    condition_number,
    fisher_blocks,
    fisher_matrix,
    reparametrize,
    unwhiten,
    whiten,
    zca_whitening,
)

__version__ = "0.1.0"

__all__ = [
    "GNN",
    "MLP",
    "PRESETS",
    "PRONG",
    "VGG",
    "Alignment",
    "ArxivData",
    "AsymmetricConv1d",
    "AsymmetricConv2d",
    "AsymmetricLinear",
    "AsymmetricModule",
    "Autoencoder",
    "DigitsData",
    "DigitsGraph",
    "DynamicNetworkError",
    "EffectiveRankMonitor",
    "EmbeddedMLP",
    "FiGLU",
    "FisherConditioning",
    "FrobeniusDecay",
    "LinearInterpolation",
    "LowRankConv2d",
    "LowRankEmbedding",
    "LowRankLayoutMixin",
    "LowRankLinear",
    "NotEquivalentError",
    "PathResult",
    "PermutationSpec",
    "PlanetoidData",
    "ReconstructionModule",
    "ResNet",
    "ResNet20",
    "ResNet110",
    "SpectralFactorization",
    "SupervisedModule",
    "SymmetryReport",
    "TextData",
    "TransformerLM",
    "VisionData",
    "WaterfallLR",
    "WideResNet",
    "align",
    "asymmetrize",
    "check_equivalence",
    "collect_statistics",
    "condition_number",
    "effective_asymmetry",
    "effective_rank",
    "embed",
    "evaluate_path",
    "factorize",
    "fisher_blocks",
    "fisher_matrix",
    "fixed_fraction",
    "frobenius_decay",
    "graph_step",
    "interpolate",
    "marchenko_pastur_quantiles",
    "match_activations",
    "match_weights",
    "num_trainable",
    "parameter_distance",
    "recompose",
    "repair",
    "reparametrize",
    "stable_rank",
    "supervised_step",
    "symmetries",
    "token_cross_entropy",
    "trace_permutations",
    "unwhiten",
    "warmup",
    "whiten",
    "zca_whitening",
]
