"""Division of text files for training, validation and testing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from lightning_symmetry.data.text_files import Span

SEARCH_BYTES = 2**16
"""How far after a cut an end of line is looked for."""


def divide(files: Sequence[Path], fractions: Mapping[str, float], seed: int) -> dict[str, list[Span]]:
    """Cut files, laid end to end, in contiguous parts that hold fractions of their bytes.

    The files come in an order drawn by `seed`. Each cut divides at most one of them and is moved on to the next end of
    line, or space where a line is very long, so that no part begins or ends within a word. The division depends on the
    arguments and the files' bytes only: no global random state is read or moved.

    Args:
        files: The files.
        fractions: Fraction of the bytes for each part but the first, "train", which gets what they leave.
        seed: Seed of the order.

    Returns:
        What each part consists of, by name; no two share a byte, and together they have all.
    """
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    files = [files[index] for index in order]
    starts = [0, *accumulate(path.stat().st_size for path in files)]
    shares = [1 - sum(fractions.values()), *fractions.values()]
    cuts = [_between_words(files, starts, round(share * starts[-1])) for share in list(accumulate(shares))[:-1]]
    bounds = [0, *cuts, starts[-1]]
    return {
        name: _spans_between(files, starts, lower, upper)
        for name, (lower, upper) in zip(["train", *fractions], pairwise(bounds), strict=True)
    }


def _between_words(files: Sequence[Path], starts: Sequence[int], position: int) -> int:
    """Return the first position from `position` on that no word or, if possible, line extends across."""
    index = bisect_right(starts, position) - 1
    if index == len(files) or position == starts[index]:
        return position
    with files[index].open("rb") as file:
        file.seek(position - starts[index] - 1)
        ahead = file.read(SEARCH_BYTES)
    return position + max(0, next((at for mark in (b"\n", b" ") if (at := ahead.find(mark)) >= 0), 0))


def _spans_between(files: Sequence[Path], starts: Sequence[int], lower: int, upper: int) -> list[Span]:
    """Return what lies between two positions."""
    spans = []
    for path, (start, stop) in zip(files, pairwise(starts), strict=True):
        first, last = max(start, lower), min(stop, upper)
        if first < last:
            spans.append(Span(path, first - start, last - start))
    return spans
