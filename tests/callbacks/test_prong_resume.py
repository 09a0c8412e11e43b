"""A resumed run goes on as the uninterrupted one, to the last bit; a checkpoint is that of a plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from prong_reference import Regression, batches, fit, network
from test_interpolation_leaves_no_trace import assert_equal
from torch import nn

from lightning_symmetry.callbacks.prong import PRONG

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def build(optimizer: str) -> Regression:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), *network()[2:])
    return Regression(net, OPTIMIZERS[optimizer])


def callback(**kwargs: Any) -> PRONG:
    return PRONG(**{"every_n_steps": 4, "num_samples": 6, **kwargs})


def run(folder: Path, optimizer: str, prong: PRONG | None, steps: int = 14, **kwargs: Any) -> tuple[Any, Any]:
    module = build(optimizer)
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    callbacks = [saver] if prong is None else [prong, saver]
    settings = {"precision": "32-true", "enable_checkpointing": True, "max_epochs": 3, **kwargs}
    ended = fit(module, *callbacks, steps=steps, loader=batches(dtype=torch.float32), **settings)
    return module, ended


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("settings", [{}, {"ema": 0.5}, {"mode": "diagonal"}], ids=["full", "average", "diagonal"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_between_two_reparametrisations_is_exact(optimizer, settings, precision, tmp_path):
    prong = callback(**settings)
    whole, ended = run(tmp_path, optimizer, prong, precision=precision)
    for step in (5, 10):  # at the end of an epoch: the order of the data is fixed
        resumed = callback(**settings)
        module = build(optimizer)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)  # what it begins with does not matter
        again = fit(
            module,
            resumed,
            steps=14,
            loader=batches(dtype=torch.float32),
            precision=precision,
            ckpt_path=tmp_path / f"step={step}.ckpt",
        )
        assert 0 < resumed.num_reparametrizations < prong.num_reparametrizations
        assert_equal(dict(module.state_dict()), dict(whole.state_dict()))
        assert_equal(resumed.state_dict(), prong.state_dict())
        assert_equal(again.optimizers[0].state_dict(), ended.optimizers[0].state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_checkpoint_is_that_of_a_plain_module(optimizer, tmp_path):
    module, _ = run(tmp_path, optimizer, callback())
    checkpoint = torch.load(tmp_path / "step=14.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(build(optimizer).state_dict())
    loaded = build(optimizer)
    loaded.load_state_dict(checkpoint["state_dict"])
    x = torch.randn(5, 6)
    torch.testing.assert_close(loaded.eval()(x), module.eval()(x), rtol=1e-5, atol=1e-6)
    without, _ = run(tmp_path / "without", optimizer, None, steps=16, max_epochs=4, ckpt_path=tmp_path / "step=10.ckpt")
    assert all(value.isfinite().all() for value in without.state_dict().values())


def test_a_checkpoint_without_the_callback_is_whitened_at_its_first_batch(tmp_path):
    run(tmp_path, "sgd", None, steps=5)
    prong = callback()
    run(tmp_path / "with", "sgd", prong, steps=7, ckpt_path=tmp_path / "step=5.ckpt")
    assert prong.num_reparametrizations == 1


def test_weights_only_checkpoints_have_no_coefficients(tmp_path):
    module = build("sgd")
    saver = ModelCheckpoint(tmp_path, save_weights_only=True)
    fit(module, callback(), saver, steps=5, enable_checkpointing=True)
    loaded = torch.load(saver.best_model_path, weights_only=True)
    assert "callbacks" not in loaded
    build("sgd").load_state_dict(loaded["state_dict"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_saved_after_the_fit_is_the_one_at_its_end(optimizer, tmp_path):
    _, ended = run(tmp_path, optimizer, callback(), steps=10)
    ended.save_checkpoint(tmp_path / "later.ckpt")
    before, later = (torch.load(tmp_path / name, weights_only=True) for name in ("step=10.ckpt", "later.ckpt"))
    torch.testing.assert_close(before["state_dict"], later["state_dict"], rtol=0, atol=1e-6)
    if optimizer == "sgd":  # otherwise they come from V and d, to rounding; those themselves are the same
        assert_equal(dict(before["state_dict"]), dict(later["state_dict"]))
    key = callback().state_key
    assert_equal(before["callbacks"][key], later["callbacks"][key])


@pytest.mark.parametrize("settings", [{"skip": ["net.3"]}, {"coordinates": "explicit"}])
def test_a_checkpoint_of_other_settings_is_refused(settings, tmp_path):
    run(tmp_path, "sgd", callback(), steps=5)
    with pytest.raises(MisconfigurationException, match="not whitened in this run, or not in the same coordinates"):
        run(tmp_path / "other", "sgd", callback(**settings), ckpt_path=tmp_path / "step=5.ckpt")


def test_the_samples_of_the_first_batch_are_soon_enough(tmp_path):
    """Resumed between the first reparametrisation and the second, for which the samples were not enough yet."""
    whole = callback(every_n_steps=100, num_samples=52)
    module, _ = run(tmp_path, "sgd", whole, steps=9)
    assert whole.num_reparametrizations == 2  # at the start, and after 7 batches of 8
    resumed = callback(every_n_steps=100, num_samples=52)
    run(tmp_path / "resumed", "sgd", resumed, steps=9, ckpt_path=tmp_path / "step=5.ckpt")
    assert resumed.num_reparametrizations == 1  # with the samples since
    assert isinstance(module, pl.LightningModule)
