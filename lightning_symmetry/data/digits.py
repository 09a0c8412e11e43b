"""scikit-learn's handwritten digits: real images that need no download."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_symmetry.data._checks import check_fraction
from lightning_symmetry.data.image_dataset import TensorImages
from lightning_symmetry.data.image_module import ImageDataModule, ImageSplits
from lightning_symmetry.data.splits import stratified_split

MAX_VALUE = 16
"""Largest pixel value: each counts the set bits of a 4x4 block."""


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the 1,797 handwritten digits that scikit-learn carries.

    Returns:
        Images, uint8 of shape (1797, 1, 8, 8) with values 0 to 16, and labels, int64 of shape (1797,).
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(1)
    return images, torch.from_numpy(digits.target).to(torch.int64)


class DigitsData(ImageDataModule):
    """scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels in 10 classes.

    With the default arguments 1,437 images are for training and 360 for testing. The split is stratified and
    depends on `split_seed` only. Inputs are normalised by the mean and standard deviation of the training
    pixels.

    There is no validation split unless `val_fraction` is positive: without one, `val_dataloader` returns the
    **test** images, so do not choose a checkpoint or a setting by it and then report the test result.
    """

    def __init__(
        self,
        batch_size: int = 64,
        test_fraction: float = 0.2,
        val_fraction: float = 0.0,
        split_seed: int = 0,
        flatten: bool = False,
        num_workers: int = 0,
        eval_batch_size: int = 512,
        normalize: bool = True,
    ) -> None:
        """Set the split and the loaders' arguments.

        Args:
            batch_size: Images in a training batch of one process.
            test_fraction: Fraction of all images that is held out for testing.
            val_fraction: Fraction of all images that is held out for validation; 0 validates on the test
                images.
            split_seed: Seed of the split.
            flatten: Give inputs of shape (64,) rather than (1, 8, 8).
            num_workers: Worker processes of each loader; the data is small, so 0 is fastest.
            eval_batch_size: Images in a batch of the validation, test and evaluation loaders.
            normalize: Normalise inputs; otherwise they are intensities from 0 to 1, as autoencoders want them.

        Raises:
            ValueError: If an argument is out of range, or the fractions leave nothing for training.
        """
        super().__init__(batch_size, eval_batch_size, num_workers)
        self.test_fraction = check_fraction("test_fraction", test_fraction, zero=False)
        self.val_fraction = check_fraction("val_fraction", val_fraction, zero=True)
        if test_fraction + val_fraction >= 1:
            raise ValueError(
                "Expected arguments `test_fraction` and `val_fraction` to add up to less than 1, but got "
                f"{test_fraction} and {val_fraction}."
            )
        self.split_seed = split_seed
        self.flatten = flatten
        self.normalize = normalize
        self.save_hyperparameters(logger=False)

    @property
    def num_classes(self) -> int:
        """Ten."""
        return 10

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(1, 8, 8), or (64,) if flattened."""
        return (64,) if self.flatten else (1, 8, 8)

    @property
    def num_features(self) -> int:
        """Numbers in one input: 64."""
        return math.prod(self.input_shape)

    def _load(self) -> ImageSplits:
        images, labels = load_digits()
        parts = digits_splits(labels, self.test_fraction, self.val_fraction, self.split_seed)
        train_pixels = images[parts["train"]].double() / MAX_VALUE
        mean, std = [train_pixels.mean().item()], [train_pixels.std(correction=0).item()]
        if not self.normalize:
            mean, std = [0.0], [1.0]
        plain = {
            name: TensorImages(images[index], labels[index], mean, std, max_value=MAX_VALUE, flatten=self.flatten)
            for name, index in parts.items()
        }
        plain.setdefault("val", plain["test"])
        return ImageSplits(augmented=plain["train"], plain=plain)


def digits_splits(labels: Tensor, test_fraction: float, val_fraction: float, seed: int) -> dict[str, Tensor]:
    """Divide the digits for training, testing and, where asked for, validation.

    Args:
        labels: Class of each image, shape (N,).
        test_fraction: Fraction of N that is held out for testing.
        val_fraction: Fraction of N that is held out for validation; 0 for no such part.
        seed: Seed of the split.

    Returns:
        Indices in ascending order by the names "train", "test" and, if `val_fraction` is positive, "val".
    """
    train, test = stratified_split(labels, test_fraction, seed)
    if val_fraction == 0:
        return {"train": train, "test": test}
    # The test part must not depend on whether there is a validation part, so that one is taken from the rest.
    kept, val = stratified_split(labels[train], val_fraction / (1 - test_fraction), seed)
    return {"train": train[kept], "val": train[val], "test": test}
