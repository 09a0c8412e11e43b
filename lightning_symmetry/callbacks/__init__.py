"""Lightning callbacks."""

from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning
from lightning_symmetry.callbacks.linear_interpolation import LinearInterpolation
from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.callbacks.waterfall import WaterfallLR

__all__ = ["PRONG", "FisherConditioning", "LinearInterpolation", "WaterfallLR"]
