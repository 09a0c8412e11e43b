"""Gaussian posteriors of diagonal plus low-rank covariance: variational layers, ``to_variational``, divergence."""

from lightning_symmetry.variational.conv import VariationalConv1d, VariationalConv2d
from lightning_symmetry.variational.convert import to_mean, to_variational
from lightning_symmetry.variational.elbo import kl_warmup, negative_elbo
from lightning_symmetry.variational.embedding import VariationalEmbedding
from lightning_symmetry.variational.gaussian import gaussian_kl
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.layout import apply_layout, layout_of
from lightning_symmetry.variational.linear import VariationalLinear
from lightning_symmetry.variational.posterior import (
    check_finite,
    kl_divergence,
    optimal_prior_variances,
    sample_network,
    sampling_mode,
    variational_layers,
)
from lightning_symmetry.variational.predictive import Predictive, predictive
from lightning_symmetry.variational.settings import Posterior

__all__ = [
    "Posterior",
    "Predictive",
    "VariationalConv1d",
    "VariationalConv2d",
    "VariationalEmbedding",
    "VariationalLayer",
    "VariationalLinear",
    "apply_layout",
    "check_finite",
    "gaussian_kl",
    "kl_divergence",
    "kl_warmup",
    "layout_of",
    "negative_elbo",
    "optimal_prior_variances",
    "predictive",
    "sample_network",
    "sampling_mode",
    "to_mean",
    "to_variational",
    "variational_layers",
]
