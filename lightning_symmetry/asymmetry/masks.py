"""Random subsets of fixed entries: one subset a row, pairwise distinct, uniformly distributed."""

from __future__ import annotations

import hashlib
import math
from itertools import combinations

import torch
from torch import Tensor

_ENUMERATE_BELOW = 8  # list all subsets when there are at most this many times as many as rows


def layer_generator(seed: int, name: str = "") -> torch.Generator:
    """Return a CPU generator that depends only on the seed and the layer's name.

    A layer's constants then stay the same when other layers are skipped or overridden, in every process and
    on every machine.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_constants(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw standard normal constants, in float32 on the CPU whatever the default type and device are."""
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")


def check_counts(rows: int, units: int, n_fix: int, layer: str, way_out: str) -> None:
    """Refuse a number of fixed entries that cannot break the symmetry of ``rows`` rows.

    Raises:
        ValueError: If a row would have no trainable or no fixed entry, or if there are fewer distinct subsets
            than rows.
    """
    if n_fix < 1:
        raise ValueError(f"{layer}: n_fix must be at least 1, but got {n_fix}. {way_out}")
    if n_fix >= units:
        raise ValueError(
            f"{layer}: n_fix={n_fix} of {units} inputs leaves no trainable entry in a row; "
            f"at most {units - 1} can be fixed. {way_out}"
        )
    if math.comb(units, n_fix) < rows:
        raise ValueError(
            f"{layer}: {rows} rows need pairwise distinct masks, but only {math.comb(units, n_fix)} subsets of "
            f"{n_fix} out of {units} inputs exist. {way_out}"
        )


def distinct_subsets(rows: int, units: int, n_fix: int, generator: torch.Generator) -> Tensor:
    """Draw ``rows`` pairwise distinct subsets of ``n_fix`` out of ``units`` columns, uniformly.

    Subsets are drawn independently for all rows at once and drawn again while they repeat an earlier row,
    which is drawing without replacement from all subsets.

    Args:
        rows: Number of subsets.
        units: Number of columns to choose from.
        n_fix: Size of a subset.
        generator: Generator of the draw.

    Returns:
        Column numbers of shape ``(rows, n_fix)``, ascending in each row.
    """
    total = math.comb(units, n_fix)
    if total <= _ENUMERATE_BELOW * rows:
        subsets = torch.tensor(list(combinations(range(units), n_fix)), device="cpu")
        return subsets[torch.randperm(total, generator=generator, device="cpu")[:rows]]
    subsets = _subsets(rows, units, n_fix, generator)
    while len(repeated := _repeated_rows(subsets)):
        subsets[repeated] = _subsets(len(repeated), units, n_fix, generator)
    return subsets


def _subsets(rows: int, units: int, n_fix: int, generator: torch.Generator) -> Tensor:
    """Draw uniform subsets by Floyd's algorithm, one step for all rows at a time."""
    size = min(n_fix, units - n_fix)  # the complement is as random and cheaper
    chosen = torch.zeros(rows, units, dtype=torch.bool, device="cpu")
    steps = torch.arange(units - size, units, device="cpu")
    draws = torch.rand(size, rows, generator=generator, dtype=torch.float64, device="cpu")
    columns = (draws * (steps + 1).unsqueeze(1)).long()
    for column, step in zip(columns, steps, strict=True):
        taken = chosen.gather(1, column.unsqueeze(1)).squeeze(1)
        column.copy_(torch.where(taken, step, column))
        chosen.scatter_(1, column.unsqueeze(1), True)
    if size == n_fix:
        return columns.t().contiguous().sort(dim=1).values
    return chosen.logical_not_().nonzero()[:, 1].view(rows, n_fix)


def _repeated_rows(subsets: Tensor) -> Tensor:
    """Return the rows that equal an earlier one."""
    _, group = torch.unique(subsets, dim=0, return_inverse=True)
    order = torch.argsort(group, stable=True)
    again = group[order][1:] == group[order][:-1]
    return order[1:][again]
