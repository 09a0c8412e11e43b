"""What the image data modules share: loading once, and loaders over three splits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_symmetry.data._checks import check_at_least, check_choice
from lightning_symmetry.data.image_dataset import TensorImages, keep_batch

Split = Literal["train", "val", "test"]
SPLITS = ("train", "val", "test")


class ImageSplits(NamedTuple):
    """The data sets of one data module."""

    augmented: Dataset
    """Training images with augmentation, where the data has any."""
    plain: dict[str, Dataset]
    """Training, validation and test images without augmentation."""


class ImageDataModule(LightningDataModule):
    """Base of the image data modules: a subclass says how to load, by `_load`.

    Data is loaded once, in `setup` or on the first call of a loader. Neither moves a global random state.
    """

    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int) -> None:
        """Set the loaders' arguments.

        Args:
            batch_size: Images in a training batch of one process.
            eval_batch_size: Images in a batch of every other loader.
            num_workers: Worker processes of each loader.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__()
        self.batch_size = check_at_least("batch_size", batch_size, 1)
        self.eval_batch_size = check_at_least("eval_batch_size", eval_batch_size, 1)
        self.num_workers = check_at_least("num_workers", num_workers, 0)
        self._splits: ImageSplits | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes; known before `setup`."""
        raise NotImplementedError

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch dimension; known before `setup`."""
        raise NotImplementedError

    def _load(self) -> ImageSplits:
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Load all splits, once.

        Args:
            stage: Ignored: every stage may evaluate any split.
        """
        self._loaded()

    def _loaded(self) -> ImageSplits:
        if self._splits is None:
            self._splits = self._load()
        return self._splits

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training images, augmented, in an order drawn anew every epoch."""
        return self._loader(self._loaded().augmented, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation images in fixed order; without a validation split, the test images."""
        return self.eval_dataloader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test images in fixed order."""
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
        return self._loader(self._loaded().plain[check_choice("split", split, SPLITS)], self.eval_batch_size)

    def _loader(self, dataset: Dataset, batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=keep_batch if isinstance(dataset, TensorImages) else None,
            pin_memory=torch.cuda.is_available(),
            # Collecting a dropped loader with idle workers can take 5 seconds: keep those of training only.
            persistent_workers=shuffle and self.num_workers > 0,
        )
