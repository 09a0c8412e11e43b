"""Small Bayesian modules, their data and trainer, and what their training did."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from tiny_data import CLASSES, FEATURES, loader, trainer
from tiny_data import SIZES as SIZES  # for those who import these modules
from tiny_data import samples as samples
from torch import Tensor, nn

from lightning_symmetry.modules import VariationalMixin, VariationalModule
from lightning_symmetry.variational import kl_divergence

WIDE = {"rank": 2, "variance": 0.02, "scale": 2.0}
"""A posterior whose noise counts in a small network."""


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def bayesian(net: nn.Module | None = None, lr: float = 0.05, **kwargs: Any) -> VariationalModule:
    settings = {"posterior": WIDE, "optimizer": partial(torch.optim.AdamW, lr=lr), "num_samples_predict": 5}
    return VariationalModule(mlp() if net is None else net, **{**settings, **kwargs})


class Network(pl.LightningModule):
    """A user's module, which knows nothing of posteriors; it keeps the losses and outputs of its training steps."""

    def __init__(self, width: int = 8, lr: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        self.losses: list[float] = []
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Any:  # no batch_idx: Lightning reads the signature
        output = self(batch[0])
        loss = F.cross_entropy(output, batch[1])
        self.losses.append(float(loss.detach()))
        self.outputs.append(output.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Bayesian(VariationalMixin, Network):
    """The user's module made Bayesian."""


class Record(pl.Callback):
    """Keeps the loss that each step trains by, and the divergence then."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.divergences: list[float] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))
        self.divergences.append(float(kl_divergence(pl_module).detach()))


def fit(module: pl.LightningModule, *callbacks: pl.Callback, data: Any = None, **kwargs: Any) -> pl.Trainer:
    """Train for two epochs, or as told, on 26 samples in batches of 8 in fixed order, or others."""
    run = trainer(*callbacks, **kwargs)
    run.fit(module, loader("train") if data is None else data)
    return run


def assert_same_state(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
