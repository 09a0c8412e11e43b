"""Refuse strategies that shard parameters."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_whole_parameters(trainer: pl.Trainer, name: str, instead: str = "Use 'auto' or 'ddp'.") -> None:
    """Check that the trainer's strategy does not shard parameters.

    Args:
        trainer: The trainer.
        name: Name of the callback or module.
        instead: What to do where it does.

    Raises:
        MisconfigurationException: If it does.
    """
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        raise MisconfigurationException(
            f"{name} needs whole parameters, but {type(trainer.strategy).__name__} shards them. {instead}"
        )
