"""A convolutional network along flat weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.metanetwork import Layout, Metanetwork, perceptron
from lightning_symmetry.metanets.normalization import Normalization

KERNEL = 5


class DMC(Metanetwork):
    """Deep meta-classifier: a one-dimensional convolutional network along the flat vector of weights.

    For each entry of ``channels`` a convolution of kernel 5 without padding, ReLU, batch normalisation and, where
    ``pool`` says so, a maximum over 2; then (linear, LayerNorm, ReLU), the mean over places, and a perceptron:
    ``(B, P) -> (B, outputs)``. With the defaults it has the paper's 105,357 parameters, whatever P. Fixed entries are
    left out; the others are standardised by the statistics of the tensor in which they stand.

    Args:
        layout: What stands where in the flat vectors.
        channels: Channels after each convolution.
        pool: Whether to pool after each convolution; by default after the first six and then after every other.
        hidden: Width of the readout.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], by a sigmoid.

    Raises:
        ValueError: If ``channels`` and ``pool`` differ in length, or the vector is too short for so many layers.

    Source: Eilertsen et al., Classifying the Classifier (2020); The Empirical Impact of Neural Parameter Symmetries
    (2024), section 5.3 and Table 9, whose count these channels give (they are those of the authors' code).
    """

    def __init__(
        self,
        layout: Layout,
        channels: Sequence[int] = (2, 4, 8, 16, 32, 64, 64, 64, 64, 64),
        pool: Sequence[bool] | None = None,
        hidden: int = 64,
        outputs: int | None = None,
        bounded: bool = False,
    ) -> None:
        super().__init__(layout, outputs, bounded)
        if pool is None:
            pool = [place < 6 or place % 2 == 1 for place in range(len(channels))]
        if len(pool) != len(channels) or len(channels) < 1 or min(channels) < 1:
            raise ValueError(
                f"Expected `channels` and `pool` to be equally long, and channels to be at least 1, "
                f"but got {list(channels)} and {list(pool)}."
            )
        shortest = minimal_length(pool)
        if len(self.free) < shortest:
            raise ValueError(
                f"{len(channels)} convolutions with these pools need at least {shortest} weights, but the vectors have "
                f"{len(self.free)}: give fewer `channels`."
            )
        self.normalization = Normalization(self.layout.tensor_of[self.layout.free])
        layers: list[nn.Module] = []
        for (n, m), pooled in zip(pairwise([1, *channels]), pool, strict=True):
            layers += [nn.Conv2d(n, m, (1, KERNEL)), nn.ReLU(), nn.BatchNorm2d(m)]
            layers += [nn.MaxPool2d((1, 2))] if pooled else []
        # On images of one row, channels last: on the CPU much faster than one-dimensional convolutions.
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.places = perceptron(channels[-1], [hidden])
        self.head = perceptron(hidden, [hidden], outputs or 1)

    def read(self, features: Tensor) -> Tensor:
        """Convolve ``(B, Q)`` entries and read the means out."""
        found = self.convolutions(features[:, None, None, :]).squeeze(2).transpose(1, 2)
        return self.head(self.places(found).mean(1))


def minimal_length(pool: Sequence[bool]) -> int:
    """Return the length of the shortest vector of which such convolutions leave one place."""
    length = 1
    for pooled in reversed(pool):
        length = length * (2 if pooled else 1) + KERNEL - 1
    return length
