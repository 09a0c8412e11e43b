"""A multi-layer perceptron on flat weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_symmetry.metanets.metanetwork import Layout, Metanetwork, perceptron
from lightning_symmetry.metanets.normalization import Normalization


class FlatMLP(Metanetwork):
    """Multi-layer perceptron that takes the weights as one vector, knowing nothing of symmetries.

    (linear, LayerNorm, ReLU) for each hidden width, then linear, on the Q entries that are not fixed: ``(B, P) ->
    (B, outputs)``. With the paper's 78,042 weights and one hidden layer of 64 it has 4,994,945 parameters; with the
    60,634 that are not fixed in its W-asymmetric network 3,880,833, with the 60,874 in that of
    :func:`~lightning_symmetry.zoo_classifier`, which says why, 3,896,193. Standardised by the statistics of each entry.

    Args:
        layout: What stands where in the flat vectors.
        hidden: Widths of the hidden layers.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], by a sigmoid.

    Raises:
        ValueError: If a width or ``outputs`` is not positive.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), section 5.3, Table 9 (one hidden layer of 64 is
    what gives its count); there LayerNorm follows ReLU, and inputs are not standardised.
    """

    def __init__(
        self, layout: Layout, hidden: Sequence[int] = (64,), outputs: int | None = None, bounded: bool = False
    ) -> None:
        super().__init__(layout, outputs, bounded)
        self.normalization = Normalization(torch.arange(len(self.free)))
        self.net = perceptron(len(self.free), hidden, outputs or 1)

    def read(self, features: Tensor) -> Tensor:
        """Apply the perceptron to ``(B, Q)`` entries."""
        return self.net(features)
