"""Decay of the product as gradients of the penalty, and of the factors themselves."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import Regression, fit, loader, network
from torch import Tensor, nn

from lightning_symmetry.callbacks import FrobeniusDecay, SpectralFactorization
from lightning_symmetry.low_rank import add_frobenius_decay_, decay_factors_, factorize, frobenius_decay

RATE, WEIGHT = 0.05, 0.1


class Penalised(Regression):
    """Adds the penalty to its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + frobenius_decay(self.net, WEIGHT)


def factorised(kind: type[Regression], optimizer: str) -> Regression:
    return kind(factorize(network(), 2, skip=["4"]).double(), optimizer)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.filterwarnings("ignore:.*FrobeniusDecay decays their product.*")
def test_coupled_decay_is_the_penalty(optimizer, settings):
    ours, penalised = factorised(Regression, optimizer), factorised(Penalised, optimizer)
    settings = {"steps": 12, "data": loader(torch.float64, 10), "precision": "64-true", **settings}
    fit(ours, FrobeniusDecay(WEIGHT), **settings)
    fit(penalised, **settings)
    for a, b in zip(ours.parameters(), penalised.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("optimizer", ["momentum", "fused"])
@pytest.mark.filterwarnings("ignore:.*FrobeniusDecay decays their product.*")
def test_coupled_decay_where_gradients_are_scaled(optimizer):
    """A fused optimizer takes the scale out of the gradients itself, after the decay was added."""
    ours, penalised = (kind(factorize(network(), 2, skip=["4"]), optimizer) for kind in (Regression, Penalised))
    for module, callbacks in ((ours, [FrobeniusDecay(WEIGHT)]), (penalised, [])):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        fit(module, *callbacks, steps=6, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    for a, b in zip(ours.parameters(), penalised.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_decoupled_decay_by_hand():
    module = factorised(Regression, "sgd")
    values = [p.detach().clone() for p in module.parameters()]
    fit(module, FrobeniusDecay(WEIGHT, decoupled=True), steps=6, data=loader(torch.float64), precision="64-true")
    shown = list(loader(torch.float64))
    for step in range(6):
        x, y = shown[step % len(shown)]
        u0, v0, b0, u1, v1, b1, w, b = leaves = [value.clone().requires_grad_() for value in values]
        hidden = F.linear(F.linear(x, u0 @ v0.T, b0).tanh(), u1 @ v1.T, b1).tanh()
        gradients = torch.autograd.grad((F.linear(hidden, w, b) - y).square().mean(), leaves)
        updates = [RATE * gradient for gradient in gradients]
        for index in (0, 3):
            u, v = values[index], values[index + 1]
            updates[index] += RATE * WEIGHT * u @ v.T @ v
            updates[index + 1] += RATE * WEIGHT * v @ u.T @ u
        values = [value - update for value, update in zip(values, updates, strict=True)]
    for ours, value in zip(module.parameters(), values, strict=True):
        torch.testing.assert_close(ours.detach(), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decoupled", [False, True])
def test_it_begins_with_the_switch(decoupled):
    """Layers without factors have no part in it, and the products end smaller."""
    norms = []
    for decay in (None, FrobeniusDecay(1.0, decoupled)):
        module = Regression(optimizer="momentum")
        switch = SpectralFactorization(at_step=5, skip=["net.4"])
        fit(module, *(one for one in (decay, switch) if one is not None), steps=20)
        norms.append((module.losses[:5], float(module.net[0].canonical_weight().detach().norm())))
    assert norms[0][0] == norms[1][0]
    assert norms[1][1] < 0.9 * norms[0][1]


def grouped(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in two groups; only matrices are decayed."""
    parts = ([p for p in module.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False))
    return [{"params": part, "weight_decay": amount} for part, amount in zip(parts, (weight_decay, 0.0), strict=True)]


class Grouped(Regression):
    """Its optimizer decays matrices, by an amount of its own."""

    def __init__(self, kind: type[torch.optim.Optimizer], amount: float, **settings: Any) -> None:
        super().__init__()
        self.kind, self.amount, self.settings = kind, amount, settings

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(grouped(self, self.amount), lr=RATE, **self.settings)


@pytest.mark.parametrize(
    ("kind", "decoupled", "settings"),
    [(torch.optim.SGD, False, {"momentum": 0.9}), (torch.optim.Adam, False, {}), (torch.optim.AdamW, True, {})],
    ids=["sgd", "adam", "adamw"],
)
def test_decay_of_dense_weights_is_the_optimizers(kind, decoupled, settings):
    ours, theirs = (Grouped(kind, amount, **settings).double() for amount in (0.0, WEIGHT))
    data = {"steps": 12, "data": loader(torch.float64), "precision": "64-true"}
    fit(ours, FrobeniusDecay(WEIGHT, decoupled, dense=True), **data)
    fit(theirs, **data)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["fused", "plain"])
def test_decoupled_decay_is_the_optimizers_where_it_takes_no_step(optimizer):
    """Of a layer that is not used, and where a gradient of fp16 has overflowed."""
    runs = []
    for amount, callbacks in ((0.0, [FrobeniusDecay(WEIGHT, decoupled=True, dense=True)]), (WEIGHT, [])):
        module = Grouped(torch.optim.AdamW, amount, fused=optimizer == "fused")
        module.spare = nn.Linear(3, 3)
        nn.init.ones_(module.spare.weight)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # 4 overflows come first
        fit(module, *callbacks, steps=12, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        assert scaler.get_scale() < 2.0**20
        assert torch.equal(module.spare.weight, torch.ones(3, 3))
        runs.append(module)
    for a, b in zip(*(module.parameters() for module in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("decoupled", [False, True])
def test_under_autocast_decay_is_in_the_precision_of_the_factors(decoupled):
    net = factorize(network(), 2, skip=["4"])
    part, before = net[0], [p.detach().clone() for p in (net[0].left, net[0].right)]
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.autocast("cpu", torch.bfloat16):
        decay_factors_(net, WEIGHT) if decoupled else add_frobenius_decay_(net, WEIGHT)
    left, right = (p.double() for p in before)
    expected = WEIGHT * left @ right.T @ right
    moved = before[0] - part.left.detach() if decoupled else part.left.grad
    torch.testing.assert_close(moved.double(), expected, rtol=1e-5, atol=1e-6)


class Penalty(pl.Callback):
    """Keeps the penalty before each batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(frobenius_decay(pl_module.net, WEIGHT, dense=True).item())


@pytest.mark.parametrize("decoupled", [False, True])
def test_dense_decay_goes_on_over_a_switch_at_full_rank(decoupled):
    """The penalty acts from the first step, on the layer that stays dense too, and does not jump."""
    before, after = Penalty(), Penalty()
    switch = SpectralFactorization(at_step=5, rank=1.0, min_saving=-1, skip=["net.4"])
    data = {"steps": 20, "data": loader(torch.float64), "precision": "64-true"}
    module, dense = (Grouped(torch.optim.SGD, 0.0).double() for _ in range(2))
    fit(module, before, switch, FrobeniusDecay(WEIGHT, decoupled, dense=True), after, **data)
    fit(dense, whole := Penalty(), FrobeniusDecay(WEIGHT, decoupled, dense=True), **data)
    assert switch.report.changed == ["net.0", "net.2"]
    torch.testing.assert_close(after.values, before.values, rtol=1e-12, atol=0)
    assert before.values[:6] == whole.values[:6]
    assert after.values == sorted(after.values, reverse=True)
    without = Grouped(torch.optim.SGD, 0.0).double()
    fit(without, SpectralFactorization(at_step=0, skip=["net.4"]), FrobeniusDecay(WEIGHT, decoupled), **data)
    assert module.net[4].weight.norm() < without.net[4].weight.norm()


def test_a_zero_weight_changes_nothing():
    runs = [factorised(Regression, "adamw") for _ in range(2)]
    for module, callbacks in zip(runs, ([], [FrobeniusDecay(0.0)]), strict=True):
        fit(module, *callbacks, steps=5, data=loader(torch.float64), precision="64-true")
    assert all(map(torch.equal, runs[0].parameters(), runs[1].parameters()))


def test_an_optimizer_that_decays_factors_too_warns():
    with pytest.warns(UserWarning, match="AdamW decays the factors of net.0 with weight_decay=0.01"):
        fit(Regression(optimizer="adamw"), FrobeniusDecay(0.1), SpectralFactorization(at_step=2), steps=4)


@pytest.mark.parametrize(("rank", "name"), [(2, "the factors of net.0"), (None, "net.0.weight")])
def test_an_optimizer_that_decays_the_same_matrices_warns(rank, name):
    net = network() if rank is None else factorize(network(), rank, skip=["4"])
    with pytest.warns(UserWarning, match=f"AdamW decays {name} .* give matrices a group with weight_decay=0"):
        fit(Regression(net, "adamw"), FrobeniusDecay(0.1, dense=True), steps=2)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_arguments(weight):
    with pytest.raises(MisconfigurationException, match="`weight` to be at least 0 and finite"):
        FrobeniusDecay(weight)


def test_a_network_without_factors_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Regression has none: call factorize\(\)"):
        fit(Regression(nn.Linear(12, 3)), FrobeniusDecay(0.1), steps=1)


def test_a_network_without_matrices_is_refused():
    with pytest.raises(MisconfigurationException, match="Regression has none that are matrices"):
        fit(Regression(nn.LayerNorm(12)), FrobeniusDecay(0.1, dense=True), steps=1)
