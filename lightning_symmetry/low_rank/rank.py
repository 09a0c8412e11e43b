"""Ranks: as a number, a share of the full rank, a share of the energy or the stable rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_symmetry.low_rank.decomposition import Decomposition

Rank = int | float | str


def break_even(rows: int, columns: int) -> float:
    """Return the rank ``N M / (N + M)`` at which the factors have as many entries as the matrix."""
    return rows * columns / (rows + columns)


def saving(rank: int, rows: int, columns: int) -> float:
    """Return the share of parameters that factors of a rank save, ``1 - r (N + M) / (N M)``; negative if they cost."""
    return 1 - rank / break_even(rows, columns)


def is_worthwhile(rank: int, rows: int, columns: int, min_saving: float) -> bool:
    """Whether factors of a rank save a share of the parameters; at ``min_saving`` 0 any, below 0 they may cost."""
    share = saving(rank, rows, columns)
    return share >= min_saving and (share > 0 or min_saving < 0)


def check_rank(rank: Rank) -> None:
    """Check that a rank is a number, a share, ``"energy:0.9"`` or ``"stable"``.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(rank, str):
        if rank == "stable" or (rank.startswith("energy:") and 0 < _energy(rank) <= 1):
            return
    elif isinstance(rank, int) and not isinstance(rank, bool):
        if rank >= 1:
            return
    elif isinstance(rank, float) and 0 < rank <= 1:
        return
    raise ValueError(
        "Expected `rank` to be a number of at least 1, a share of the full rank in (0, 1], 'energy:' and a share in "
        f"(0, 1], or 'stable', but got {rank!r}."
    )


def choose_rank(rank: Rank, decomposition: Decomposition) -> int:
    r"""Return the rank for a matrix, the same for all groups.

    Args:
        rank: A number is taken as it is; a share f of the full rank is :math:`\max(1, [f \min(N, M)])`;
            ``"energy:e"`` is the smallest r with :math:`\sum_{i \le r} s_i^2 \ge e \sum_i s_i^2`, over all groups
            together; ``"stable"`` is :math:`\lceil \|W\|_F^2 / \|W\|_{op}^2 \rceil`, the largest over groups.
        decomposition: That of the matrix.

    Raises:
        ValueError: If the number is beyond the full rank, or ``rank`` is none of these.
    """
    check_rank(rank)
    full = decomposition.full_rank
    if isinstance(rank, int):
        if rank > full:
            shape = f"{decomposition.rows} x {decomposition.columns}"
            raise ValueError(f"rank {rank} is beyond the full rank {full} of a {shape} matrix")
        return rank
    if isinstance(rank, float):
        return max(1, round(rank * full))
    return _stable(decomposition.values) if rank == "stable" else _of_energy(decomposition.values, _energy(rank))


def _energy(rank: str) -> float:
    try:
        return float(rank.removeprefix("energy:"))
    except ValueError:
        return math.nan


def _of_energy(values: Tensor, share: float) -> int:
    kept = values.square().sum(0).cumsum(0)
    wanted = share * kept[-1] * (1 - 1e-12)  # all of it is all of it, whatever the order of summation
    return min(len(kept), int(torch.searchsorted(kept, wanted)) + 1)


def _stable(values: Tensor) -> int:
    squares = values.square()
    ranks = squares.sum(-1) / squares[:, 0]
    return max(1, math.ceil(float(ranks.nan_to_num(1).max()) - 1e-9))
