"""How a network is called on a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[nn.Module, Any], tuple[Tensor, Any]]


def supervised_step(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return output and target of an ``(input, target)`` batch.

    Raises:
        TypeError: If the batch is something else.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"Expected batches (input, target) but got {type(batch).__name__}; say with `step` how the network is "
            "called: step(net, batch) -> (output, target)."
        )
    return net(batch[0]), batch[1]


def graph_step(mask: str) -> Step:
    """Return a step for one transductive graph, whose nodes are selected by ``mask`` (e.g. ``"test_mask"``)."""

    def step(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return net(batch.x, batch.edge_index)[batch[mask]], batch.y[batch[mask]]

    return step


def cross_entropy_per_sample(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each sample."""
    return F.cross_entropy(output, target, reduction="none")
