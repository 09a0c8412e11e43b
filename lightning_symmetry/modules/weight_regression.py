"""Training of networks that tell a number, such as accuracy, from the weights of networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import KendallRankCorrCoef, MetricCollection, R2Score

from lightning_symmetry.metanets.metanetwork import Metanetwork
from lightning_symmetry.modules.supervised import Split, SupervisedModule

LEARNING_RATES = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2)
"""Among which the paper chooses a metanetwork's learning rate by its validation R² (App. E.3.2)."""


class WeightRegression(SupervisedModule):
    r"""Train a metanetwork on ``(weights, target)`` batches, ``(B, P)`` and ``(B,)``, as ``ZooData`` gives them.

    With AdamW, whose decay is decoupled. Logs ``{train,val,test}/loss`` and, of validation and test networks, the
    coefficient of determination :math:`R^2 = 1 - \sum_i (y_i - \hat y_i)^2 / \sum_i (y_i - \bar y)^2` and Kendall's
    :math:`\tau_b` as ``{val,test}/r2`` and ``{val,test}/kendall``.

    When training begins, a metanetwork whose input standardisation was not fitted yet takes its means and standard
    deviations from the training networks, all of the training loader's data set, read once. They are saved in
    checkpoints, and are not taken again on resume, nor for another fit, nor for testing.

    Args:
        metanetwork: A :class:`~lightning_symmetry.metanets.Metanetwork`, or any network that maps ``(B, P)`` to
            ``(B,)``. It is not stored in the checkpoint's hyper-parameters: give it to
            ``load_from_checkpoint(path, metanetwork=...)``.
        learning_rate: Learning rate.
        weight_decay: Weight decay.
        loss: ``loss(predicted, target) -> scalar mean over the batch``. Default: squared error. For a ``bounded``
            metanetwork ``torch.nn.functional.binary_cross_entropy`` is the other one in use.

    Raises:
        ValueError: While training, if predictions and targets differ in shape: then the loss would broadcast.
        MisconfigurationException: When training begins, if the standardisation is not fitted, and batches do not come
            from one ``DataLoader``.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.3 and App. E.3.2;
    squared error, the standardisation and its statistics are this library's choice, of which the paper says nothing.
    """

    def __init__(
        self,
        metanetwork: nn.Module,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        loss: Callable[[Tensor, Tensor], Tensor] = mse_loss,
    ) -> None:
        super().__init__(
            metanetwork,
            loss,
            partial(torch.optim.AdamW, lr=learning_rate, weight_decay=weight_decay),
            metrics={"r2": R2Score(), "kendall": KendallRankCorrCoef()},
        )
        # Rank correlation compares all pairs: too dear for the training networks, epoch after epoch.
        self.metrics["train_metrics"] = MetricCollection({})
        self.save_hyperparameters("learning_rate", "weight_decay")

    def on_train_start(self) -> None:
        """Fit the standardisation of the metanetwork's input, if that was not done before."""
        if isinstance(self.net, Metanetwork) and not bool(self.net.normalization.fitted):
            self.net.fit_normalization(_inputs(self.trainer.train_dataloader))

    def output_and_target(self, batch: Any, split: Split) -> tuple[Tensor, Tensor]:
        """Return predictions and targets, both ``(B,)``."""
        weights, target = batch
        predicted = self.net(weights)
        if predicted.shape != target.shape:
            raise ValueError(
                f"Expected the metanetwork to give predictions of the targets' shape {tuple(target.shape)} but got "
                f"{tuple(predicted.shape)}; with `outputs=None` it gives one number a network."
            )
        return predicted, target


def select_learning_rate(scores: Mapping[float, float]) -> float:
    """Return the learning rate of the best validation score; of equal ones the smallest.

    For the paper's choice, train once with each of :data:`LEARNING_RATES` and give ``val/r2`` by rate.

    Args:
        scores: Score by learning rate. One that is not finite, as of a training that diverged, is never the best.

    Raises:
        ValueError: If no score is finite.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.2.
    """
    finite = {rate: score for rate, score in scores.items() if math.isfinite(score)}
    if not finite:
        raise ValueError(f"Expected a finite score of at least one learning rate but got {dict(scores)}.")
    return max(sorted(finite), key=finite.__getitem__)


def _inputs(loader: Any) -> Iterator[Tensor]:
    """Yield the inputs of a loader's whole data set, in order, without moving a global random state."""
    if not isinstance(loader, DataLoader):
        raise MisconfigurationException(
            f"The standardisation of a metanetwork's input is fitted to a DataLoader's data set, but training has a "
            f"{type(loader).__name__}: call metanetwork.fit_normalization(weights) before."
        )
    size = None if loader.batch_sampler is None else max(loader.batch_size or 1, 128)
    whole = DataLoader(loader.dataset, size, collate_fn=loader.collate_fn, generator=torch.Generator())
    for weights, _ in whole:
        yield weights
