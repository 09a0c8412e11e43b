"""What callbacks do with batches: see how many samples there are, and bring them to the device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils._pytree import tree_leaves


def on_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Bring a batch to the device as the training loop does, with the module's and the datamodule's transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def common_size(batch: Any) -> int | None:
    """Return the number of samples of a batch of tensors with a common first dimension alone; None for any other.

    Such a batch can be cut and joined; one of graphs, say, cannot.
    """
    sizes = {len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in tree_leaves(batch)}
    return sizes.pop() if len(sizes) == 1 else None
