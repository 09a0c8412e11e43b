"""The waterfall schedule equals torch's own plateau rule, composes with schedulers, resumes."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from distributed import launch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny_modules import Plain, TinyData, loader, mlp, supervised, trainer
from torch.optim import lr_scheduler as schedulers

from lightning_symmetry.callbacks.waterfall import WaterfallLR

ERRORS = [
    *[1.0, 0.995, 0.993, 0.991, 0.9895],  # slow progress: more than 1 % in four evaluations
    *[0.985, 0.984, 0.983, 0.982, 0.981],  # less than 1 % in four evaluations
    *[0.5, math.nan, math.inf, 0.499, 0.498, 0.497, 0.4, 0.39, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2],
]


class Scripted(Plain):
    """Logs the errors of a list as its validation errors, one an epoch."""

    def __init__(self, errors: list[float], scheduler: Callable[..., Any] | None = None, **lr: Any) -> None:
        super().__init__(mlp())
        self.errors, self.build, self.lr = errors, scheduler, lr or {"lr": 0.1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            self.log("error", 1e-9)  # must not be the best
        elif self.trainer.state.fn != "fit":
            self.log("error", 1e-9)
        else:
            self.log("error", self.errors[self.current_epoch])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), **self.lr)
        return optimizer if self.build is None else {"optimizer": optimizer, "lr_scheduler": self.build(optimizer)}


class Rates(pl.Callback):
    """Keeps the learning rate of each epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append(float(run.optimizers[0].param_groups[0]["lr"]))


def fit(module: pl.LightningModule, *callbacks: pl.Callback, epochs: int, **kwargs: Any) -> list[float]:
    rates = Rates()
    run = trainer(*callbacks, rates, max_epochs=epochs, limit_train_batches=1, limit_val_batches=1, **kwargs)
    run.fit(module, loader("train"), loader("val"))
    return rates.seen


def torchs_rule(errors: list[float], patience: int, mode: str = "min", threshold: float = 0.01) -> list[float]:
    """The learning rates by torch's ReduceLROnPlateau, which waits for one evaluation more than it is told."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    rule = schedulers.ReduceLROnPlateau(optimizer, mode, 0.1, patience - 1, threshold, threshold_mode="rel", eps=0)
    rates = [0.1]
    for error in errors[:-1]:
        rule.step(error)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_divides_when_torchs_rule_does(patience, mode):
    errors = ERRORS if mode == "min" else [1 / error for error in ERRORS if math.isfinite(error)]
    waterfall = WaterfallLR("error", patience=patience, mode=mode)
    rates = fit(Scripted(errors), waterfall, epochs=len(errors))
    assert rates == pytest.approx(torchs_rule(errors, patience, mode), rel=1e-9)
    assert waterfall.divisions > 2


def test_the_paper_on_cifar():
    """By hand: four evaluations within 1 % of 0.5 divide; the slow but steady row before does not."""
    errors = [1.0, 0.995, 0.993, 0.991, 0.989, 0.5, 0.499, 0.498, 0.497, 0.496, 0.495, 0.4]
    rates = fit(Scripted(errors), WaterfallLR("error"), epochs=len(errors))
    assert rates == pytest.approx([0.1] * 10 + [0.01] * 2)


def test_negative_values_improve_downwards():
    """By 1 % of their size; torch's own rule calls -1.005 an improvement of -1 by 1 %."""
    errors = [-1.0, -1.005, -1.02, -1.02, -1.03]
    assert fit(Scripted(errors), WaterfallLR("error", patience=1), epochs=5) == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001]
    )


def test_min_lr_and_factor():
    rates = fit(Scripted([1.0] * 5), WaterfallLR("error", factor=2, patience=1, min_lr=0.03), epochs=5)
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.03, 0.03])


def test_an_initial_rate_below_min_lr_stays():
    rates = fit(Scripted([1.0] * 3), WaterfallLR("error", patience=1, min_lr=0.3), epochs=3)
    assert rates == pytest.approx([0.1] * 3)


def test_a_tensor_learning_rate_is_the_same_tensor():
    rate = torch.tensor(0.1)
    module = Scripted([1.0] * 3, lr=rate)
    fit(module, WaterfallLR("error", patience=1), epochs=3)
    assert rate.item() == pytest.approx(0.001)
    assert module.optimizers().param_groups[0]["lr"] is rate


def test_every_group_is_divided():
    class Groups(Scripted):
        def configure_optimizers(self):
            weights, biases = [p for p in self.parameters() if p.ndim > 1], [p for p in self.parameters() if p.ndim < 2]
            return torch.optim.SGD([{"params": weights, "lr": 1.0}, {"params": biases, "lr": 0.5}])

    module = Groups([1.0, 1.0])
    fit(module, WaterfallLR("error", patience=1), epochs=2)
    assert [group["lr"] for group in module.optimizers().param_groups] == pytest.approx([0.1, 0.05])


