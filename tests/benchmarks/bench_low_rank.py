"""Speed of factorised layers at a quarter of the full rank, and of their decomposition.

Run on a quiet machine: ``pytest tests/benchmarks/bench_low_rank.py -s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torchvision
from interleaved import ratios
from torch import Tensor, nn

from lightning_symmetry import LowRankConv2d, LowRankLinear, factorize
from lightning_symmetry.low_rank import Decomposition


def forward_and_backward(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    x = x.clone().requires_grad_()

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).sum().backward()

    return step


@pytest.mark.parametrize("size", [512, 1024, 2048])
def test_linear(size: int) -> None:
    x = torch.randn(128, size)
    layers = {"dense": nn.Linear(size, size), "factors": LowRankLinear(size, size, size // 4)}
    steps = {name: forward_and_backward(layer, x) for name, layer in layers.items()}
    assert 1 / ratios(steps, "dense", rounds=40)["factors"] >= 1.8


@pytest.mark.parametrize(("channels", "pixels"), [(64, 32), (128, 16), (256, 16), (512, 8)])
def test_convolution(channels: int, pixels: int) -> None:
    x = torch.randn(16, channels, pixels, pixels)
    layers: dict[str, nn.Module] = {"dense": nn.Conv2d(channels, channels, 3, padding=1)}
    for scheme in ("kxk-1x1", "1xk-kx1"):
        layers[scheme] = LowRankConv2d(channels, channels, 3, channels // 4, scheme, padding=1)
    steps = {name: forward_and_backward(layer, x) for name, layer in layers.items()}
    measured = ratios(steps, "dense", rounds=30)
    assert 1 / max(measured["kxk-1x1"], measured["1xk-kx1"]) >= 2.0


def test_decomposition_of_resnet50() -> None:
    torch.set_num_threads(2)
    net = torchvision.models.resnet50()
    start = time.perf_counter()
    factorize(net, 0.25)
    seconds = time.perf_counter() - start
    print(f"\n{len(net.factorization_report.changed)} layers of ResNet-50 in {seconds:.1f} s")
    assert seconds <= 20


SHAPES = sorted({(len(p), p[0].numel()) for p in torchvision.models.resnet50().parameters() if p.ndim > 1})


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_decomposition_of_a_layer(shape: tuple[int, int]) -> None:
    weight, rank = torch.randn(shape), min(shape) // 4
    wide = weight if shape[0] <= shape[1] else weight.T

    def gram() -> tuple[Tensor, ...]:
        """Decompose by the short side alone, without a check of anything; both sides' vectors are wanted."""
        matrix = wide.double()
        squares, vectors = torch.linalg.eigh(matrix @ matrix.T)
        values, short = squares[-rank:].sqrt(), vectors[:, -rank:]
        return short, values, matrix.T @ short / values

    calls = {
        "ours": lambda: Decomposition(weight.unsqueeze(0)).truncate(rank),
        "eigh": gram,
        "svd": lambda: torch.linalg.svd(weight.double(), full_matrices=False),
    }
    measured = ratios(calls, "eigh", rounds=5 if min(shape) > 256 else 15, warmup=1)
    bar = 1.2 if min(shape) > 64 else 1.6  # where all takes half a millisecond, calls and checks take 0.1 of it
    assert measured["ours"] <= bar * min(measured["eigh"], measured["svd"])
