"""A network on statistics of weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_symmetry.metanets.metanetwork import Layout, Metanetwork, perceptron
from lightning_symmetry.metanets.normalization import Normalization
from lightning_symmetry.metanets.weight_layout import WeightLayout

STATISTICS = ("mean", "variance", "minimum", "lower quartile", "median", "upper quartile", "maximum")
_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
_CHUNK = 2**22  # entries that are sorted at a time


def weight_statistics(weights: Tensor, layout: Layout) -> Tensor:
    r"""Return statistics of each tensor of flat weights.

    For each tensor, weights and biases apart, the mean, the variance :math:`\frac{1}{n} \sum_i (w_i - \bar w)^2` and
    the quantiles at 0, 25, 50, 75 and 100 %, linear between order statistics as in numpy. They do not depend on the
    order of entries within a tensor. Differentiable.

    Args:
        weights: Rows of weights, shape ``(B, P)``.
        layout: What stands where. Fixed entries are left out, and tensors of nothing else.

    Returns:
        The statistics, shape ``(B, 7 T)`` for T tensors: those of the first tensor in the order of
        :data:`STATISTICS`, then those of the next.

    Raises:
        ValueError: If the weights have another layout.

    Source: Unterthiner et al., Predicting Neural Network Accuracy from Weights (2020).
    """
    layout = WeightLayout.make(layout)
    layout.check(weights)
    if len(weights) == 0:
        return weights.new_zeros(0, len(STATISTICS) * len(layout.free_counts))
    free = layout.free.to(weights.device)
    found = []
    for rows in weights.split(max(1, _CHUNK // layout.num_features)):
        rows = rows if len(free) == rows.shape[1] else rows[:, free]
        parts = rows.split(list(layout.free_counts.values()), dim=1)
        found.append(torch.cat([_statistics(part) for part in parts], dim=1))
    return torch.cat(found)


def _statistics(entries: Tensor) -> Tensor:
    """Return the statistics of ``(B, n)`` entries of one tensor, ``(B, 7)``."""
    ordered = sorted_rows(entries)
    last = entries.shape[1] - 1
    places = [level * last for level in _LEVELS]
    below = [int(place) for place in places]
    above = [min(place + 1, last) for place in below]
    share = entries.new_tensor([place - floor for place, floor in zip(places, below, strict=True)])
    quantiles = torch.lerp(ordered[:, below], ordered[:, above], share)
    variance, mean = torch.var_mean(ordered, dim=1, correction=0)  # rounded alike in any order
    return torch.cat([mean.unsqueeze(1), variance.unsqueeze(1), quantiles], dim=1)


def sorted_rows(entries: Tensor) -> Tensor:
    """Sort each row; numpy does so several times faster on the CPU."""
    in_numpy = entries.device.type == "cpu" and entries.dtype in (torch.float32, torch.float64)
    if not in_numpy or (entries.requires_grad and torch.is_grad_enabled()):
        return entries.sort(dim=1).values
    return torch.from_numpy(np.sort(entries.detach().numpy(), axis=1))


class StatNN(Metanetwork):
    """Perceptron on statistics of each tensor, which are invariant to the permutation symmetries of the network.

    (linear, LayerNorm, ReLU) for each hidden width, then linear, on :func:`weight_statistics`, each standardised by
    itself: ``(B, P) -> (B, outputs)``. For the paper's networks of 29 tensors, asymmetric or not, and two hidden layers
    of 256 it has 119,297 parameters.

    Args:
        layout: What stands where in the flat vectors.
        hidden: Widths of the hidden layers.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], by a sigmoid.
        precomputed: Whether the input is not weights but their statistics, ``(B, 7 T)``, which are computed once.

    Raises:
        ValueError: If a width or ``outputs`` is not positive.

    Source: Unterthiner et al., Predicting Neural Network Accuracy from Weights (2020); The Empirical Impact of Neural
    Parameter Symmetries (2024), section 5.3 and Table 9; there LayerNorm follows ReLU, inputs are not standardised, and
    the variance is divided by n - 1.
    """

    def __init__(
        self,
        layout: Layout,
        hidden: Sequence[int] = (256, 256),
        outputs: int | None = None,
        bounded: bool = False,
        precomputed: bool = False,
    ) -> None:
        super().__init__(layout, outputs, bounded)
        self.precomputed = precomputed
        self.num_statistics = len(STATISTICS) * len(self.layout.free_counts)
        self.normalization = Normalization(torch.arange(self.num_statistics))
        self.net = perceptron(self.num_statistics, hidden, outputs or 1)

    def features(self, weights: Tensor) -> Tensor:
        """Return the statistics of ``(B, P)`` weights, or the input itself if they are precomputed."""
        if not self.precomputed:
            return weight_statistics(weights, self.layout)
        if weights.ndim != 2 or weights.shape[1] != self.num_statistics:
            raise ValueError(
                f"Expected precomputed statistics of shape (B, {self.num_statistics}) but got {tuple(weights.shape)}."
            )
        return weights

    def read(self, features: Tensor) -> Tensor:
        """Apply the perceptron to ``(B, 7 T)`` statistics."""
        return self.net(features)
