"""Deterministic division of a labelled data set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Divide indices in two parts that hold every class in the same proportion, up to rounding.

    The second part holds ceil(`fraction` · N) indices. The division depends on the arguments only: no global
    random state is read or moved.

    Args:
        labels: Class of each item, shape (N,).
        fraction: Size of the second part, in (0, 1).
        seed: Seed of the division.

    Returns:
        The indices of the two parts, int64, each in ascending order.

    Raises:
        ValueError: If a class is too small, or the parts too few, for each class to be in both.
    """
    from sklearn.model_selection import train_test_split

    indices = np.arange(len(labels))
    try:
        kept, held_out = train_test_split(indices, test_size=fraction, random_state=seed, stratify=labels.numpy())
    except ValueError as error:
        raise ValueError(f"Cannot hold out a stratified {fraction:.3g} of {len(labels)} items: {error}") from error
    return torch.from_numpy(np.sort(kept)), torch.from_numpy(np.sort(held_out))
