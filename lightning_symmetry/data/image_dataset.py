"""Images held in memory as bytes and turned into normalised floats by the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_symmetry.data.loaders import BatchedDataset


class TensorImages(BatchedDataset):
    r"""Byte images and labels in memory, normalised a batch at a time.

    A pixel value v of channel c becomes (v / max_value - mean[c]) / std[c] in float32: what torchvision's
    `ToTensor` and `Normalize` give, bit for bit, at `max_value=255`. One indexing operation fetches a batch,
    one call augments it.

    The data set collates by itself, so a loader needs the identity as its collate function:
    `DataLoader(images, batch_size=64, shuffle=True, collate_fn=keep_batch)`. It is an ordinary `DataLoader`:
    workers and samplers, also the distributed one that the Trainer injects, work as usual.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Callable[[Tensor], Tensor] | None = None,
        max_value: float = 255.0,
        flatten: bool = False,
    ) -> None:
        """Hold the tensors; nothing is copied.

        Args:
            images: uint8, shape (N, C, H, W).
            labels: int64, shape (N,).
            mean: Mean of each channel, on the scale where `max_value` is 1.
            std: Standard deviation of each channel, on the same scale.
            augment: Applied to every uint8 batch (N, C, H, W) before normalisation.
            max_value: Pixel value that stands for 1.
            flatten: Return images of shape (N, C·H·W).

        Raises:
            ValueError: If a tensor's dtype or shape is not as above, or a standard deviation is not positive.
        """
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"Expected argument `images` to be uint8 of shape (N, C, H, W), "
                f"but got {images.dtype} of shape {tuple(images.shape)}."
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"Expected argument `labels` to be int64 of shape ({len(images)},), "
                f"but got {labels.dtype} of shape {tuple(labels.shape)}."
            )
        channels = images.shape[1]
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise ValueError(
                f"Expected arguments `mean` and `std` to hold {channels} values, one a channel, "
                f"and `std` to be positive, but got {list(mean)} and {list(std)}."
            )
        self.images = images
        self.labels = labels
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
        self.augment = augment
        self.max_value = max_value
        self.flatten = flatten

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Fetch one image.

        Args:
            index: Position in the data set.

        Returns:
            The image, float32 of shape (C, H, W), and its label, int64 without dimensions.
        """
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Fetch a batch; data loaders call this by themselves.

        Args:
            indices: Positions in the data set.

        Returns:
            Images, float32 of shape (B, C, H, W), or (B, C·H·W) if flattened, and labels, int64 of shape
            (B,).
        """
        index = torch.as_tensor(indices)
        images = self.images[index]
        if self.augment is not None:
            images = self.augment(images)
        images = images.float().div_(self.max_value).sub_(self.mean).div_(self.std)
        return images.flatten(1) if self.flatten else images, self.labels[index]
