"""Windows over a long sequence of tokens, fetched by the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_symmetry.data.loaders import BatchedDataset


class TokenWindows(BatchedDataset):
    r"""Windows of C + 1 tokens, as C inputs and the C tokens that follow each of them.

    Window i of tokens :math:`t_0, t_1, ...` has the inputs :math:`t_{iC}, ..., t_{iC+C-1}` and the targets
    :math:`t_{iC+1}, ..., t_{iC+C}`: every token but the first is the target of one window, up to those, fewer than C,
    at the end that fill no window.

    The data set collates by itself, so a loader needs the identity as its collate function:
    `DataLoader(windows, batch_size=64, collate_fn=keep_batch)`.
    """

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        """Hold the tokens; nothing is copied.

        Args:
            tokens: Integers of shape (N,), in memory or mapped to it.
            context: C.
        """
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Fetch one window.

        Args:
            index: Position in the data set.

        Returns:
            Inputs and targets, int64 of shape (C,).

        Raises:
            IndexError: If there is no such window.
        """
        inputs, targets = self.__getitems__([range(len(self))[index]])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Fetch a batch; data loaders call this by themselves.

        Args:
            indices: Positions in the data set, from 0.

        Returns:
            Inputs and targets, int64 of shape (B, C).
        """
        starts = np.asarray(indices, dtype=np.int64) * self.context
        windows = torch.from_numpy(self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array pickles as a copy of what it holds; a worker process is to map the file itself.
        if not isinstance(self.tokens, np.memmap):
            return self.__dict__
        tokens = self.tokens
        return {**self.__dict__, "tokens": (tokens.filename, tokens.dtype, "r", tokens.offset, tokens.shape)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, tuple):
            self.tokens = np.memmap(*self.tokens)
