"""Augmentation of images for populations of networks, each with random numbers of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PopulationAugmentation:
    """Mirror each image, shift it and cut a square out of it.

    Draws and their use are apart, so that a population draws for each network from its own generator and changes the
    images of all networks at once. Called like any other augmentation, it does both for one network.

    Attributes:
        flip: Probability of mirroring left to right.
        padding: Greatest shift in pixels, up, down, left and right; the border is filled with zeros.
        cutout: Side of the square that is set to zero, wholly within the image; 0 for none.

    Raises:
        ValueError: If a value is out of its range, or (when called) the square is larger than the images.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.1: flips, translations (by 2 pixels in
    FFCV's script that it names) and Cutout (4 pixels there).
    """

    flip: float = 0.5
    padding: int = 2
    cutout: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"Expected `flip` to lie in [0, 1] but got {self.flip}.")
        if self.padding < 0 or self.cutout < 0:
            raise ValueError(
                f"Expected `padding` and `cutout` to be at least 0 but got {self.padding} and {self.cutout}."
            )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return the random numbers for some images.

        Args:
            count: Number of images.
            generator: What draws them.

        Returns:
            Uniform on [0, 1), shape ``(count, 5)``.
        """
        return torch.rand(count, 5, generator=generator)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return images changed as drawn.

        Args:
            images: Shape ``(N, C, H, W)``, any dtype.
            draws: Shape ``(N, 5)``: whether mirrored, the shift, and the corner of the square.

        Returns:
            New images, of the same shape and dtype.

        Raises:
            ValueError: If the square is larger than the images.
        """
        height, width = images.shape[-2:]
        if self.cutout > min(height, width):
            raise ValueError(f"Expected `cutout` to fit into {height} x {width} pixels but got {self.cutout}.")
        flip, *places = draws.to(images.device).unbind(1)
        shifts = 2 * self.padding + 1
        sides = (shifts, shifts, height - self.cutout + 1, width - self.cutout + 1)
        # A product of a number just below 1 may round up to the end.
        y, x, top, left = ((place * n).long().clamp_max(n - 1) for place, n in zip(places, sides, strict=True))
        images = torch.where((flip < self.flip)[:, None, None, None], images.flip(-1), images)
        if self.padding > 0:
            windows = F.pad(images, [self.padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
            images = windows[torch.arange(len(images), device=images.device), :, y, x]
        if self.cutout > 0:
            inside = [
                torch.arange(side, device=images.device) - start[:, None]
                for side, start in ((height, top), (width, left))
            ]
            rows, columns = ((place >= 0) & (place < self.cutout) for place in inside)
            images = images.masked_fill((rows[:, :, None] & columns[:, None, :]).unsqueeze(1), 0)
        return images

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images of one network, changed as the generator draws.

        Args:
            images: Shape ``(N, C, H, W)``.
            generator: That of the network.

        Returns:
            New images.
        """
        return self.apply(images, self.draw(len(images), generator))