SCHEDULERS = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "linear": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 20),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "warm-up, then cosine": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.CosineAnnealingLR(o, 12)], [4]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("build", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_rate_is_the_schedulers_times_that_of_the_waterfall(build):
    errors = [1.0] * 9
    alone = fit(Scripted(errors, build), epochs=9)
    waterfall = fit(Scripted(errors), WaterfallLR("error", patience=3, factor=2), epochs=9)
    assert len(set(waterfall)) == 3
    both = fit(Scripted(errors, build), WaterfallLR("error", patience=3, factor=2), epochs=9)
    assert both == pytest.approx([a * w / 0.1 for a, w in zip(alone, waterfall, strict=True)], rel=1e-9)


@pytest.mark.parametrize(
    "build",
    [
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.ConstantLR(o), schedulers.OneCycleLR(o, 0.1, total_steps=20)], [4]
        ),
    ],
    ids=["one cycle", "cyclic", "nested"],
)
def test_schedulers_that_overwrite_the_rate_are_refused(build):
    with pytest.raises(MisconfigurationException, match="overwrite"):
        fit(Scripted([1.0], build), WaterfallLR("error"), epochs=1)


@pytest.mark.parametrize("scheduler", [None, SCHEDULERS["lambda"]], ids=["alone", "lambda"])
@pytest.mark.parametrize("stop", [3, 7])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(scheduler, stop, tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", every_n_epochs=1)
    whole = WaterfallLR("error", patience=3)
    uninterrupted = Scripted(ERRORS, scheduler)
    rates = fit(uninterrupted, whole, saver, epochs=len(ERRORS), enable_checkpointing=True)
    path = tmp_path / f"epoch={stop}.ckpt"
    resumed, again = WaterfallLR("error", patience=3), Rates()
    module = Scripted(ERRORS, scheduler)
    run = trainer(resumed, again, max_epochs=len(ERRORS), limit_train_batches=1, limit_val_batches=1)
    run.fit(module, loader("train"), loader("val"), ckpt_path=path)
    assert rates == rates[: stop + 1] + again.seen
    assert resumed.state_dict() == whole.state_dict()
    assert all(map(torch.equal, module.state_dict().values(), uninterrupted.state_dict().values()))


def test_a_second_fit_starts_anew():
    waterfall = WaterfallLR("error", patience=1)
    fit(Scripted([0.1, 0.2]), waterfall, epochs=2)
    fit(Scripted([5.0, 4.0]), waterfall, epochs=2)
    assert waterfall.state_dict() == {"best": 4.0, "waited": 0, "divisions": 0}


def test_only_evaluations_of_fit_count():
    waterfall = WaterfallLR("error", patience=1)
    module = Scripted([0.2])
    run = trainer(waterfall, max_epochs=1)
    run.fit(module, loader("train"), loader("val"))
    run.validate(module, loader("val"), verbose=False)
    assert waterfall.state_dict() == {"best": pytest.approx(0.2), "waited": 0, "divisions": 0}


def test_evaluations_within_an_epoch_count():
    waterfall = WaterfallLR("val/loss", patience=1, improvement=0.9)
    module = supervised(lr=1e-6)
    trainer(waterfall, max_epochs=1, val_check_interval=1).fit(module, datamodule=TinyData())
    assert waterfall.divisions == 3  # after 4 evaluations, of which the first is the best


def test_logs_rate_and_divisions(tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    fit(Scripted([1.0] * 3), WaterfallLR("error", patience=2, verbose=True), epochs=3, logger=logger)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = [
            (float(r["waterfall/lr"]), float(r["waterfall/divisions"]))
            for r in csv.DictReader(file)
            if r["waterfall/lr"]
        ]
    assert rows == [(0.1, 0), (0.1, 0), (pytest.approx(0.01), 1)]


def test_ranks_that_disagree_on_the_value_agree_on_the_rate(tmp_path):
    """Each rank logs its own value; one alone would divide, the mean does not."""
    launch(SCRIPT, tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == {"rates": [0.1, 0.1, 0.1], "best": pytest.approx(0.9)}


SCRIPT = """
import sys

import torch
from test_waterfall import Rates, Scripted, loader, trainer

from lightning_symmetry.callbacks.waterfall import WaterfallLR


class Ranked(Scripted):
    def validation_step(self, batch, batch_idx):
        self.log("error", [[1.0, 1.0], [1.0, 0.9], [1.0, 0.8]][self.current_epoch][self.global_rank])


rates, waterfall = Rates(), WaterfallLR("error", patience=1)
module = Ranked([])
run = trainer(waterfall, rates, max_epochs=3, strategy="ddp", devices=2, limit_val_batches=1, num_sanity_val_steps=0)
run.fit(module, loader("train"), loader("val"))
torch.save({"rates": rates.seen, "best": waterfall.best}, f"{sys.argv[1]}/{run.global_rank}.pt")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, "`factor`"),
        ({"factor": math.nan}, "`factor`"),
        ({"improvement": 1.0}, "`improvement`"),
        ({"improvement": -0.1}, "`improvement`"),
        ({"patience": 0}, "`patience`"),
        ({"mode": "up"}, "`mode`"),
        ({"min_lr": -1.0}, "`min_lr`"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        WaterfallLR("error", **arguments)


def test_a_value_that_was_not_logged():
    with pytest.raises(MisconfigurationException, match=r"'loss', which was not logged; there are \['error'\]"):
        fit(Scripted([1.0]), WaterfallLR("loss"), epochs=1)


def test_a_fit_without_evaluation():
    with pytest.raises(MisconfigurationException, match="has none"):
        trainer(WaterfallLR("error")).fit(Scripted([1.0]), loader("train"))


def test_two_of_them():
    with pytest.raises(MisconfigurationException, match="Several WaterfallLR"):
        fit(Scripted([1.0]), WaterfallLR("error"), WaterfallLR("other"), epochs=1)
