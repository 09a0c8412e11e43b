"""Batches of a loader, held in memory some at a time and moved to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

HELD_BYTES = 256 * 2**20  # batches kept at a time, so that parameters are interpolated once for many of them


class BatchGroups:
    """The batches of a loader in lists of up to :data:`HELD_BYTES`, for one pass or several.

    Batches that all fit into one list are loaded in the first pass only.

    Args:
        loader: Batches; any iterable, but for several passes over more than one list it must give them each time.
        transfer: Applied to each batch once it is loaded.
        name: What the loader is called in errors; with a name it must not be empty.

    Raises:
        ValueError: In a pass, if there are no batches, or not as many as in the first pass.
    """

    def __init__(self, loader: Iterable[Any], transfer: Callable[[Any], Any], name: str = "") -> None:
        self._loader, self._transfer, self._name = loader, transfer, name
        self._all: list[Any] | None = None
        self._count: int | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        if self._all is not None:
            yield self._all
            return
        group: list[Any] = []
        count = held = 0
        for batch in self._loader:
            group.append(self._transfer(batch))
            count += 1
            held += _num_bytes(group[-1])
            if held > HELD_BYTES:
                yield group
                group, held = [], 0
        if len(group) == count > 0:
            self._all = group
        if self._count not in (None, count):
            raise ValueError(
                f"`{self._name}` gave {self._count} batches in the first pass and {count} in a later one. It must give "
                "them several times, as a DataLoader or a list does."
            )
        if self._name and count == 0:
            raise ValueError(f"`{self._name}` gave no batches.")
        self._count = count
        if group:
            yield group


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device: what has ``to``, also within mappings, tuples and lists."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _num_bytes(batch: Any) -> int:
    if hasattr(batch, "nbytes"):  # a tensor or an array
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(_num_bytes, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(_num_bytes, batch))
    if hasattr(batch, "to_dict"):  # a torch-geometric graph
        return _num_bytes(batch.to_dict())
    return _num_bytes(vars(batch)) if is_dataclass(batch) else 0
