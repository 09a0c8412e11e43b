"""A progress bar on the first process only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from lightning.pytorch.utilities import rank_zero_only
from tqdm.auto import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Iterate with a progress bar that vanishes at the end.

    Args:
        items: What to iterate over.
        label: Text before the bar.

    Returns:
        An iterator over the same items.
    """
    return iter(tqdm(items, desc=label, leave=False, disable=getattr(rank_zero_only, "rank", 0) != 0))
