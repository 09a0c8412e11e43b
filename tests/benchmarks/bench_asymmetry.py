"""Cost of asymmetric networks against the plain ones.

Run on a quiet machine: ``pytest tests/benchmarks/bench_asymmetry.py -s``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interleaved import ratios
from peak_memory import added_peak
from torch import nn

from lightning_symmetry import MLP, ResNet20, asymmetrize

OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=1e-4),
}


def training_step(net: nn.Module, x: torch.Tensor, optimizer: str) -> Callable[[], None]:
    target = torch.randint(10, (len(x),))
    optim = OPTIMIZERS[optimizer](net.parameters())

    def step() -> None:
        optim.zero_grad()
        F.cross_entropy(net(x), target).backward()
        optim.step()

    return step


@pytest.mark.parametrize(("optimizer", "bar"), [("AdamW fused", 1.10), ("AdamW foreach", 1.15), ("SGD", 1.15)])
def test_training_step_of_w_mlp(optimizer: str, bar: float) -> None:
    x = torch.randn(64, 784)
    steps = {"plain": training_step(MLP(), x, optimizer)}
    steps["w"] = training_step(asymmetrize(MLP(), preset="mlp"), x, optimizer)
    assert ratios(steps, "plain", rounds=300)["w"] <= bar


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_step_of_sigma_mlp(optimizer: str) -> None:
    x = torch.randn(64, 784)
    steps = {"plain": training_step(MLP(), x, optimizer)}
    steps["sigma"] = training_step(asymmetrize(MLP(), "sigma"), x, optimizer)
    assert ratios(steps, "plain", rounds=300)["sigma"] <= 1.20


def test_training_step_of_resnet20() -> None:
    x = torch.randn(128, 3, 32, 32)
    nets = {
        "plain": ResNet20(),
        "w": asymmetrize(ResNet20(), preset="resnet20"),
        "sigma": asymmetrize(ResNet20(), "sigma"),
    }
    found = ratios({name: training_step(net, x, "SGD") for name, net in nets.items()}, "plain", rounds=20)
    assert found["w"] <= 1.03
    assert found["sigma"] <= 1.25


def short_training(kind: str) -> Callable[[], None]:
    net = asymmetrize(ResNet20(), "sigma") if kind == "sigma" else ResNet20()
    x = torch.randn(128, 3, 32, 32)
    F.cross_entropy(net(x[:2]), torch.randint(10, (2,))).backward()
    step = training_step(net, x, "SGD")

    def train() -> None:
        for _ in range(3):
            step()

    return train


def test_peak_memory_of_sigma_resnet20() -> None:
    peak = {kind: added_peak(short_training, kind) for kind in ("plain", "sigma")}
    print(f"\npeak memory {peak} KiB, ratio {peak['sigma'] / peak['plain']:.3f}")
    assert peak["sigma"] / peak["plain"] <= 1.4


def test_building_resnet20_of_width_8() -> None:
    def build() -> nn.Module:
        return asymmetrize(ResNet20(width=8), preset="resnet20-w8", overrides={"stem": {"n_fix": 12}})

    assert ratios({"plain": lambda: ResNet20(width=8), "w": build}, "plain", rounds=15)["w"] <= 2


@pytest.mark.parametrize(("network", "preset"), [(MLP, "mlp"), (ResNet20, "resnet20")])
def test_size_of_the_state_dict(network: Callable[[], nn.Module], preset: str) -> None:
    def size(net: nn.Module) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())

    ratio = size(asymmetrize(network(), preset=preset)) / size(network())
    print(f"\nstate dict of {preset}: {ratio:.3f}")
    assert ratio <= 1.6
