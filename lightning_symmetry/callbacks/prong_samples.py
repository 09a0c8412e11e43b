"""Where PRONG takes its statistics from: batches of the training stream, and one pass of a copy of the module."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_symmetry.callbacks.evaluation import QuietTrainer, call_step, quiet_copy
from lightning_symmetry.callbacks.prong_estimator import on_cpu
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
    size = _size_of(batch)
    if size is None:
        return batch, count
    leaves = tree_leaves(batch)
    if size <= count or not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size for leaf in leaves):
        return batch, size
    return tree_map(lambda leaf: leaf[:count], batch), count


def on_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Bring a batch to the device as the training loop does, with the module's and the datamodule's transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def observe(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[tuple[Any, int]], transfer: bool = False
) -> dict[str, InputStatistics]:
    """Return the statistics of the inputs of whitened layers, from the training step of a copy of the module.

    The module itself, its batch-norm statistics, metrics and logs, and the random state stay as they are. The copy is
    in the modes of the module, and draws (for dropout, say) the same numbers in every run.

    Args:
        trainer: The trainer.
        module: The module, with whitened layers.
        batches: Batches and their indices.
        transfer: Whether they have yet to be brought to the device.
    """
    with _rehearsal(trainer, module, batches, transfer) as (clone, run):
        return collect_statistics(clone, run)


def outputs_of(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[tuple[Any, int]], transfer: bool = False
) -> dict[str, Tensor]:
    """Return the last output of each whitened layer, as :func:`observe` runs it."""
    outputs: dict[str, Tensor] = {}
    with _rehearsal(trainer, module, batches, transfer) as (clone, run):
        for name, layer in whitened_layers(clone).items():
            layer.register_forward_hook(lambda _, args, output, name=name: outputs.update({name: output.detach()}))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run()
    return outputs


@contextmanager
def _rehearsal(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[tuple[Any, int]], transfer: bool
) -> Iterator[tuple[pl.LightningModule, Callable[[], None]]]:
    """Give a copy of the module, and what runs its training step on the batches."""
    clone = quiet_copy(module)
    clone.trainer = QuietTrainer(trainer)

    def run() -> None:
        for batch, batch_idx in batches:
            batch = on_device(trainer, batch) if transfer else copy.deepcopy(batch)
            with trainer.precision_plugin.train_step_context():
                call_step(clone.training_step, batch, batch_idx, 0)

    with isolate_rng():
        torch.manual_seed(trainer.global_step * trainer.world_size + trainer.global_rank)
        yield clone, run


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
