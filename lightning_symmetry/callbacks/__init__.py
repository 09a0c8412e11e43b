"""Lightning callbacks."""

from lightning_symmetry.callbacks.calibration import Calibration
from lightning_symmetry.callbacks.effective_rank_monitor import EffectiveRankMonitor
from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning
from lightning_symmetry.callbacks.frobenius_decay import FrobeniusDecay
from lightning_symmetry.callbacks.linear_interpolation import LinearInterpolation
from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.callbacks.spectral_factorization import SpectralFactorization
from lightning_symmetry.callbacks.waterfall import WaterfallLR

__all__ = [
    "PRONG",
    "Calibration",
    "EffectiveRankMonitor",
    "FisherConditioning",
    "FrobeniusDecay",
    "LinearInterpolation",
    "SpectralFactorization",
    "WaterfallLR",
]
