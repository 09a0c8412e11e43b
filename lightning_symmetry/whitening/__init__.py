"""Natural coordinates: whitened layers and the conditioning of the Fisher matrix."""

from lightning_symmetry.whitening.borrowed import BorrowedLayer
from lightning_symmetry.whitening.coefficients import (
    Whitening,
    WhiteningError,
    zca_whitening,
    zca_whitening_from_samples,
)
from lightning_symmetry.whitening.collect import collect_statistics, whitened_layers
from lightning_symmetry.whitening.conditioning import condition_number, extreme_eigenvalues
from lightning_symmetry.whitening.conv import WhitenedConv1d, WhitenedConv2d
from lightning_symmetry.whitening.coordinates import transform_fisher
from lightning_symmetry.whitening.explicit import (
    ExplicitWhitenedConv1d,
    ExplicitWhitenedConv2d,
    ExplicitWhitenedLayer,
    ExplicitWhitenedLinear,
)
from lightning_symmetry.whitening.fisher import fisher_blocks, fisher_matrix
from lightning_symmetry.whitening.layer import HasWhitening, WhitenedLayer
from lightning_symmetry.whitening.linear import WhitenedLinear
from lightning_symmetry.whitening.reparametrize import (
    largest_eigenvalue,
    load_whitening_state,
    reparametrize,
    rescale_units,
    whitening_state,
)
from lightning_symmetry.whitening.statistics import InputStatistics
from lightning_symmetry.whitening.whiten import unwhiten, whiten

__all__ = [
    "BorrowedLayer",
    "ExplicitWhitenedConv1d",
    "ExplicitWhitenedConv2d",
    "ExplicitWhitenedLayer",
    "ExplicitWhitenedLinear",
    "HasWhitening",
    "InputStatistics",
    "WhitenedConv1d",
    "WhitenedConv2d",
    "WhitenedLayer",
    "WhitenedLinear",
    "Whitening",
    "WhiteningError",
    "collect_statistics",
    "condition_number",
    "extreme_eigenvalues",
    "fisher_blocks",
    "fisher_matrix",
    "largest_eigenvalue",
    "load_whitening_state",
    "reparametrize",
    "rescale_units",
    "transform_fisher",
    "unwhiten",
    "whiten",
    "whitened_layers",
    "whitening_state",
    "zca_whitening",
    "zca_whitening_from_samples",
]
