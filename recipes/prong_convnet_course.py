"""The course of a training in `prong_convnet.py`: what is measured at each evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from shared import clock
from torch.utils.data import DataLoader, Subset


class Course(pl.Callback):
    """Keep training loss, errors and time at each evaluation, while the clock stands still.

    Args:
        images: Training images without augmentation.
        most: Number of them, at most, evenly spaced, on which the loss is measured.
        tick: Reports finished updates to the progress bar.
    """

    def __init__(self, images: DataLoader[Any], most: int, tick: Callable[[int], Any]) -> None:
        self.images, self.most, self.tick = images, most, tick
        self.seen: dict[str, list[float]] = {
            name: [] for name in ("points", "seconds", "train_loss", "train_error", "val_error", "lr")
        }
        self._seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._since = clock()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._seconds += clock() - self._since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure, and start the clock again. A training that has diverged ends here."""
        before = self.seen["points"][-1] if self.seen["points"] else 0
        loss, error = self._measure(trainer, pl_module)
        now = {
            "points": trainer.global_step,
            "seconds": self._seconds,
            "train_loss": loss,
            "train_error": error,
            "val_error": trainer.callback_metrics["val/error"].item(),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        for name, value in now.items():
            self.seen[name].append(value)
        self.tick(trainer.global_step - before)
        trainer.should_stop = not math.isfinite(loss)
        self._since = clock()

    @torch.no_grad()
    def _measure(self, trainer: pl.Trainer, module: Any) -> tuple[float, float]:
        """Return loss and error on training images, each rank having had its share of them."""
        count = len(self.images.dataset)
        chosen = range(0, count, -(-count // self.most))[trainer.global_rank :: trainer.world_size]
        images = Subset(self.images.dataset, list(chosen))
        totals = torch.zeros(3, dtype=torch.float64)
        with isolate_rng():  # a loader moves it
            loader = DataLoader(
                images, self.images.batch_size, collate_fn=self.images.collate_fn, num_workers=self.images.num_workers
            )
            for batch in loader:
                output, target = module.output_and_target(trainer.strategy.batch_to_device(batch), "train")
                wrong = (output.argmax(1) != target).sum()
                totals += torch.tensor([module.loss(output, target) * len(target), wrong, len(target)])
        loss, wrong, count = trainer.strategy.reduce(totals.to(module.device), reduce_op="sum").tolist()
        return loss / count, wrong / count
