"""A network on the set of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.metanetwork import Layout, Metanetwork, perceptron
from lightning_symmetry.metanets.normalization import Normalization
from lightning_symmetry.metanets.scalar_sets import summed_units
from lightning_symmetry.metanets.stat_nn import sorted_rows


class WeightDeepSets(Metanetwork):
    r"""DeepSets: the weights of each tensor as a set, in no order.

    .. math:: f(w) = \rho\Bigl(\bigl[\tfrac{1}{|t|} \sum_{i \in t} \phi(w_i, e_t)\bigr]_{t}\Bigr), \qquad
              \phi(x, e) = \mathrm{ReLU}(\mathrm{LayerNorm}(x u + e))

    with one :math:`u \in \mathbb{R}^H` for all scalars, an embedding :math:`e_t` of the tensor, and a perceptron
    :math:`\rho` on the means of all tensors side by side: ``(B, P) -> (B, outputs)``. (Sums are the same up to the
    size of each tensor, which does not change.) It is invariant to every permutation within tensors, and so to the
    permutation symmetries of the network. Fixed entries are left out; the others are standardised by the statistics of
    their tensor. Sums are found from sorted weights (:func:`~lightning_symmetry.metanets.scalar_sets.summed_units`): no
    :math:`\phi` of single weights is computed or kept.

    With ``per_tensor=False`` all weights are one set with one embedding, and it has the paper's 8,897 parameters. By
    default it has 125,377 for networks of the paper's 29 tensors, as the readout takes 64 numbers of each: it is told
    where a weight stands as far as the symmetries of the network allow.

    Args:
        layout: What stands where in the flat vectors.
        hidden: H.
        readout: Widths of the hidden layers of the readout.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], by a sigmoid.
        per_tensor: Whether each tensor is a set of its own.

    Raises:
        ValueError: If a width or ``outputs`` is not positive.

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
    ) -> None:
        super().__init__(layout, outputs, bounded)
        if hidden < 1:
            raise ValueError(f"Expected `hidden` to be at least 1 but got {hidden}.")
        self.sizes = list(self.layout.free_counts.values()) if per_tensor else [len(self.free)]
        self.normalization = Normalization(self.layout.tensor_of[self.layout.free])
        self.scale = nn.Parameter(torch.empty(hidden).uniform_(-1, 1))
        self.embedding = nn.Parameter(torch.empty(len(self.sizes), hidden).uniform_(-1, 1))
        self.norm = nn.LayerNorm(hidden)
        self.readout = perceptron(hidden * len(self.sizes), readout, outputs or 1)

    def read(self, features: Tensor) -> Tensor:
        """Embed ``(B, Q)`` entries, average them by tensor and read the means out."""
        means = []
        for embedding, entries in zip(self.embedding, features.split(self.sizes, dim=1), strict=True):
            sums = summed_units(sorted_rows(entries), self.scale, embedding, self.norm)
            means.append(sums / entries.shape[1])
        return self.readout(torch.cat(means, dim=1))
