"""Scale the learning rates of optimizers in the middle of training, with what schedulers compute them from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")  # the last two are OneCycleLR's
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


def all_schedulers(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield schedulers and those within sequential and chained ones, each once.

    Args:
        schedulers: The schedulers.
    """
    waiting, seen = list(schedulers), set()
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield scheduler
        waiting.extend(getattr(scheduler, "_schedulers", ()))


def scale_learning_rates(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply all learning rates, present ones and those to come, by a factor.

    What schedulers compute theirs from is multiplied with them: ``base_lrs`` and, of ``OneCycleLR`` and ``CyclicLR``,
    the largest and smallest ones. A least learning rate that was given as a number (``eta_min``, ``min_lrs``) stays.

    Args:
        optimizers: The optimizers.
        schedulers: Their schedulers.
        factor: What to multiply by.
    """
    if factor == 1:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in _OF_GROUPS:
                rate = group.get(key)
                if key == "lr" and isinstance(rate, Tensor):  # of a capturable optimizer, which keeps its tensor
                    rate.mul_(factor)
                elif rate is not None:
                    group[key] = rate * factor
    for scheduler in all_schedulers(schedulers):
        for key in _OF_SCHEDULERS:
            if isinstance(rates := getattr(scheduler, key, None), list | tuple):
                setattr(scheduler, key, [rate * factor for rate in rates])
