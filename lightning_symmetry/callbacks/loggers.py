"""What callbacks draw on, besides the numbers that every logger takes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger


def experiments_with(trainer: pl.Trainer, method: str) -> list[Any]:
    """Return what the trainer's loggers write to, where it has a method.

    Args:
        trainer: The trainer.
        method: Name of a method of TensorBoard's writer, such as ``"add_figure"``.

    Returns:
        The ``experiment`` of each logger that has one with this method; that of ``fast_dev_run``'s dummy, which takes
        everything and keeps nothing, is not among them.
    """
    loggers = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
    experiments = [getattr(logger, "experiment", None) for logger in loggers]
    return [experiment for experiment in experiments if hasattr(experiment, method)]
