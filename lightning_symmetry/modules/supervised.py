"""Supervised training of any network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_symmetry.modules.low_rank_layout import LowRankLayoutMixin

Split = Literal["train", "val", "test"]


class SupervisedModule(LowRankLayoutMixin, pl.LightningModule):
    """Train a network on ``(input, target)`` batches, or on a graph with ``train_mask``, ``val_mask``, ``test_mask``.

    Logs ``{train,val,test}/loss`` and each metric by epoch. Checkpoints of a network with low-rank factors load into a
    dense one and the other way (:class:`~lightning_symmetry.modules.LowRankLayoutMixin`).

    Args:
        net: The network. It is not stored in the checkpoint's hyper-parameters: give it to
            ``load_from_checkpoint(path, net=...)``.
        loss: ``loss(output, target) -> scalar mean over the batch``. Default: cross entropy.
        optimizer: Called with the parameters. Default: AdamW with learning rate 1e-3.
        scheduler: Called with the optimizer; none by default.
        interval: Whether the scheduler steps by ``"epoch"`` or by optimizer ``"step"``.
        metrics: torchmetrics by name. Default: accuracy, for the default loss; none for others.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        optimizer: Callable[[Any], Optimizer] = partial(torch.optim.AdamW, lr=1e-3),  # noqa: B008 (never changed)
        scheduler: Callable[[Optimizer], Any] | None = None,
        interval: Literal["epoch", "step"] = "epoch",
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        if metrics is None:
            metrics = {} if loss else {"accuracy": MulticlassAccuracy(num_classes=None, average="micro")}
        self.loss = loss or nn.CrossEntropyLoss()
        self.optimizer, self.scheduler, self.interval = optimizer, scheduler, interval
        collection = MetricCollection(dict(metrics), compute_groups=False)
        self.metrics = nn.ModuleDict(
            {f"{split}_metrics": collection.clone(prefix=f"{split}/") for split in ("train", "val", "test")}
        )

    def forward(self, *inputs: Any) -> Any:
        """Apply the network."""
        return self.net(*inputs)

    def output_and_target(self, batch: Any, split: Split) -> tuple[Tensor, Any]:
        """Return the network's output and its target for the samples of a split."""
        if hasattr(batch, "edge_index"):
            mask = batch[f"{split}_mask"]
            return self.net(batch.x, batch.edge_index)[mask], batch.y[mask]
        inputs, target = batch
        return self.net(inputs), target

    def _step(self, batch: Any, split: Split) -> Tensor:
        output, target = self.output_and_target(batch, split)
        loss = self.loss(output, target)
        metrics = self.metrics[f"{split}_metrics"]
        metrics.update(output.detach(), target)
        count = len(target)
        logged = {f"{split}/loss": loss.detach(), **metrics}
        self.log_dict(logged, on_step=False, on_epoch=True, batch_size=count, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self._step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self._step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the output for a batch with or without target."""
        if isinstance(batch, tuple | list):
            return self.net(batch[0])
        return self.net(batch) if isinstance(batch, Tensor) else self.output_and_target(batch, "test")[0]

    def configure_optimizers(self) -> Any:
        """Build optimizer and scheduler."""
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": self.interval},
        }
