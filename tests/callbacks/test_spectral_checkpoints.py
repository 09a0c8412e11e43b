"""Checkpoints from before and after the switch load everywhere; a resumed run is the uninterrupted one, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from spectral_runs import Mixed, Regression, WithLayout, assert_in_order, fit, loader, network
from test_interpolation_leaves_no_trace import assert_equal
from tiny_modules import trainer
from torch import nn
from torch.optim import lr_scheduler

from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import factorize, low_rank_maps
from lightning_symmetry.low_rank.layout import layout_of
from lightning_symmetry.modules import SupervisedModule
from lightning_symmetry.modules.low_rank_layout import LAYOUT_KEY

SWITCH, STEPS = 7, 16
SCHEDULERS: dict[str, Callable[..., Any] | None] = {
    "adamw": partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=STEPS),
    "fused": partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS),
    "momentum": None,
}

pytestmark = pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*")


def callback(**kwargs: Any) -> SpectralFactorization:
    return SpectralFactorization(**{"at_step": SWITCH, "rank": 0.5, "lr_factor": 0.5, "min_saving": -1, **kwargs})


def build(kind: type[Regression], optimizer: str = "adamw", seed: int = 0, net: nn.Module | None = None) -> Regression:
    return kind(network(seed) if net is None else net, optimizer, SCHEDULERS[optimizer])


def saved(folder: Path, module: Regression, at_step: int = SWITCH, **kwargs: Any) -> Any:
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1, **kwargs)
    return fit(module, callback(at_step=at_step), saver, steps=STEPS, enable_checkpointing=True)


@pytest.mark.parametrize("at_step", [4, 5, SWITCH])
@pytest.mark.parametrize("optimizer", SCHEDULERS)
@pytest.mark.parametrize("kind", [Regression, WithLayout])
def test_resuming_is_exact(kind, optimizer, at_step, tmp_path):
    """From the ends of epochs, where the order of the data goes on: before, right at and after the switch."""
    whole = build(kind, optimizer)
    ended = saved(tmp_path, whole, at_step)
    for step in (5, 10):
        module = build(kind, optimizer, seed=1)
        again = fit(module, callback(at_step=at_step), steps=STEPS, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert_equal(dict(module.state_dict()), dict(whole.state_dict()))
        assert_equal(again.optimizers[0].state_dict(), ended.optimizers[0].state_dict())
        assert_in_order(again, module)
        for ours, theirs in zip(again.lr_scheduler_configs, ended.lr_scheduler_configs, strict=True):
            assert ours.scheduler.get_last_lr() == theirs.scheduler.get_last_lr()
        assert module.losses == whole.losses[step:]


@pytest.mark.parametrize("kind", [Regression, WithLayout])
def test_resuming_from_before_the_switch_with_a_network_from_after_it(kind, tmp_path):
    whole = build(kind)
    saved(tmp_path, whole)
    module = build(kind, net=factors(network(1)))
    again = fit(module, switch := callback(), steps=STEPS, ckpt_path=tmp_path / "step=5.ckpt")
    assert_equal(dict(module.state_dict()), dict(whole.state_dict()))
    assert_in_order(again, module)
    assert switch.report.changed == ["net.0", "net.2", "net.4"]


NETS = {"linear": network, "mixed": lambda seed=0: torch.manual_seed(seed) and Mixed()}


def factors(module: nn.Module) -> nn.Module:
    return factorize(module, 2, min_saving=-1)


PRESENT = {"dense": lambda module: module, "factorised": factors}


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("step", [5, 12])
def test_every_way_to_load(step, net, present, weights_only, tmp_path):
    """Before the switch and after it, into a dense module and into one with factors of another rank."""
    whole = build(WithLayout, net=NETS[net]())
    saved(tmp_path, whole, save_weights_only=weights_only)
    path = tmp_path / f"step={step}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert bool(checkpoint[LAYOUT_KEY]) == (step > SWITCH)

    def fresh() -> Regression:
        return build(WithLayout, net=PRESENT[present](NETS[net](1)))

    loaded = fresh()
    loaded.on_load_checkpoint(checkpoint)
    loaded.load_state_dict(checkpoint["state_dict"])
    assert_equal(dict(loaded.state_dict()), checkpoint["state_dict"])
    assert layout_of(loaded) == checkpoint[LAYOUT_KEY]
    if net == "mixed" and step > SWITCH:
        assert loaded.net.decode.left is loaded.net.encode.left

    other = WithLayout.load_from_checkpoint(path, net=fresh().net)
    assert_equal(dict(other.state_dict()), checkpoint["state_dict"])

    tested = fresh()
    (measured,) = trainer().test(tested, loader(), ckpt_path=path, verbose=False)
    assert_equal(dict(tested.state_dict()), checkpoint["state_dict"])
    assert measured["test"] == pytest.approx(float(loss(loaded)), rel=1e-5)

    if not weights_only:
        trained = fresh()
        fit(trained, steps=STEPS, ckpt_path=path)
        assert bool(low_rank_maps(trained)) == (step > SWITCH)


def loss(module: Regression) -> torch.Tensor:
    x, y = loader().dataset.tensors
    with torch.no_grad():
        return nn.functional.mse_loss(module(x), y)


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("step", [5, 12])
def test_the_callback_makes_the_trainer_load_any_module(step, present, tmp_path):
    saved(tmp_path, build(Regression))
    path = tmp_path / f"step={step}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert LAYOUT_KEY not in checkpoint
    for stage in ("validate", "test"):
        module = build(Regression, net=PRESENT[present](network(1)))
        hooks = len(module._load_state_dict_pre_hooks)
        getattr(trainer(callback()), stage)(module, loader(), ckpt_path=path, verbose=False)
        assert_equal(dict(module.state_dict()), checkpoint["state_dict"])
        assert len(module._load_state_dict_pre_hooks) == hooks
    outputs = trainer(callback()).predict(module, loader(), ckpt_path=path)
    assert torch.equal(outputs[0], module(next(iter(loader()))[0]))


def test_the_best_checkpoint_is_older_than_the_switch(tmp_path):
    module = build(Regression)
    saver = ModelCheckpoint(tmp_path, monitor="val", mode="max")  # training makes it worse
    run = trainer(callback(), saver, max_epochs=3, enable_checkpointing=True)
    run.fit(module, loader(), loader())
    assert low_rank_maps(module)
    run.test(module, loader(), ckpt_path="best", verbose=False)
    assert not low_rank_maps(module)
    assert all(not parameter.is_inference() for parameter in module.parameters())


@pytest.mark.parametrize("checkpoint", [{}, {"low_rank_layout": {}}], ids=["older", "dense"])
def test_a_checkpoint_without_weights_leaves_the_network(checkpoint):
    """Strategies that shard parameters keep them in files of their own."""
    module = SupervisedModule(network())
    module.on_load_checkpoint(checkpoint)
    assert type(module.net[0]) is nn.Linear


def test_nothing_is_loaded_over_the_optimizer(tmp_path):
    """In the middle of training a state of another structure is refused: the optimizer would lose its parameters."""

    class Loads(ModelCheckpoint):
        def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
            if run.global_step == 12:
                dense = {f"net.{key}": value for key, value in network().state_dict().items()}
                module.load_state_dict(dense)

    with pytest.raises(RuntimeError, match="Missing key"):
        fit(module := build(Regression), callback(), Loads(tmp_path), enable_checkpointing=True)
    assert low_rank_maps(module)
    assert not module._load_state_dict_pre_hooks
