"""What the image data modules share: how they are loaded, and what they say of themselves."""

from __future__ import annotations

from typing import NamedTuple

from torch.utils.data import Dataset

from lightning_symmetry.data.loaders import Split, SplitDataModule


class ImageSplits(NamedTuple):
    """The data sets of one data module."""

    augmented: Dataset
    """Training images with augmentation, where the data has any."""
    plain: dict[str, Dataset]
    """Training, validation and test images without augmentation."""


class ImageDataModule(SplitDataModule):
    """Base of the image data modules: a subclass says how to load, by `_load`."""

    _splits: ImageSplits | None = None

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

    def _dataset(self, split: Split, training: bool = False) -> Dataset:
        if self._splits is None:
            self._splits = self._load()
        return self._splits.augmented if training else self._splits.plain[split]
