"""Statistics of batch normalisation at an interpolated network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormStatistics:
    """Running statistics of a network's batch normalisation, taken anew at several of its parameter settings.

    They are plain averages over the batches, with the batch statistics used inside the network as in training;
    all other layers (dropout) stay in evaluation mode.
    """

    def __init__(self, net: nn.Module) -> None:
        self.layers = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    @contextmanager
    def of_the_batch(self) -> Iterator[None]:
        """Normalise by the statistics of each batch; the running ones move."""
        try:
            for layer in self.layers:
                layer.training = True
            yield
        finally:
            for layer in self.layers:
                layer.training = False

    def update(self, state: list[Tensor] | None, batches: Iterable[Any], run: Callable[[Any], Any]) -> list[Tensor]:
        """Continue the averages in ``state`` (from nothing if None) over more batches and return them."""
        momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            if state is None:
                layer.reset_running_stats()
            layer.momentum = None  # a cumulative average
        if state is not None:
            self.load(state)
        try:
            with torch.no_grad(), self.of_the_batch():
                for batch in batches:
                    run(batch)
        finally:
            for layer, momentum in zip(self.layers, momenta, strict=True):
                layer.momentum = momentum
        return [buffer.clone() for layer in self.layers for buffer in layer.buffers(False)]

    def recompute(
        self,
        count: int,
        move_to: Callable[[int], Any],
        groups: Iterable[list[Any]],
        run: Callable[[Any], Any],
    ) -> list[list[Tensor]]:
        """Return the statistics at each of ``count`` settings, to which ``move_to`` sets the network."""
        states: list[Any] = [None] * count
        for batches in groups:
            for i in range(count):
                move_to(i)
                states[i] = self.update(states[i], batches, run)
        return states

    def load(self, state: list[Tensor]) -> None:
        """Put averages into the network."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers(False)]
        for buffer, value in zip(buffers, state, strict=True):
            buffer.copy_(value)
