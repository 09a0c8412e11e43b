"""What several callbacks refuse."""

from __future__ import annotations

from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_symmetry.modules.whole_parameters import check_whole_parameters

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before lightning 2.6
    WeightAveraging = StochasticWeightAveraging

__all__ = ["AVERAGING", "check_whole_parameters"]

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks that average parameters one by one."""
