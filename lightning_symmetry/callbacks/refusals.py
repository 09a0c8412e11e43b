"""Callbacks that several others refuse."""

from __future__ import annotations

from lightning.pytorch.callbacks import StochasticWeightAveraging

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before lightning 2.6
    WeightAveraging = StochasticWeightAveraging

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks that average parameters one by one."""
