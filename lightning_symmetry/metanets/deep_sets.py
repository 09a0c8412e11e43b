"""A network on the set of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_symmetry.metanets.metanetwork import Layout, Metanetwork, perceptron
from lightning_symmetry.metanets.normalization import Normalization


class WeightDeepSets(Metanetwork):
    r"""DeepSets: the weights of each tensor as a set, in no order.

    .. math:: f(w) = \rho\Bigl(\bigl[\tfrac{1}{|t|} \sum_{i \in t} \phi(w_i, e_t)\bigr]_{t}\Bigr), \qquad
              \phi(x, e) = \mathrm{ReLU}(\mathrm{LayerNorm}(x u + e))

    with one :math:`u \in \mathbb{R}^H` for all scalars, an embedding :math:`e_t` of the tensor, and a perceptron
    :math:`\rho` on the means of all tensors side by side: ``(B, P) -> (B, outputs)``. (Sums are the same up to the
    size of each tensor, which does not change.) It is invariant to every permutation within tensors, and so to the
    permutation symmetries of the network. Fixed entries are left out; the others are standardised by the statistics of
    their tensor.

    With ``per_tensor=False`` all weights are one set with one embedding, and it has the paper's 8,897 parameters.

    Args:
        layout: What stands where in the flat vectors.
        hidden: H.
        readout: Widths of the hidden layers of the readout.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], by a sigmoid.
        per_tensor: Whether each tensor is a set of its own.
        chunk: Weights of a tensor that are embedded at a time. What is embedded, H numbers a weight, is not kept for
            the backward pass but computed again, so that memory grows with the chunk and not with P.

    Raises:
        ValueError: If a width, ``outputs`` or ``chunk`` is not positive.

    Source: Zaheer et al., Deep Sets (2017), Theorem 2; The Empirical Impact of Neural Parameter Symmetries (2024),
    section 5.3 and Table 9, where all weights are one set.
    """

    def __init__(
        self,
        layout: Layout,
        hidden: int = 64,
        readout: Sequence[int] = (64, 64),
        outputs: int | None = None,
        bounded: bool = False,
        per_tensor: bool = True,
        chunk: int = 4096,
    ) -> None:
        super().__init__(layout, outputs, bounded)
        if hidden < 1 or chunk < 1:
            raise ValueError(f"Expected `hidden` and `chunk` to be at least 1 but got {hidden} and {chunk}.")
        self.chunk = chunk
        self.sizes = list(self.layout.free_counts.values()) if per_tensor else [len(self.free)]
        self.normalization = Normalization(self.layout.tensor_of[self.layout.free])
        self.scale = nn.Parameter(torch.empty(hidden).uniform_(-1, 1))
        self.embedding = nn.Parameter(torch.empty(len(self.sizes), hidden).uniform_(-1, 1))
        self.norm = nn.LayerNorm(hidden)
        self.readout = perceptron(hidden * len(self.sizes), readout, outputs or 1)

    def read(self, features: Tensor) -> Tensor:
        """Embed ``(B, Q)`` entries, average them by tensor and read the means out."""
        means = []
        for number, entries in enumerate(features.split(self.sizes, dim=1)):
            parts = entries.split(self.chunk, dim=1)
            sums = [self._sum(part, self.embedding[number], len(parts) > 1) for part in parts]
            means.append(torch.stack(sums).sum(0) / entries.shape[1])
        return self.readout(torch.cat(means, dim=1))

    def _sum(self, entries: Tensor, embedding: Tensor, large: bool) -> Tensor:
        if large and torch.is_grad_enabled():
            return checkpoint(self._embed, entries, embedding, use_reentrant=False)
        return self._embed(entries, embedding)

    def _embed(self, entries: Tensor, embedding: Tensor) -> Tensor:
        return self.norm(entries.unsqueeze(-1) * self.scale + embedding).relu().sum(1)
