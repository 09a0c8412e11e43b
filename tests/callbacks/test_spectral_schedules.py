"""Schedulers, counts of steps and the Trainer's settings go on over the switch."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from spectral_runs import BATCHES, Regression, assert_in_order, fit, loader
from torch.optim import lr_scheduler

from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import low_rank_maps


class SwitchedAt(pl.Callback):
    """Notes how many batches and steps there were when layers first had factors."""

    def __init__(self) -> None:
        self.batches = self.steps = None
        self.seen = 0

    def on_before_zero_grad(self, run: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if self.steps is None and low_rank_maps(module):
            self.batches, self.steps = self.seen, run.global_step

    def on_train_batch_end(self, run: pl.Trainer, *args: Any) -> None:
        self.seen += 1


SCHEDULERS = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=20),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=6),
    "step": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=4, cycle_momentum=False),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.8, patience=0, threshold=10.0),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[10],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name, factor):
    module, dense = (Regression(optimizer="momentum", scheduler=SCHEDULERS[name]) for _ in range(2))
    run = fit(module, SpectralFactorization(at_step=6, lr_factor=factor), steps=18)
    fit(dense, steps=18)
    assert_in_order(run, module)
    assert len(set(dense.rates)) > 2
    assert module.rates[:6] == dense.rates[:6]
    assert module.rates[6:] == pytest.approx([rate * factor for rate in dense.rates[6:]], rel=1e-9)


@pytest.mark.parametrize(
    ("when", "steps"), [({"at_step": 4}, 4), ({"at_step": 0}, 0), ({"at_epoch": 2}, 6), ({"at_fraction": 0.5}, 6)]
)
def test_optimizer_steps_are_counted(when, steps):
    """With two batches a step, and a last step of one batch: three steps an epoch."""
    module, seen = Regression(), SwitchedAt()
    run = fit(module, SpectralFactorization(**when), seen, steps=-1, max_epochs=4, accumulate_grad_batches=2)
    assert run.global_step == 12
    assert seen.steps == steps
    assert seen.batches == steps // 3 * BATCHES + steps % 3 * 2
    assert_in_order(run, module)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_trainer_settings(settings):
    fused = "gradient_clip_val" not in settings and "true" not in settings.get("precision", "")
    module = Regression(optimizer="fused" if fused else "adamw")
    data = loader(torch.float64) if settings.get("precision") == "64-true" else loader()
    callback = SpectralFactorization(at_step=5, rank=1.0, min_saving=-1)
    run = fit(module, callback, steps=10, data=data, **settings)
    assert_in_order(run, module)
    types = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert {p.dtype for p in module.parameters()} == {types.get(settings.get("precision"), torch.float32)}
    tolerance = 2e-2 if "bf16" in settings.get("precision", "") else 1e-5
    before, after = (callback.measured[f"low_rank/loss_{when}"] for when in ("before", "after"))
    assert after == pytest.approx(before, rel=tolerance)
    assert all(p.isfinite().all() for p in module.parameters())
