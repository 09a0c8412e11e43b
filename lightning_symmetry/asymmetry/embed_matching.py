"""What both constructions of an embedding need: matchings of neurons, and a layer's constants as a dense matrix."""

from __future__ import annotations

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from lightning_symmetry.asymmetry.linear import AsymmetricLinear


def match(compatible: Tensor) -> Tensor:
    """Return a maximum matching of rows with columns: the column of each row, or -1 (Hopcroft and Karp, 1973)."""
    graph = csr_array(compatible.numpy().astype("int8"))
    return torch.from_numpy(maximum_bipartite_matching(graph, perm_type="column")).long()


def constants_of(layer: AsymmetricLinear) -> tuple[Tensor, Tensor]:
    """Return where a layer is fixed and its constants, zero where it is free, both of shape ``(rows, inputs)``."""
    fixed = layer.mask.logical_not().cpu()
    values = layer.canonical_weight().detach().to("cpu", torch.float64)
    return fixed, torch.where(fixed, values, 0.0)


def numbers(flags: Tensor) -> list[int]:
    """Return the positions of what is true."""
    return flags.nonzero().flatten().tolist()
