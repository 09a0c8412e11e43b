"""Speed of populations of small networks against a plain loop over networks.

Run on a quiet machine with two cores: ``pytest tests/benchmarks/bench_population.py -s``.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_symmetry.metanets import zoo_classifier
from lightning_symmetry.metanets.population import PopulationSettings, suggested_chunk, train_population

BARS = {64: 3.0, 16: 5.0}  # networks a second of two workers, as multiples of the plain loop's
ROUNDS = 5


def digits() -> tuple[Tensor, Tensor]:
    images, target = load_digits(return_X_y=True)
    return torch.tensor(images[:1437], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(target[:1437])


def plain_loop(batch_size: int, threads: int, fused: bool) -> Callable[[], int]:
    """Return what trains one network for an epoch, as anyone would, and returns 1."""
    images, target = digits()
    generator = torch.Generator().manual_seed(0)
    steps = -(-len(images) // batch_size)

    def run() -> int:
        torch.set_num_threads(threads)
        network: nn.Module = zoo_classifier().train()
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=1e-3, fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for index in torch.randperm(len(images), generator=generator).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(network(images[index]), target[index], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
        return 1

    return run


def population(batch_size: int) -> int:
    """Train a population for an epoch on one thread, and return its size."""
    torch.set_num_threads(1)
    images, target = digits()
    networks = [zoo_classifier() for _ in range(suggested_chunk(zoo_classifier(), images, batch_size))]
    count = len(networks)
    values = {
        "learning_rate": np.full(count, 0.1),
        "weight_decay": np.full(count, 1e-3),
        "label_smoothing": np.full(count, 0.1),
        "epochs": np.ones(count, int),
        "seed": np.arange(count),
    }
    train_population(networks, images, target, values, PopulationSettings(batch_size=batch_size))
    return count


@pytest.mark.parametrize("batch_size", list(BARS))
def test_population_of_digit_classifiers(batch_size: int) -> None:
    plain = {
        f"plain, {threads} threads{', fused' if fused else ''}": plain_loop(batch_size, threads, fused)
        for threads in (1, 2)
        for fused in (False, True)
    }
    with multiprocessing.get_context("spawn").Pool(2) as workers:

        def both() -> int:
            return sum(workers.map(population, [batch_size] * 2, chunksize=1))

        calls = plain | {"population, 1 thread": lambda: population(batch_size), "population, 2 workers": both}
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times = 1 if name.startswith("population") else 5
                start = time.perf_counter()
                trained = sum(call() for _ in range(times))
                rates[name].append(trained / (time.perf_counter() - start))
    median = {name: statistics.median(values) for name, values in rates.items()}
    best = max(median[name] for name in plain)
    print(f"\nbatch {batch_size}, networks a second (an epoch each) and ratio to the best plain loop:")
    for name, rate in median.items():
        print(f"  {name:28s} {rate:7.1f} {rate / best:6.2f}")
    assert median["population, 2 workers"] >= BARS[batch_size] * best
