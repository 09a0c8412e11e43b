"""Lightning callbacks."""

from lightning_symmetry.callbacks.linear_interpolation import LinearInterpolation

__all__ = ["LinearInterpolation"]
