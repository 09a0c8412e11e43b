"""Deterministic checkpoints in, Bayesian ones out and back, by all routes; a resumed run is the uninterrupted one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from bayesian_modules import (
    CLASSES,
    FEATURES,
    WIDE,
    Bayesian,
    Network,
    assert_same_state,
    bayesian,
    loader,
    mlp,
    samples,
    trainer,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.low_rank import factorize, low_rank_maps
from lightning_symmetry.modules import SupervisedModule, VariationalModule
from lightning_symmetry.modules.low_rank_layout import LAYOUT_KEY
from lightning_symmetry.modules.variational_checkpoints import KEY
from lightning_symmetry.variational import kl_divergence, layout_of, sampling_mode, to_mean

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*number of training batches", "ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*"),
]

STEPS = 16  # four epochs of four batches


def scheduled(seed: int = 0, **kwargs: Any) -> VariationalModule:
    schedule = partial(OneCycleLR, max_lr=0.05, total_steps=STEPS)
    return bayesian(mlp(seed), scheduler=schedule, interval="step", **kwargs)


class Resumable(DataLoader):
    """A loader that goes on where a checkpoint was written, which plain ones do not."""

    def __init__(self) -> None:
        super().__init__(samples("train"), 8)
        self.start = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.start = self.start, 0
        for batch in islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("step", [3, 4, 6, 8])
@pytest.mark.parametrize("settings", [{}, {"num_samples_train": 2, "kl_warmup_steps": 9}])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(settings, step, precision, tmp_path):
    """From the ends of epochs and the middle; another random seed and network do not matter."""
    whole = scheduled(**settings)
    pl.seed_everything(1)
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    run = trainer(saver, max_epochs=4, precision=precision, enable_checkpointing=True)
    run.fit(whole, Resumable(), loader("val"))
    logged, tested = dict(run.logged_metrics), run.test(whole, loader("test"), verbose=False)

    module = scheduled(seed=5, **settings)
    pl.seed_everything(2)
    run = trainer(max_epochs=4, precision=precision)
    run.fit(module, Resumable(), loader("val"), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert run.global_step == STEPS
    assert_same_state(module.state_dict(), whole.state_dict())
    assert dict(run.logged_metrics) == logged
    assert run.test(module, loader("test"), verbose=False) == tested


@pytest.mark.parametrize("step", [2, 3, 4])
def test_resuming_with_accumulated_batches(step, tmp_path):
    whole = bayesian()
    pl.seed_everything(1)
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    arguments = {"max_epochs": 4, "accumulate_grad_batches": 2}
    trainer(saver, enable_checkpointing=True, **arguments).fit(whole, Resumable())
    module = bayesian(mlp(3))
    trainer(**arguments).fit(module, Resumable(), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert_same_state(module.state_dict(), whole.state_dict())


def asymmetric() -> nn.Module:
    return asymmetrize(mlp(), n_fix=2, kappa=0.5, seed=1)


def factorised() -> nn.Module:
    return factorize(mlp(), 2, min_saving=-1)


NETS: dict[str, Callable[[], nn.Module]] = {"plain": mlp, "asymmetric": asymmetric, "factorised": factorised}
POSTERIOR = {**WIDE, "prior": "fan_in:100", "overrides": {"net.2": {"diagonal": "learned", "mode": "weight"}}}
BEFORE: dict[str, Callable[[nn.Module], VariationalModule]] = {
    "same": lambda net: bayesian(net, posterior=POSTERIOR),
    "other": lambda net: bayesian(net, posterior={"rank": 0, "variance": 0.5, "skip": ["net.0"]}),
    "mean": lambda net: to_mean(bayesian(net, posterior={"rank": 1})),
}


def assert_same_module(found: pl.LightningModule, expected: pl.LightningModule) -> None:
    assert layout_of(found) == layout_of(expected)
    assert_same_state(found.state_dict(), expected.state_dict())
    assert torch.equal(kl_divergence(found), kl_divergence(expected))


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", NETS)
def test_a_bayesian_checkpoint_by_every_route(kind, before, tmp_path):
    whole = bayesian(NETS[kind](), posterior=POSTERIOR)
    pl.seed_everything(1)
    run = trainer()
    run.fit(whole, loader("train"))
    path = tmp_path / "bayesian.ckpt"
    run.save_checkpoint(path)
    tested = run.test(whole, loader("test"), verbose=False)
    pl.seed_everything(2)

    module = BEFORE[before](NETS[kind]())
    again = trainer(max_epochs=3)
    assert again.test(module, loader("test"), ckpt_path=path, verbose=False) == tested  # the same noise
    assert_same_module(module, whole)
    assert again.validate(module, loader("val"), ckpt_path=path, verbose=False)
    assert again.predict(module, loader("test"), ckpt_path=path)

    loaded = VariationalModule.load_from_checkpoint(path, net=NETS[kind]())
    assert_same_module(loaded, whole)

    checkpoint = torch.load(path, weights_only=True)
    by_hand = BEFORE[before](NETS[kind]())
    by_hand.on_load_checkpoint(checkpoint)
    by_hand.load_state_dict(checkpoint["state_dict"])
    assert_same_module(by_hand, whole)

    resumed = BEFORE[before](NETS[kind]())
    again.fit(resumed, loader("train"), ckpt_path=path)
    assert again.global_step == 12 and layout_of(resumed) == layout_of(whole)
    assert set(again.optimizers[0].param_groups[0]["params"]) == set(resumed.parameters())


@pytest.mark.parametrize("kind", NETS)
def test_the_mean_loads_into_the_plain_class(kind, tmp_path):
    module = bayesian(NETS[kind]())
    run = trainer()
    run.fit(module, loader("train"))
    with sampling_mode(module, "mean"), torch.no_grad():
        expected = module(torch.eye(FEATURES))
    to_mean(module.net)
    run.save_checkpoint(tmp_path / "mean.ckpt")
    plain = SupervisedModule(NETS[kind]())
    checkpoint = torch.load(tmp_path / "mean.ckpt", weights_only=True)
    plain.on_load_checkpoint(checkpoint)  # a factorised network is dense since it became Bayesian
    plain.load_state_dict(checkpoint["state_dict"])
    torch.testing.assert_close(plain(torch.eye(FEATURES)), expected)
    other = SupervisedModule.load_from_checkpoint(tmp_path / "mean.ckpt", net=NETS[kind]())
    torch.testing.assert_close(other(torch.eye(FEATURES)), expected)
    tested = bayesian(NETS[kind]())
    trainer().test(tested, loader("test"), ckpt_path=tmp_path / "mean.ckpt", verbose=False)
    assert layout_of(tested) == {}


@pytest.mark.parametrize("kind", NETS)
def test_a_deterministic_checkpoint_gives_the_means_by_every_route(kind, tmp_path):
    torch.manual_seed(0)
    plain = SupervisedModule(NETS[kind](), optimizer=partial(torch.optim.AdamW, lr=0.05))
    run = trainer()
    run.fit(plain, loader("train"))
    path = tmp_path / "plain.ckpt"
    run.save_checkpoint(path)
    expected = plain(torch.eye(FEATURES)).detach()
    assert bool(torch.load(path, weights_only=True)[LAYOUT_KEY]) == (kind == "factorised")

    def check(module: pl.LightningModule) -> None:
        assert list(layout_of(module)) == ["net.0", "net.2"] and not low_rank_maps(module)
        assert all(settings["rank"] == 2 for settings in layout_of(module).values())
        with sampling_mode(module, "mean"):
            torch.testing.assert_close(module(torch.eye(FEATURES)), expected)

    module = bayesian(NETS[kind]())
    factors = module.net[0].weight_factors.detach().clone()
    trainer().test(module, loader("test"), ckpt_path=path, verbose=False)
    check(module)
    assert torch.equal(module.net[0].weight_factors, factors)
    check(VariationalModule.load_from_checkpoint(path, net=NETS[kind](), posterior=WIDE))

    by_hand, checkpoint = bayesian(NETS[kind]()), torch.load(path, weights_only=True)
    by_hand.on_load_checkpoint(checkpoint)
    by_hand.load_state_dict(checkpoint["state_dict"])
    check(by_hand)

    trained = bayesian(NETS[kind]())
    again = trainer(max_epochs=3)
    with pytest.warns(UserWarning, match="of a deterministic network.* starts anew"):
        again.fit(trained, loader("train"), ckpt_path=path)
    assert again.global_step == 12 and again.current_epoch == 3
    (group,) = again.optimizers[0].param_groups
    assert group["params"] == list(trained.parameters())
    assert all(int(state["step"]) == 4 for state in again.optimizers[0].state.values())


def test_without_more_parameters_the_optimizer_goes_on(tmp_path):
    """Mean-field with a constant diagonal has the parameters of the deterministic network."""
    plain = SupervisedModule(mlp())
    run = trainer()
    run.fit(plain, loader("train"))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    module = bayesian(posterior={"rank": 0})
    again = trainer(max_epochs=3)
    again.fit(module, loader("train"), ckpt_path=tmp_path / "plain.ckpt")
    assert all(int(state["step"]) == 12 for state in again.optimizers[0].state.values())


def test_what_is_in_a_checkpoint(tmp_path):
    module = bayesian()
    pl.seed_everything(123)
    run = trainer()
    run.fit(module, loader("train"))
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint[KEY] == {"layout": layout_of(module), "seed": 123}
    assert {"net.0.weight", "net.0.bias", "net.0.weight_factors", "net.0.bias_factors"} <= set(checkpoint["state_dict"])


def test_a_checkpoint_of_another_network_is_refused_and_changes_nothing(tmp_path):
    run = trainer()
    run.fit(bayesian(), loader("train"))
    run.save_checkpoint(tmp_path / "a.ckpt")
    torch.manual_seed(0)
    other = bayesian(nn.Sequential(nn.Linear(FEATURES, CLASSES)))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="has no layer of that name"):
        trainer().test(other, loader("test"), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert_same_state(other.state_dict(), before)


def test_a_module_without_low_rank_layouts(tmp_path):
    """A user's own module, converted by its constructor or not yet."""
    plain = Network()
    run = trainer()
    run.fit(plain, loader("train"))
    run.save_checkpoint(Path(tmp_path) / "plain.ckpt")
    module = Bayesian.load_from_checkpoint(Path(tmp_path) / "plain.ckpt", posterior=WIDE)
    assert torch.equal(module.net[0].weight, plain.net[0].weight) and len(layout_of(module)) == 2
