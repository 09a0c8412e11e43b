"""Where PRONG takes its statistics from: batches of the training stream, and one pass of a copy of the module."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_symmetry.callbacks.batches import common_size, on_device
from lightning_symmetry.callbacks.prong_estimator import on_cpu
from lightning_symmetry.callbacks.rehearsal import rehearsal
from lightning_symmetry.whitening.collect import collect_statistics, whitened_layers
from lightning_symmetry.whitening.statistics import InputStatistics


class LastSamples:
    """The last batches of a stream, as few as hold a number of samples.

    A batch is copied, since a training step may change it in place. One that is made of tensors with a common first
    dimension alone is cut where it holds more samples than are needed; any other is kept whole.

    Args:
        num_samples: Number of samples to keep.

    Attributes:
        batches: Batches with their indices.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.batches: deque[tuple[Any, int]] = deque()
        self._sizes: deque[int] = deque()

    def __len__(self) -> int:
        return sum(self._sizes)

    def add(self, batch: Any, batch_idx: int) -> None:
        """Add a batch, and forget those before it that are not needed any more."""
        batch, size = _first(batch, self.num_samples)
        self.batches.append((copy.deepcopy(batch), batch_idx))
        self._sizes.append(size)
        while len(self) - self._sizes[0] >= self.num_samples:
            self._sizes.popleft()
            self.batches.popleft()

    def clear(self) -> None:
        """Forget all batches."""
        self.batches.clear()
        self._sizes.clear()

    def batches_needed(self, batch: Any) -> int:
        """Return how many batches of the size of this one hold enough samples."""
        return -(-self.num_samples // max(1, _size_of(batch) or self.num_samples))


def _size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch, where that can be seen."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes that differ: the first one counts
            return extract_batch_size(batch)
    except MisconfigurationException:
        return None


def _first(batch: Any, count: int) -> tuple[Any, int]:
    """Return the first samples of a batch where it can be cut, and their number."""
    size = common_size(batch)
    if size is not None and size > count:
        return tree_map(lambda leaf: leaf[:count], batch), count
    size = _size_of(batch)
    return batch, count if size is None else size


def observe(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[tuple[Any, int]], transfer: bool = False
) -> dict[str, InputStatistics]:
    """Return the statistics of the inputs of whitened layers, from the training step of a copy of the module.

    The module and the random state stay as they are: see :func:`~lightning_symmetry.callbacks.rehearsal.rehearsal`.

    Args:
        trainer: The trainer.
        module: The module, with whitened layers.
        batches: Batches and their indices.
        transfer: Whether they have yet to be brought to the device.
    """
    with rehearsal(trainer, module) as (clone, step):
        return collect_statistics(clone, lambda: _each(step, trainer, batches, transfer))


def outputs_of(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[tuple[Any, int]], transfer: bool = False
) -> dict[str, Tensor]:
    """Return the last output of each whitened layer, as :func:`observe` runs it."""
    outputs: dict[str, Tensor] = {}
    with rehearsal(trainer, module) as (clone, step):
        for name, layer in whitened_layers(clone).items():
            layer.register_forward_hook(lambda _, args, output, name=name: outputs.update({name: output.detach()}))
        _each(step, trainer, batches, transfer)
    return outputs


def _each(
    step: Callable[[Any, int], Any], trainer: pl.Trainer, batches: Iterable[tuple[Any, int]], transfer: bool
) -> None:
    """Run a step on batches, which it may change in place."""
    for batch, batch_idx in batches:
        step(on_device(trainer, batch) if transfer else copy.deepcopy(batch), batch_idx)


def gather_on_first(trainer: pl.Trainer, statistics: dict[str, InputStatistics]) -> dict[str, InputStatistics]:
    """Return the statistics of all ranks together, on the first rank; on others those of their own.

    Layers that the first rank has not called are left out.
    """
    if trainer.world_size == 1:
        return statistics
    states = {name: tree_map(on_cpu, one.state_dict()) for name, one in statistics.items()}
    gathered: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(states, gathered, dst=0)
    for rank in (gathered or [])[1:]:
        for name, state in rank.items():
            if name in statistics:
                other = copy.deepcopy(statistics[name])
                other.load_state_dict(state)
                statistics[name].merge(other)
    return statistics
