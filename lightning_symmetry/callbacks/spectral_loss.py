"""The loss of a batch as the training step gives it, without a trace."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_symmetry.callbacks.evaluation import loss_in
from lightning_symmetry.callbacks.rehearsal import rehearsal


def loss_of(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> float | None:
    """Return the training loss of a batch, the mean over the ranks, from a copy of the module.

    The module and the random state stay as they are: see :func:`~lightning_symmetry.callbacks.rehearsal.rehearsal`.

    Args:
        trainer: The trainer.
        module: The module.
        batch: The batch, on the device; its copy is used.
        batch_idx: Its index.

    Returns:
        The loss; None where the training step returns none, steps optimizers itself or fetches its batches itself.
    """
    if not module.automatic_optimization or is_param_in_hook_signature(
        module.training_step, "dataloader_iter", explicit=True
    ):
        return None
    with rehearsal(trainer, module) as (_, step):
        loss = loss_in(step(copy.deepcopy(batch), batch_idx))
    return None if loss is None else float(trainer.strategy.reduce(loss.clone().float(), reduce_op="mean"))
