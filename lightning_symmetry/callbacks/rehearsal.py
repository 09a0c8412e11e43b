"""The training step once more, on a copy of the module and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_symmetry.callbacks.evaluation import QuietTrainer, call_step, quiet_copy


@contextmanager
def rehearsal(
    trainer: pl.Trainer, module: pl.LightningModule
) -> Iterator[tuple[pl.LightningModule, Callable[[Any, int], Any]]]:
    """Give a copy of the module, and what runs its training step on a batch, without gradients and not compiled.

    The module, its batch-norm statistics, metrics and logs, and the random state stay as they are. The copy is in the
    modes of the module, and draws (for dropout, say) the same numbers in every run, on each rank its own.

    Args:
        trainer: The trainer.
        module: The module.

    Returns:
        The copy, and ``step(batch, batch_idx)``, which returns what the training step does.
    """
    with isolate_rng(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(trainer.global_step * trainer.world_size + trainer.global_rank)
        clone = quiet_copy(module)
        clone.trainer = QuietTrainer(trainer)

        def step(batch: Any, batch_idx: int) -> Any:
            with trainer.precision_plugin.train_step_context():
                return call_step(clone.training_step, batch, batch_idx, 0)

        yield clone, step
