"""The number of samples of a training set, by which the divergence is divided."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)


def num_training_samples(trainer: pl.Trainer, batch: Any) -> int:
    """Return the number N of samples that training draws from, in all processes together.

    That is the length of the data set; with a ``SubsetRandomSampler`` the number of its indices; of graphs with a
    ``train_mask`` the number of its true entries. How many batches the trainer is limited to does not matter.

    Args:
        trainer: The trainer.
        batch: A training batch.

    Raises:
        MisconfigurationException: If it cannot be told: with an iterable data set, several loaders, another sampler,
            or several processes each of which has a loader of its own.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        raise _unknown(f"training has a {type(loader).__name__} in place of one DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise _unknown(f"the data set {type(loader.dataset).__name__} is iterable")
    if not hasattr(loader.dataset, "__len__"):
        raise _unknown(f"the data set {type(loader.dataset).__name__} has no length")
    if hasattr(batch, "train_mask"):
        return _masked(loader.dataset)
    if type(loader.batch_sampler) is not BatchSampler:
        raise _unknown(f"batches are drawn by {type(loader.batch_sampler or loader.dataset).__name__}")
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):  # Lightning's holds the loader's own sampler in place of the data set
        sampler = getattr(sampler.dataset, "_sampler", sampler)
    elif trainer.world_size > 1:
        raise _unknown("each process draws by itself, from the same samples or its own")
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler.indices)
    if type(sampler) in (RandomSampler, SequentialSampler) or isinstance(sampler, DistributedSampler):
        return len(loader.dataset)
    raise _unknown(f"samples are drawn by {type(sampler).__name__}")


def warn_of_several_targets(batch: Any, num_data: int) -> None:
    """Warn where a sample has several classes as targets, such as tokens or pixels, over which losses are means.

    Args:
        batch: A training batch ``(input, target)``; any other is left alone.
        num_data: The number of samples.
    """
    target = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    if not isinstance(target, Tensor) or target.ndim < 2 or target.is_floating_point():
        return
    if (each := target[0].numel()) > 1:
        rank_zero_warn(
            f"Each of the {num_data} training samples has {each} targets. If the loss is the mean over all of these, "
            f"as over tokens or pixels, give VariationalMixin num_data={num_data * each}; else num_data={num_data}."
        )


def batch_size(batch: Any) -> int:
    """Return the number of samples that a mean over a batch counts for; 1 if it cannot be told.

    Args:
        batch: The batch.
    """
    if hasattr(batch, "train_mask"):
        return int(batch.train_mask.sum())
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return 1


def _masked(dataset: Any) -> int:
    """Return the number of training nodes of all graphs of a data set; a transform of them may be random."""
    with torch.random.fork_rng():
        graphs = [dataset[index] for index in range(len(dataset))]
    if not all(hasattr(graph, "train_mask") for graph in graphs):
        raise _unknown("batches have a train_mask, but the data set's samples have none")
    return sum(int(graph.train_mask.sum()) for graph in graphs)


def _unknown(why: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"The ELBO needs the number of training samples, but {why}: give VariationalMixin's `num_data=`, the number in "
        "all processes together."
    )
