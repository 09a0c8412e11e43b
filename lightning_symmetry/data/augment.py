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


class RandomCrop:
    """Shift each image by up to `padding` pixels and fill with zeros.

    Each image is padded by `padding` zeros on every side, to (H + 2p, W + 2p), and cropped to (H, W) at its
    own offset (y, x), uniform on {0, …, 2p}².
    """

    def __init__(self, padding: int = 4) -> None:
        """Set the padding.

        Args:
            padding: Zeros added on every side, in pixels.

        Raises:
            ValueError: If `padding` is negative.
        """
        self.padding = check_at_least("padding", padding, 0)

    def __call__(self, images: Tensor) -> Tensor:
        """Crop a batch.

        Args:
            images: Batch of shape (N, C, H, W), any dtype.

        Returns:
            A new batch of the same shape and dtype.

        Raises:
            ValueError: If the batch does not have four dimensions.
        """
        _check_batch(images)
        height, width = images.shape[-2:]
        padded = functional.pad(images, [self.padding] * 4)
        y, x = torch.randint(2 * self.padding + 1, (2, len(images)))
        # A view of all crops (N, C, 2p+1, 2p+1, H, W): indexing it copies the chosen windows only.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(len(images)), :, y, x]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(padding={self.padding})"


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
