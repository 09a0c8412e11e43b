"""Cost of training with PRONG against plain SGD.

Run on a quiet machine: ``pytest tests/benchmarks/bench_whitening.py -s``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interleaved import ratios
from peak_memory import added_peak
from torch import Tensor, nn

from lightning_symmetry import Autoencoder, ResNet20
from lightning_symmetry.whitening import collect_statistics, reparametrize, whiten

INTERVAL, NUM_SAMPLES = 1000, 100


def reconstruction(net: nn.Module, x: Tensor) -> Tensor:
    return 0.5 * (net(x) - x).square().sum(1).mean()


def cross_entropy(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), torch.arange(len(x)) % 10)


def whitened(net: nn.Module, samples: Tensor, **settings: Any) -> nn.Module:
    whiten(net, **settings)
    update(net, samples)
    return net


def update(net: nn.Module, samples: Tensor) -> None:
    assert not reparametrize(net, collect_statistics(net, lambda: net(samples)), eps=0.1)


def training_step(
    net: nn.Module,
    x: Tensor,
    loss: Callable[[nn.Module, Tensor], Tensor],
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
) -> Callable[[], None]:
    optimizer = make(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(net, x).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(("batch", "bar"), [(128, 1.20), (512, 1.15)])
def test_training_step_of_the_autoencoder(batch: int, bar: float) -> None:
    x, samples = torch.rand(batch, 784), torch.rand(NUM_SAMPLES, 784)
    nets = {
        "plain": Autoencoder(),
        "rank 100": whitened(Autoencoder(), samples),
        "dense": whitened(Autoencoder(), torch.rand(1000, 784)),
        "diagonal": whitened(Autoencoder(), samples, mode="diagonal"),
        "centred": whitened(Autoencoder(), samples, mode="center"),
        "explicit": whitened(Autoencoder(), samples, explicit=True),
        "batch norm": Autoencoder(norm=True),
    }
    steps = {name: training_step(net, x, reconstruction) for name, net in nets.items()}
    steps["Adam"] = training_step(Autoencoder(), x, reconstruction, lambda p: torch.optim.Adam(p, 1e-3))
    assert ratios(steps, "plain", rounds=60)["rank 100"] <= bar


@pytest.mark.parametrize("batch", [128, 512])
def test_reparametrisations_of_the_autoencoder(batch: int) -> None:
    x, samples = torch.rand(batch, 784), torch.rand(NUM_SAMPLES, 784)
    net = whitened(Autoencoder(), samples)
    calls = {"plain": training_step(Autoencoder(), x, reconstruction), "update": lambda: update(net, samples)}
    share = ratios(calls, "plain", rounds=30)["update"] / INTERVAL
    print(f"a reparametrisation every {INTERVAL} steps: {share:.2%} of them")
    assert share <= 0.01


def test_training_step_of_resnet20() -> None:
    x = torch.randn(128, 3, 32, 32)
    nets = {"plain": ResNet20(), "whitened": whitened(ResNet20(), x[:NUM_SAMPLES])}
    steps = {name: training_step(net, x, cross_entropy) for name, net in nets.items()}
    assert ratios(steps, "plain", rounds=20)["whitened"] <= 1.15


NETWORKS = {"autoencoder": (Autoencoder, reconstruction, (784,)), "resnet20": (ResNet20, cross_entropy, (3, 32, 32))}


def short_training(network: str, kind: str) -> Callable[[], None]:
    build, loss, shape = NETWORKS[network]
    x = torch.rand(128, *shape)
    small = Autoencoder(784, (2,)) if network == "autoencoder" else ResNet20()
    part = x[:2, ..., :8, :8] if x.ndim == 4 else x[:2]
    loss(small, part).backward()
    update(whiten(small), part)  # libraries are loaded

    def train() -> None:
        net = whiten(build()) if kind == "whitened" else build()
        step = training_step(net, x, loss)
        for _ in range(4):
            if kind == "whitened":
                update(net, x[:NUM_SAMPLES])
            step()
            step()

    return train


@pytest.mark.parametrize("network", list(NETWORKS))
def test_peak_memory(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the system at once
    peak = {kind: added_peak(short_training, network, kind) for kind in ("plain", "whitened")}
    print(f"\npeak memory {peak} KiB, ratio {peak['whitened'] / peak['plain']:.3f}")
    assert peak["whitened"] / peak["plain"] <= 1.2
