"""What several callbacks refuse."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before lightning 2.6
    WeightAveraging = StochasticWeightAveraging

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks that average parameters one by one."""


def check_whole_parameters(trainer: pl.Trainer, name: str, instead: str = "Use 'auto' or 'ddp'.") -> None:
    """Check that the trainer's strategy does not shard parameters.

    Args:
        trainer: The trainer.
        name: Name of the callback.
        instead: What to do where it does.

    Raises:
        MisconfigurationException: If it does.
    """
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        raise MisconfigurationException(
            f"{name} needs whole parameters, but {type(trainer.strategy).__name__} shards them. {instead}"
        )
