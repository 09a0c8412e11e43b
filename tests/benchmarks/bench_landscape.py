"""Cost of evaluating a path.

Run on a quiet machine: ``pytest tests/benchmarks/bench_landscape.py -s``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interleaved import ratios
from torch import nn

from lightning_symmetry import MLP, ResNet20, asymmetrize, evaluate_path

CASES = {
    "MLP": (MLP, (5_000, 784), 500, 9),
    "W-MLP": (lambda: asymmetrize(MLP(), preset="mlp"), (5_000, 784), 500, 9),
    "ResNet20": (ResNet20, (256, 3, 32, 32), 128, 2),
}


@pytest.mark.parametrize("case", list(CASES))
def test_path_of_25_points(case: str) -> None:
    network, shape, batch_size, rounds = CASES[case]
    a, b = network().eval(), network().eval()
    inputs = torch.randn(shape).split(batch_size)
    batches = [(x, torch.randint(10, (len(x),))) for x in inputs]

    @torch.no_grad()
    def bare() -> None:
        for _ in range(25):
            for x in inputs:
                a(x)

    def path() -> None:
        evaluate_path(a, b, batches, 25, progress=False)

    calls: dict[str, Callable[[], object]] = {
        "bare": bare,
        "path": path,
        "load_state_dict": loop(network(), a, b, batches),
    }
    found = ratios(calls, "bare", rounds, warmup=1)
    assert found["path"] <= 1.15
    assert found["path"] < found["load_state_dict"] or case == "ResNet20"


def loop(net: nn.Module, a: nn.Module, b: nn.Module, batches: list) -> Callable[[], None]:
    """Evaluate the path as usual: one interpolated state dict after the other."""
    net.eval()

    @torch.no_grad()
    def run() -> None:
        left, right = a.state_dict(), b.state_dict()
        for alpha in torch.linspace(0, 1, 25).tolist():
            net.load_state_dict(
                {k: (1 - alpha) * v + alpha * right[k] if v.is_floating_point() else v for k, v in left.items()}
            )
            for x, y in batches:
                F.cross_entropy(net(x), y, reduction="sum").item()

    return run
