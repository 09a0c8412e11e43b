"""Speed of a training step of the bound, and of a prediction, as multiples of the deterministic network's.

MLP-8 of width 512, batch 250, K = 4, constant diagonal; forward, divergence and backward. Run on a quiet machine:
``pytest tests/benchmarks/bench_variational.py -s``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interleaved import ratios
from torch import nn

from lightning_symmetry import MLP
from lightning_symmetry.variational import kl_divergence, negative_elbo, predictive, to_variational

BARS = {"shared": 3.3, "local": 6.0, "mean-field": 2.3}


def network() -> nn.Module:
    torch.manual_seed(0)
    return MLP(784, (512,) * 8, 10, activation=nn.ReLU)


def step(net: nn.Module, variational: bool = True) -> Callable[[], None]:
    x, y = torch.randn(250, 784), torch.randint(0, 10, (250,))

    def run() -> None:
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        if variational:
            loss = negative_elbo(loss, kl_divergence(net), 60_000)
        loss.backward()

    return run


def test_training_step() -> None:
    calls = {
        "deterministic": step(network(), variational=False),
        "shared": step(to_variational(network(), 4, mode="shared")),
        "local": step(to_variational(network(), 4, mode="local")),
        "mean-field": step(to_variational(network(), 0)),
        "mean-field, learned diagonal": step(to_variational(network(), 0, diagonal="learned")),
    }
    measured = ratios(calls, "deterministic", rounds=20)
    for name, bar in BARS.items():
        assert measured[name] <= bar, name


@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
def test_prediction(mode: str) -> None:
    """25 samples that share no more than the first layer's input are about 25 passes, less what they share."""
    net, plain, x = to_variational(network(), 4, mode=mode), network(), torch.randn(250, 784)
    last = to_variational(network(), 4, mode=mode, skip=[f"linears.{layer}" for layer in range(8)])
    calls = {
        "pass": lambda: plain(x),
        "25 passes": lambda: [plain(x) for _ in range(25)],
        "25 samples": lambda: predictive(net, x),
        "25 samples, last layer only": lambda: predictive(last, x),
    }
    with torch.no_grad():
        measured = ratios(calls, "pass", rounds=15)
    assert measured["25 samples, last layer only"] <= 3
    assert measured["25 samples"] <= 20
