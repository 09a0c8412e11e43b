"""LightningModules."""

from lightning_symmetry.modules.asymmetric import AsymmetricModule
from lightning_symmetry.modules.low_rank_layout import LowRankLayoutMixin
from lightning_symmetry.modules.reconstruction import ReconstructionModule
from lightning_symmetry.modules.schedules import warmup
from lightning_symmetry.modules.supervised import SupervisedModule

__all__ = ["AsymmetricModule", "LowRankLayoutMixin", "ReconstructionModule", "SupervisedModule", "warmup"]
