"""From a torchvision data set of PIL images to one uint8 tensor, and the statistics of its pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_symmetry.data.progress import progress


def resize_to(image_size: int | None) -> Callable[[Any], Any] | None:
    """Return the usual resizing of a PIL image: the shorter side to `image_size`, then the central square.

    Args:
        image_size: Side of the square in pixels; None leaves images as they are.

    Returns:
        A callable on PIL images, or None.
    """
    from torchvision import transforms

    if image_size is None:
        return None
    return transforms.Compose([transforms.Resize(image_size), transforms.CenterCrop(image_size)])


def decode(dataset: Any, shape: tuple[int, int, int], resize: Callable[[Any], Any] | None) -> Tensor:
    """Decode all images of a data set into memory.

    Args:
        dataset: torchvision data set of PIL images without a transform.
        shape: Channels, height and width after resizing.
        resize: Applied to every PIL image.

    Returns:
        Images, uint8 of shape (N, C, H, W).
    """
    if resize is None and hasattr(dataset, "data"):
        # torchvision's MNIST holds (N, H, W) and its CIFAR (N, H, W, C), as bytes already.
        images = torch.as_tensor(dataset.data)
        return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    images = torch.empty((len(dataset), *shape), dtype=torch.uint8)
    indices = progress(range(len(dataset)), f"decoding {len(dataset)} images")
    for index, image in enumerate(pixel_batches(dataset, indices, resize)):
        images[index] = image[0]
    return images


def pixel_batches(dataset: Any, indices: Iterable[int], resize: Callable[[Any], Any] | None) -> Iterator[Tensor]:
    """Decode chosen images one by one.

    Args:
        dataset: torchvision data set of PIL images without a transform.
        indices: Which images.
        resize: Applied to every PIL image.

    Yields:
        Each image as a batch of one, uint8 of shape (1, C, H, W).
    """
    from torchvision.transforms.functional import pil_to_tensor

    for index in indices:
        image = dataset[index][0]
        yield pil_to_tensor(image if resize is None else resize(image)).unsqueeze(0)


def channel_statistics(batches: Iterable[Tensor]) -> tuple[list[float], list[float]]:
    """Compute mean and standard deviation of every channel's pixels, exactly, from their histograms.

    Args:
        batches: uint8 tensors of shape (N, C, H, W) that share C.

    Returns:
        Means and standard deviations on the scale [0, 1]. A constant channel gets the standard deviation 1,
        so that normalising it gives zeros.
    """
    counts: Tensor | int = 0
    for batch in batches:
        counts = counts + torch.stack([torch.bincount(c.flatten(), minlength=256) for c in batch.unbind(1)])
    weights = torch.as_tensor(counts).double()
    weights /= weights.sum(dim=1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = weights @ values
    std = (weights * (values - mean[:, None]) ** 2).sum(dim=1).sqrt()
    # Rounding leaves about 1e-17 for a constant channel, far below one grey level.
    std = torch.where(std < 1e-6, 1.0, std)
    return mean.tolist(), std.tolist()


def with_transform(dataset: Any, transform: Callable[[Any], Any]) -> Any:
    """Return a shallow copy of a torchvision data set that applies `transform` to its images.

    Args:
        dataset: torchvision data set of PIL images.
        transform: Applied to every PIL image.

    Returns:
        The copy; it shares the list of files or the tensor of images.
    """
    copied = copy.copy(dataset)
    copied.transform = transform
    return copied
