"""Decay of the product as gradients of the penalty, and of the factors themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import Regression, fit, loader, network
from torch import Tensor, nn

from lightning_symmetry.callbacks import FrobeniusDecay, SpectralFactorization
from lightning_symmetry.low_rank import factorize, frobenius_decay

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


def test_a_zero_weight_changes_nothing():
    runs = [factorised(Regression, "adamw") for _ in range(2)]
    for module, callbacks in zip(runs, ([], [FrobeniusDecay(0.0)]), strict=True):
        fit(module, *callbacks, steps=5, data=loader(torch.float64), precision="64-true")
    assert all(map(torch.equal, runs[0].parameters(), runs[1].parameters()))


def test_an_optimizer_that_decays_factors_too_warns():
    with pytest.warns(UserWarning, match="AdamW decays the factors of net.0 with weight_decay=0.01"):
        fit(Regression(optimizer="adamw"), FrobeniusDecay(0.1), SpectralFactorization(at_step=2), steps=4)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_arguments(weight):
    with pytest.raises(MisconfigurationException, match="`weight` to be at least 0 and finite"):
        FrobeniusDecay(weight)


def test_a_network_without_factors_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Regression has none: call factorize\(\)"):
        fit(Regression(nn.Linear(12, 3)), FrobeniusDecay(0.1), steps=1)
