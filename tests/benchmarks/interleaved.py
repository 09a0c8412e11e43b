"""Compare running times in one run: calls are interleaved in random order and medians compared."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch


def ratios(calls: dict[str, Callable[[], object]], base: str, rounds: int, warmup: int = 2) -> dict[str, float]:
    """Return each call's median time as a multiple of that of ``base``, with 2 threads."""
    torch.set_num_threads(2)
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(warmup + rounds):
        for name in order.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            if round_ >= warmup:
                times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{base}: {1e3 * median[base]:.2f} ms", {name: round(t / median[base], 3) for name, t in median.items()})
    return {name: value / median[base] for name, value in median.items()}
