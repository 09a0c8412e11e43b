"""Augmentation of whole image batches, drawn anew for each image.

torchvision's random transforms draw once a call, so on a batch every image would share one offset and one
flip. These classes take a batch (N, C, H, W) of any dtype and draw N times from torch's global generator,
which is the one that `seed_everything` and a data loader's workers seed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_symmetry.data._checks import check_at_least


def _check_batch(images: Tensor) -> None:
    if images.ndim != 4:
        raise ValueError(f"Expected a batch of shape (N, C, H, W), but got shape {tuple(images.shape)}.")


def _check_window(images: Tensor, height: int, width: int) -> None:
    if height > images.shape[-2] or width > images.shape[-1]:
        raise ValueError(
            f"Expected images of at least {height} x {width} pixels, padding included, to crop them so, "
            f"but got {images.shape[-2]} x {images.shape[-1]}."
        )


class RandomCrop:
    """Cut a window out of each image at a place of its own.

    Each image is padded by `padding` zeros on every side, to (H + 2p, W + 2p), and cropped to (h, w) at its own
    offset (y, x), uniform on {0, …, H + 2p - h} x {0, …, W + 2p - w}. By default (h, w) = (H, W): images are
    shifted by up to `padding` pixels.
    """

    def __init__(self, padding: int = 4, size: int | None = None) -> None:
        """Set the padding and the window.

        Args:
            padding: Zeros added on every side, in pixels.
            size: Height and width of the window; None for those of the images.

        Raises:
            ValueError: If `padding` is negative or `size` not positive.
        """
        self.padding = check_at_least("padding", padding, 0)
        self.size = None if size is None else check_at_least("size", size, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Crop a batch.

        Args:
            images: Batch of shape (N, C, H, W), any dtype.

        Returns:
            A new batch of shape (N, C, h, w) and the same dtype.

        Raises:
            ValueError: If the batch does not have four dimensions, or the window is larger than the padded images.
        """
        _check_batch(images)
        padded = functional.pad(images, [self.padding] * 4)
        height, width = images.shape[-2:] if self.size is None else (self.size, self.size)
        _check_window(padded, height, width)
        # A view of all crops (N, C, places, places, h, w): indexing it copies the chosen windows only.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        y, x = (torch.randint(places, (len(images),)) for places in windows.shape[2:4])
        return windows[torch.arange(len(images)), :, y, x]

    def __repr__(self) -> str:
        size = "" if self.size is None else f", size={self.size}"
        return f"{type(self).__name__}(padding={self.padding}{size})"


def center_crop(images: Tensor, size: int) -> Tensor:
    """Cut the central square out of images; where the margins cannot be equal, as torchvision's `CenterCrop`.

    Args:
        images: Images of shape (..., H, W).
        size: Height and width h of the square.

    Returns:
        A view of shape (..., h, h).

    Raises:
        ValueError: If the square is larger than the images.
    """
    _check_window(images, size, size)
    y, x = (round((side - size) / 2) for side in images.shape[-2:])
    return images[..., y : y + size, x : x + size]


class RandomHorizontalFlip:
    """Mirror each image left to right with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        """Set the probability.

        Args:
            p: Probability of a flip.

        Raises:
            ValueError: If `p` is not a probability.
        """
        if not 0 <= p <= 1:
            raise ValueError(f"Expected argument `p` to be a probability in [0, 1], but got {p!r}.")
        self.p = p

    def __call__(self, images: Tensor) -> Tensor:
        """Flip a batch.

        Args:
            images: Batch of shape (N, C, H, W), any dtype.

        Returns:
            A new batch of the same shape and dtype.

        Raises:
            ValueError: If the batch does not have four dimensions.
        """
        _check_batch(images)
        flip = torch.rand(len(images)) < self.p
        return torch.where(flip.to(images.device)[:, None, None, None], images.flip(-1), images)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"
