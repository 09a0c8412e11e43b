"""A run with the callback ends as one without; a resumed run as an uninterrupted one."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_modules import (
    AugmentedData,
    Plain,
    TinyData,
    assert_same,
    bn_net,
    by_hand,
    deep_mlp,
    frozen,
    mlp,
    supervised,
    trainer,
)

from lightning_symmetry import LinearInterpolation, asymmetrize


def callback(**kwargs: Any) -> LinearInterpolation:
    return LinearInterpolation(**{"num_points": 5, "progress": False, **kwargs})


class Snapshot(pl.Callback):
    """Keeps everything that could be changed: before and after the callback that stands between two of these."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = {
            "parameters": copy.deepcopy(pl_module.state_dict()),
            "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in pl_module.named_parameters()},
            "modes": [module.training for module in pl_module.modules()],
            "momenta": [getattr(module, "momentum", None) for module in pl_module.modules()],
            "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),
            "metrics": dict(trainer.callback_metrics),
            "logged": dict(trainer.logged_metrics),
            "step": trainer.global_step,
            "stage": (trainer.state.fn, trainer.state.stage, trainer.state.status),
            "attributes": sorted(pl_module.__dict__),
            "grad": torch.is_grad_enabled(),
        }


def assert_equal(a: Any, b: Any, name: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            assert_equal(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), name
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{name}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), name
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), name
    else:
        assert a == b, name


BUILDS = {
    "batch norm": lambda: supervised(bn_net()),
    "w": lambda: supervised(asymmetrize(mlp(), n_fix=2, kappa=1.0)),
    "plain module": lambda: Plain(bn_net()),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_nothing_is_changed(build, split):
    states = []
    for interpolation in (None, callback(split=split, batch_norm="keep")):
        module = build()
        before, after = Snapshot(), Snapshot()
        pl.seed_everything(3, verbose=False)
        callbacks = [before, after] if interpolation is None else [before, interpolation, after]
        trainer(*callbacks).fit(module, datamodule=AugmentedData())
        assert_equal(before.state, after.state)
        states.append(after.state)
    assert_equal(*states)  # as without the callback, to the last bit


@pytest.mark.parametrize(("batch_norm", "build"), [("recompute", bn_net), ("repair", bn_net), ("repair", deep_mlp)])
def test_nothing_is_changed_by_statistics_of_the_training_data(batch_norm, build):
    before, after = Snapshot(), Snapshot()
    module = supervised(build())
    trainer(before, callback(batch_norm=batch_norm, split="val"), after).fit(module, datamodule=TinyData())
    assert_equal(before.state, after.state)


def test_validation_metrics_of_the_run_survive():
    module = supervised()
    run = trainer(callback(split="val"))
    run.fit(module, datamodule=TinyData())
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    expected = by_hand(module.net, module.net, "val", 2).loss[0].item()
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-5)
    (validated,) = run.validate(module, datamodule=TinyData(), verbose=False)
    assert validated["val/loss"] == pytest.approx(expected, rel=1e-5)


class StopAfter(pl.Callback):
    """Ends a run in the middle of an epoch, as a failure would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("power cut")


def interrupted(folder: Path, build: Any, callbacks: list[pl.Callback], **kwargs: Any) -> str:
    """Train for two of four epochs and some steps; return the checkpoint of the last whole epoch."""
    saver = ModelCheckpoint(folder, save_last=True, **kwargs)
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(*callbacks, saver, StopAfter(10), max_epochs=4, enable_checkpointing=True).fit(
            build(), datamodule=TinyData(shuffle=False)
        )
    return saver.last_model_path


@pytest.mark.parametrize("build", list(BUILDS.values())[:2], ids=list(BUILDS)[:2])
def test_a_resumed_run_starts_its_segment_at_the_first_initialisation(build, tmp_path):
    def without_dropout():
        module = build()
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        return module

    whole = callback()
    uninterrupted = without_dropout()
    start = frozen(uninterrupted.net)
    trainer(whole, max_epochs=4).fit(uninterrupted, datamodule=TinyData(shuffle=False))
    path = interrupted(tmp_path, without_dropout, [callback()])

    resumed = callback()
    module = without_dropout()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)  # a resumed process draws another initialisation, which does not matter
    trainer(resumed, max_epochs=4).fit(module, datamodule=TinyData(shuffle=False), ckpt_path=path)
    assert_same(resumed.result, whole.result, tolerance=1e-12)
    assert resumed.distance == pytest.approx(whole.distance, rel=1e-12)
    assert_same(resumed.result, by_hand(start, module.net, "test"))


@pytest.mark.parametrize("callbacks", [[], [callback(name="other")]], ids=["no callback", "another name"])
def test_a_checkpoint_that_does_not_know_the_initialisation_warns(callbacks, tmp_path):
    path = interrupted(tmp_path, supervised, callbacks)
    resumed = callback()
    module = supervised()
    with pytest.warns(UserWarning, match="does not know the initialisation"):
        trainer(resumed, max_epochs=4).fit(module, datamodule=TinyData(shuffle=False), ckpt_path=path)
    start = supervised()
    start.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert_same(resumed.result, by_hand(start.net, module.net, "test"))


def test_a_checkpoint_of_weights_only_warns(tmp_path):
    """It has no callback state. Lightning then refuses it for want of optimizer states, with an error of its own."""
    path = interrupted(tmp_path, supervised, [callback()], save_weights_only=True)
    assert "callbacks" not in torch.load(path, weights_only=True)
    run = trainer(callback(), max_epochs=4)
    with (
        pytest.warns(UserWarning, match="does not know the initialisation"),
        pytest.raises(KeyError, match="checkpoint contains only the model"),
    ):
        run.fit(supervised(), datamodule=TinyData(shuffle=False), ckpt_path=path)


def test_a_second_fit_of_the_same_trainer_starts_at_its_own_parameters():
    interpolation = callback()
    module = supervised()
    run = trainer(interpolation, max_epochs=1)
    run.fit(module, datamodule=TinyData())
    between = frozen(module.net)
    run.fit_loop.max_epochs = 3
    run.fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(between, module.net, "test"))


def test_testing_after_the_fit_keeps_the_initialisation(tmp_path):
    interpolation = callback()
    module = supervised()
    start = frozen(module)
    run = trainer(interpolation)
    run.fit(module, datamodule=TinyData())
    run.test(module, datamodule=TinyData(), verbose=False)
    run.save_checkpoint(tmp_path / "end.ckpt")
    kept = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"][interpolation.state_key]["start"]
    assert_equal(dict(kept), dict(start.state_dict()))
