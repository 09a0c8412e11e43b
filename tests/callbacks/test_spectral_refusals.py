"""What SpectralFactorization refuses, each with a message that says what to do; what fails leaves all as it was."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import Regression, Vanish, fit
from torch import nn

from lightning_symmetry.callbacks import PRONG, SpectralFactorization
from lightning_symmetry.low_rank import low_rank_maps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of `at_step`, `at_epoch` and `at_fraction` but got none"),
        ({"at_step": 3, "at_epoch": 1}, "exactly one of"),
        ({"at_step": -1}, "`at_step` to be a number of at least 0 but got -1"),
        ({"at_step": 0.5}, "`at_step`"),
        ({"at_epoch": -1}, "`at_epoch`"),
        ({"at_fraction": 1.0}, r"`at_fraction` to be in \[0, 1\) but got 1.0"),
        ({"at_step": 1, "lr_factor": 0.0}, "`lr_factor`"),
        ({"at_step": 1, "lr_factor": math.inf}, "`lr_factor`"),
        ({"at_step": 1, "moments": "keep"}, "`moments`.*'keep'"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        SpectralFactorization(**arguments)


def at(**kwargs: Any) -> SpectralFactorization:
    return SpectralFactorization(**{"at_step": 3, **kwargs})


class LBFGS(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Sparse(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters())


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("module", "callbacks", "message"),
    [
        (lambda: Sparse(), [at()], "SparseAdam takes sparse gradients only"),
        (lambda: Regression(nn.Sequential(nn.LayerNorm(12))), [at()], "nothing to convert: it has no layers"),
        (lambda: Regression(), [at(skip=["*"])], "nothing to convert: net.0 .skipped"),
        (lambda: Regression(), [at(skip=["head"])], "'head', which matches no layer"),
        (lambda: Regression(), [at(overrides={"net.0": {"ranks": 1}})], r"sets \['ranks'\]"),
        (lambda: Regression(), [at(scheme="kx1")], "`scheme` to be 'kxk-1x1' or '1xk-kx1' but got 'kx1'"),
        (lambda: Regression(), [at(rank=0)], "`rank` to be a number of at least 1.* but got 0"),
        (lambda: Regression(), [at(rank=16)], "nothing to convert: net.0 .rank 16 is beyond its full rank 12"),
        (lambda: Regression(), [at(rank=7, skip=["net.2"])], "net.0 .rank 7 saves no parameters: break-even .* 6.857"),
        (lambda: Regression(), [at(overrides={"net.4": {"rank": 3}})], "Layer 'net.4': rank 3 saves no parameters"),
        (lambda: Regression(tied()), [at(overrides={"net.0": {"rank": 3}})], "net.0 and net.2 have the same weight"),
        (lambda: Regression(), [at(), BackboneFinetuning()], "BackboneFinetuning keeps the names of parameters"),
        (lambda: Regression(), [at(), EMAWeightAveraging()], "EMAWeightAveraging averages"),
        (lambda: Regression(), [StochasticWeightAveraging(0.1), at()], "StochasticWeightAveraging averages"),
        (lambda: Regression(), [at(), PRONG()], "PRONG keeps the network whitened"),
        (lambda: Regression(), [at(), at(at_step=5)], "Two SpectralFactorization .* can be done once; leave one"),
        (lambda: LBFGS(), [at()], "cannot hand LBFGS over"),
        (lambda: Regression(), [SpectralFactorization(at_fraction=0.5)], "`at_fraction` needs a fit that ends"),
    ],
)
def test_fits(module, callbacks, message):
    module = module()
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, *callbacks, steps=-1, max_epochs=-1 if "ends" in message else 3)
    assert not low_rank_maps(module)
    assert not module._load_state_dict_pre_hooks


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_shard_parameters(kind):
    run = SimpleNamespace(strategy=kind(), callbacks=[])  # they need accelerators to train
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__} shards them"):
        at().setup(run, Regression(), "fit")


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ({"at_step": 15}, "after optimizer step 15, but .* after 15 steps"),
        ({"at_epoch": 3}, "epoch 3, but .* 3 epochs"),
    ],
)
def test_a_switch_that_never_comes_warns(when, message):
    with pytest.warns(UserWarning, match=message):
        fit(module := Regression(), SpectralFactorization(**when), steps=-1, max_epochs=3)
    assert not low_rank_maps(module)


class Look(pl.Callback):
    """Notes what the switch must leave when it fails: the objects, and the learning rate."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.note(run, module)

    def on_exception(self, run: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.note(run, module)

    def note(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        (optimizer,) = run.optimizers
        groups = [(list(map(id, g["params"])), g["lr"], g.get("initial_lr")) for g in optimizer.param_groups]
        states = {id(p): {k: float(v.sum()) for k, v in state.items()} for p, state in optimizer.state.items()}
        values = {n: (id(p), p.detach().clone()) for n, p in module.named_parameters()}
        parts = {n: id(part) for n, part in module.named_modules()}
        base = [config.scheduler.base_lrs for config in run.lr_scheduler_configs]
        self.seen.append((groups, states, parts, sorted(vars(module)), base, values))


def test_a_switch_that_fails_leaves_all_as_it_was():
    module, look = Regression(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)), Look()
    with pytest.raises(MisconfigurationException, match=r"nothing to convert(?s:.)*its weight is zero"):
        fit(module, at(lr_factor=0.5), Vanish(), look)
    *before, values = look.seen[-2]
    *after, present = look.seen[-1]
    assert len(look.seen) == 4
    assert before == after
    for name, (identity, value) in values.items():
        assert present[name][0] == identity
        assert torch.equal(present[name][1], value)


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_a_weight_that_has_no_factors_at_the_switch_is_left_alone_by_name(value):
    """It was fine at the start, and is the matter of whoever trains; the other layers get their factors."""
    module, switch = Regression(optimizer="sgd"), at()
    reason = "its weight is not finite" if math.isnan(value) else "its weight is zero"
    with pytest.warns(UserWarning, match=f"factorize left 1 layer.s. alone: net.4 .{reason}"):
        fit(module, Vanish([4], value), switch, steps=4)
    assert switch.report.changed == ["net.0", "net.2"]
    assert isinstance(module.net[4], nn.Linear)
