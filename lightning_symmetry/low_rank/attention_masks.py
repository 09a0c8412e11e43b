"""Attention masks as ``nn.MultiheadAttention`` takes them, as one mask that is added to the scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that is added: minus infinity where a Boolean one is true, which is where not to look."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def extend(mask: Tensor | None, count: int) -> Tensor | None:
    """Let the mask see keys that were appended."""
    return mask if mask is None or not count else F.pad(mask, (0, count))


def merge(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """Return the sum of an attention mask and a key padding mask, to add to scores of shape ``(B, heads, L, S)``.

    Args:
        mask: Of shape ``(L, S)`` or ``(B heads, L, S)``, or None.
        padding: Of shape ``(B, S)``, or None.
        batch: B.
        heads: The number of heads.
    """
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (batch, heads))
    if padding is None:
        return mask
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding
