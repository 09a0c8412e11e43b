"""The loss of a batch as the training step gives it, without a trace."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_symmetry.callbacks.evaluation import QuietTrainer, call_step, quiet_copy


def loss_of(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> float | None:
    """Return the training loss of a batch, the mean over the ranks, from a copy of the module.

    The module, its batch-norm statistics, metrics and logs, and the random state stay as they are. The copy is in the
    modes of the module and draws the same numbers each time.

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
    with isolate_rng(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(trainer.global_step * trainer.world_size + trainer.global_rank)
        clone = quiet_copy(module)
        clone.trainer = QuietTrainer(trainer)
        with trainer.precision_plugin.train_step_context():
            loss = call_step(clone.training_step, copy.deepcopy(batch), batch_idx, 0)
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return float(trainer.strategy.reduce(loss.detach().clone().float(), reduce_op="mean"))
