"""What the data modules share: data that is read once, and loaders over three splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_symmetry.data._checks import check_at_least, check_choice

Split = Literal["train", "val", "test"]
SPLITS = ("train", "val", "test")
T = TypeVar("T")


def keep_batch(batch: T) -> T:
    """Return the batch unchanged: the collate function for data sets that fetch whole batches.

    Args:
        batch: What the data set returned.

    Returns:
        The same object.
    """
    return batch


class BatchedDataset(Dataset[Any]):
    """A data set that fetches a whole batch at once, by `__getitems__`, and collates it by itself."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Fetch a batch.

        Args:
            indices: Positions in the data set.

        Returns:
            Inputs and targets.
        """
        raise NotImplementedError


class SplitDataModule(LightningDataModule):
    """Base of the data modules: a subclass says how to read its data, and what each split is.

    Data is read once, in `setup` or on the first call of a loader. Neither moves a global random state, nor does
    iterating an evaluation loader.
    """

    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int) -> None:
        """Set the loaders' arguments.

        Args:
            batch_size: Samples in a training batch of one process.
            eval_batch_size: Samples in a batch of every other loader.
            num_workers: Worker processes of each loader.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__()
        self.batch_size = check_at_least("batch_size", batch_size, 1)
        self.eval_batch_size = check_at_least("eval_batch_size", eval_batch_size, 1)
        self.num_workers = check_at_least("num_workers", num_workers, 0)

    def _dataset(self, split: Split, training: bool = False) -> Dataset[Any]:
        """Return a split, read if it was not yet; for training with augmentation, where the data has any."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Read all splits, once.

        Args:
            stage: Ignored: every stage may evaluate any split.
        """
        self._dataset("train")

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training samples, augmented, in an order drawn anew every epoch."""
        return self._loader(self._dataset("train", training=True), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation samples in fixed order; without a validation split, the test samples."""
        return self.eval_dataloader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test samples in fixed order."""
        return self.eval_dataloader("test")

    def eval_dataloader(self, split: Split) -> DataLoader[Any]:
        """Return one split without augmentation, in fixed order, with nothing dropped.

        Args:
            split: "train", "val" or "test".

        Returns:
            A loader with batches of `eval_batch_size`.

        Raises:
            ValueError: If there is no such split.
        """
        return self._loader(self._dataset(check_choice("split", split, SPLITS)), self.eval_batch_size)

    def _loader(self, dataset: Dataset[Any], batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=keep_batch if isinstance(dataset, BatchedDataset) else default_collate,
            pin_memory=torch.cuda.is_available(),
            # A loader draws a seed for its workers, from the global state unless it has one of its own.
            generator=None if shuffle else torch.Generator(),
            # Collecting a dropped loader with idle workers can take 5 seconds: keep those of training only.
            persistent_workers=shuffle and self.num_workers > 0,
        )
