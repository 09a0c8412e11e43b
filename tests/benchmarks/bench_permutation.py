"""Cost of tracing and of weight matching.

Run on a quiet machine: ``pytest tests/benchmarks/bench_permutation.py -s``.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torchvision.models import resnet50

from lightning_symmetry import MLP, DigitsData, PermutationSpec, ResNet20, align, match_weights, trace_permutations

CASES: dict[str, tuple[Callable[[], nn.Module], int, int, float]] = {  # network, size of the images, epochs, seconds
    "MLP 784-512-512-512-10": (lambda: MLP(784), 28, 5, 1.0),
    "ResNet20": (lambda: ResNet20(in_channels=1), 16, 1, 0.5),
}


def median_seconds(call: Callable[[], object], rounds: int = 5) -> float:
    """Return the median seconds of a call, with 2 threads."""
    torch.set_num_threads(2)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def trained(network: Callable[[], nn.Module], size: int, epochs: int, seed: int) -> nn.Module:
    """Return a network trained on the handwritten digits, scaled to ``size x size``."""
    torch.manual_seed(seed)
    data = DigitsData(64)
    data.setup("fit")
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for _ in range(epochs):
        for images, target in data.train_dataloader():
            optimizer.zero_grad()
            F.cross_entropy(net(F.interpolate(images, (size, size))), target).backward()
            optimizer.step()
    return net.eval()


def plain_descent(a: dict[str, Tensor], b: dict[str, Tensor], spec: PermutationSpec, seed: int) -> float:
    """Git Re-Basin's weight matching as it is written: one random order a sweep, until nothing changes."""
    generator = torch.Generator().manual_seed(seed)
    permutations = spec.identity()
    names = [name for name in spec.moved if "running" not in name]
    groups = list(spec.groups.values())
    changed = True
    while changed:
        changed = False
        for number in torch.randperm(len(groups), generator=generator).tolist():
            group = groups[number]
            moved = spec.apply(b, {**permutations, group.name: torch.arange(group.size)})
            gain = torch.zeros(group.size, group.size)
            for place in group.places:
                if place.tensor in names:
                    one, other = (
                        state[place.tensor].movedim(place.axis, 0)[place.index.flatten()].reshape(group.size, -1)
                        for state in (a, moved)
                    )
                    gain += one @ other.T
            found = torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])
            old = gain.gather(1, permutations[group.name][:, None]).sum()
            if gain.gather(1, found[:, None]).sum() > old * (1 + 1e-6) + 1e-6:
                permutations[group.name], changed = found, True
    moved = spec.apply(b, permutations)
    return sum(float((a[name] * moved[name]).sum(dtype=torch.float64)) for name in names)


@pytest.mark.parametrize("case", list(CASES))
def test_weight_matching(case: str) -> None:
    network, size, epochs, limit = CASES[case]
    a, b = (trained(network, size, epochs, seed) for seed in (0, 1))
    example = torch.zeros(1, 1, size, size)
    spec = trace_permutations(a, example)
    found = match_weights(a, b, spec)
    seconds = median_seconds(lambda: match_weights(a, b, spec))
    plain = [plain_descent(a.state_dict(), b.state_dict(), spec, seed) for seed in range(5)]
    plain_seconds = median_seconds(lambda: plain_descent(a.state_dict(), b.state_dict(), spec, 0), 1)
    whole = median_seconds(lambda: align(b, to=a, example_input=example))
    print(
        f"\n{case}: {seconds:.3f} s to match ({whole:.3f} s to align, traced and checked); "
        f"objective {found.before:.1f} -> {found.after:.1f}; plain descent {plain_seconds:.3f} s each, "
        f"{statistics.mean(plain):.1f} (deviation {statistics.stdev(plain):.1f}, best {max(plain):.1f})"
    )
    assert found.after >= statistics.mean(plain)
    assert seconds <= limit


def test_tracing_resnet50() -> None:
    net = resnet50().eval()
    images = torch.randn(1, 3, 224, 224)
    seconds = median_seconds(lambda: trace_permutations(net, images), 3)
    with torch.no_grad():
        forward = median_seconds(lambda: net(images), 3)
    copied = median_seconds(lambda: copy.deepcopy(net), 3)
    print(f"\ntracing resnet50: {seconds:.3f} s; a forward pass {forward:.3f} s, a copy {copied:.3f} s")
    assert seconds <= 3
