"""Which networks of a zoo are trained together, and where."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_symmetry.metanets.population_settings import HYPERPARAMETERS, checked_hyperparameters

OPTIONAL = {"weight_decay": 0.0, "label_smoothing": 0.0}


@dataclass(frozen=True)
class Chunk:
    """Networks that are trained together.

    Attributes:
        number: Which chunk of all, from 0.
        indices: The `index` of each network.
        epochs: Sum of their epochs.
    """

    number: int
    indices: tuple[int, ...]
    epochs: int

    def __str__(self) -> str:
        some = ", ".join(map(str, self.indices[:5])) + (", ..." if len(self.indices) > 5 else "")
        return f"chunk {self.number} ({len(self.indices)} networks, of index {some})"


def complete_hyperparameters(hyperparameters: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return checked hyper-parameters, those that may be left out included.

    Args:
        hyperparameters: ``learning_rate`` and ``epochs``; ``weight_decay`` and ``label_smoothing``, by default 0;
            ``seed``, by default drawn from `seed`, whose first values do not depend on how many there are.
        seed: Seed of the seeds.

    Returns:
        Five arrays of shape (n,).

    Raises:
        ValueError: If a name is unknown, lengths differ, or a value is out of its range.
    """
    if unknown := [name for name in hyperparameters if name not in HYPERPARAMETERS]:
        raise ValueError(f"Expected `hyperparameters` to be of {', '.join(HYPERPARAMETERS)} but got {unknown}.")
    shapes = {name: np.shape(values) for name, values in hyperparameters.items()}
    if len({*shapes.values()}) > 1 or any(len(shape) != 1 or shape[0] == 0 for shape in shapes.values()):
        raise ValueError(f"Expected `hyperparameters` to be arrays with one value a network but got shapes {shapes}.")
    if missing := [name for name in ("learning_rate", "epochs") if name not in hyperparameters]:
        raise ValueError(f"Expected `hyperparameters` to have {' and '.join(missing)} but got {[*hyperparameters]}.")
    count = len(hyperparameters["epochs"])
    complete = {name: np.full(count, value) for name, value in OPTIONAL.items()}
    # Below 2**53, which every reader of JSON keeps.
    complete["seed"] = np.random.default_rng(seed).integers(2**53, size=count)
    return checked_hyperparameters({**complete, **hyperparameters}, count)


def plan_chunks(epochs: np.ndarray, chunk_size: int) -> list[Chunk]:
    """Divide networks into chunks of nearly equal size, those with the most epochs first.

    Networks that end together leave no idle places in a chunk, and what takes longest had better not begin last.

    Args:
        epochs: Epochs of each network, shape (n,).
        chunk_size: Networks in a chunk, at most.

    Returns:
        The chunks. They depend on nothing but the arguments.
    """
    order = np.argsort(-epochs, kind="stable")
    parts = np.array_split(order, -(-len(order) // chunk_size))
    return [Chunk(i, tuple(part.tolist()), int(epochs[part].sum())) for i, part in enumerate(parts)]


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """Read ``"i/n"``, part i of n with i from 0 to n - 1.

    Args:
        shard: The text; None is passed through.

    Returns:
        ``(i, n)``.

    Raises:
        ValueError: If it is nothing of the kind.
    """
    if shard is None:
        return None
    if not (match := re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", shard)):
        raise ValueError(f"Expected `shard` to be 'i/n', such as '0/4', but got {shard!r}.")
    return check_shard((int(match[1]), int(match[2])))


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """Return a shard that is one.

    Args:
        shard: ``(i, n)``.

    Raises:
        ValueError: If i is not among 0 to n - 1.
    """
    i, n = shard
    if not 0 <= i < n:
        raise ValueError(f"Expected `shard` (i, n) to have i from 0 to n - 1 but got i = {i}, n = {n}.")
    return i, n


def launched_shard() -> tuple[int, int] | None:
    """Return rank and world size of a distributed launch: of torch.distributed, or as ``torchrun`` announces them.

    Returns:
        ``(rank, world_size)``, or None where there is one process.

    Raises:
        ValueError: If the announcement makes no sense.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found = torch.distributed.get_rank(), torch.distributed.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        return None
    return check_shard(found) if found[1] > 1 else None


def default_workers() -> int:
    """Return the number of cores that this process may use; those of a machine are shared among its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched_shard() else 1
    return max(1, cores // ranks)
