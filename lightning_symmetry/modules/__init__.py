"""LightningModules."""

from lightning_symmetry.modules.asymmetric import AsymmetricModule
from lightning_symmetry.modules.low_rank_layout import LowRankLayoutMixin
from lightning_symmetry.modules.reconstruction import ReconstructionModule
from lightning_symmetry.modules.schedules import warmup
from lightning_symmetry.modules.supervised import SupervisedModule
from lightning_symmetry.modules.variational import VariationalMixin, VariationalModule
from lightning_symmetry.modules.weight_regression import LEARNING_RATES, WeightRegression, select_learning_rate

__all__ = [
    "LEARNING_RATES",
    "AsymmetricModule",
    "LowRankLayoutMixin",
    "ReconstructionModule",
    "SupervisedModule",
    "VariationalMixin",
    "VariationalModule",
    "WeightRegression",
    "select_learning_rate",
    "warmup",
]
