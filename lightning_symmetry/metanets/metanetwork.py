"""What all metanetworks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.metanets.normalization import Normalization
from lightning_symmetry.metanets.weight_layout import WeightLayout

Layout = WeightLayout | Mapping[str, Sequence[int]]
"""What describes a flat vector of weights: names and shapes, in order."""


class Metanetwork(nn.Module, ABC):
    r"""A network that reads the weights of other networks.

    It maps :math:`w \in \mathbb{R}^{B \times P}` to ``read(normalization(features(w)))``, and through a sigmoid if
    ``bounded``. The output has shape ``(B, outputs)``; by default ``(B,)``, one number a network, as accuracies come.

    Args:
        layout: What stands where in the flat vectors; ``WeightLayout.of(network)`` also knows which entries are fixed.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], as accuracies do: the last layer then gives logits, of which the sigmoid
            is returned.
    """

    normalization: Normalization

    def __init__(self, layout: Layout, outputs: int | None = None, bounded: bool = False) -> None:
        super().__init__()
        if outputs is not None and outputs < 1:
            raise ValueError(f"Expected `outputs` to be at least 1 but got {outputs}.")
        self.layout = WeightLayout.make(layout)
        self.outputs, self.bounded = outputs, bounded
        self.register_buffer("free", self.layout.free, persistent=False)

    def features(self, weights: Tensor) -> Tensor:
        """Return what is standardised and read: by default the entries that are not fixed, ``(B, P) -> (B, Q)``."""
        self.layout.check(weights)
        return weights if len(self.free) == weights.shape[1] else weights[:, self.free]

    @abstractmethod
    def read(self, features: Tensor) -> Tensor:
        """Map standardised features ``(B, F)`` to ``(B, outputs)``; to ``(B, 1)`` where ``outputs`` is None."""

    def fit_normalization(self, weights: Tensor | Iterable[Tensor]) -> Self:
        """Take the means and standard deviations by which the input is standardised from the training networks.

        Args:
            weights: Their weights, shape ``(N, P)``; or batches of them, which are read once.

        Returns:
            The metanetwork itself, whose ``state_dict`` holds them.

        Raises:
            ValueError: If the weights have another layout, are not finite, or there are none.
        """
        self.normalization.fit(weights, self.features)
        return self

    def forward(self, weights: Tensor) -> Tensor:
        """Map rows of weights ``(B, P)`` to ``(B, outputs)``, or ``(B,)``.

        Raises:
            ValueError: If the weights have another layout.
        """
        output = self.read(self.normalization(self.features(weights)))
        output = output.squeeze(1) if self.outputs is None else output
        return output.sigmoid() if self.bounded else output


def perceptron(in_features: int, hidden: Sequence[int], outputs: int | None = None) -> nn.Sequential:
    """Return (linear, LayerNorm, ReLU) for each hidden width, and a linear layer if there are ``outputs``.

    Raises:
        ValueError: If a width is not positive.
    """
    if min([in_features, *hidden]) < 1:
        raise ValueError(f"Expected all widths to be at least 1 but got {[in_features, *hidden]}.")
    layers: list[nn.Module] = []
    for n, m in pairwise([in_features, *hidden]):
        layers += [nn.Linear(n, m), nn.LayerNorm(m), nn.ReLU()]
    if outputs is not None:
        layers.append(nn.Linear([in_features, *hidden][-1], outputs))
    return nn.Sequential(*layers)


def mean_by(values: Tensor, group_of: Tensor, counts: Tensor) -> Tensor:
    """Average ``(B, N, H)`` over the members of each group, ``(B, G, H)``.

    Args:
        values: What to average.
        group_of: Group of each of the N, int64.
        counts: Number of members of each of the G groups.
    """
    total = torch.zeros(len(values), len(counts), values.shape[-1], dtype=values.dtype, device=values.device)
    return total.index_add(1, group_of, values) / counts.to(values.dtype).unsqueeze(1)
