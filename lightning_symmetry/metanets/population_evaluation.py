"""Loss and accuracy of many networks of one architecture at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from lightning_symmetry.metanets.population_layers import StackedLayers
from lightning_symmetry.metanets.population_stack import PopulationStack


def stacked_layers(device: torch.device) -> AbstractContextManager:
    """Return the context in which a population runs: on the CPU, with layers of its own.

    Args:
        device: Device of the population.

    Returns:
        The context.
    """
    return StackedLayers() if device.type == "cpu" else nullcontext()


def smoothed_cross_entropy(logits: Tensor, target: Tensor, smoothing: Tensor) -> Tensor:
    r"""Return :math:`-(1 - s) \log p_y - \frac{s}{C} \sum_c \log p_c` for each sample, as ``F.cross_entropy`` does.

    Args:
        logits: Shape ``(..., B, C)``.
        target: Classes, shape ``(..., B)``.
        smoothing: The label smoothing s, shape ``(...)``.

    Returns:
        Losses, shape ``(..., B)``.
    """
    logp = logits.log_softmax(-1)
    right = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    smoothing = smoothing.unsqueeze(-1)
    return -((1 - smoothing) * right + smoothing * logp.mean(-1))


@torch.no_grad()
def evaluate_population(
    network: nn.Module,
    states: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    label_smoothing: Any = 0.0,
    batch_size: int = 512,
    networks_at_once: int = 16,
) -> tuple[Tensor, Tensor]:
    """Return mean loss and accuracy of many networks, in evaluation mode.

    Args:
        network: A network of their architecture and with their constants; it is left as it is.
        states: Their states, each tensor stacked ``(K, *shape)``; what is missing is taken from the network.
        inputs: Inputs, shape ``(N, *sample)``.
        targets: Classes, shape ``(N,)``.
        label_smoothing: Of the loss; a number, or one for each network.
        batch_size: Samples at a time.
        networks_at_once: Networks at a time.

    Returns:
        Losses and accuracies, each float64 of shape ``(K,)``. Losses are summed in float64 from the network's logits.

    Raises:
        ValueError: If names or shapes of the states are not the network's, or their constants differ from its.
    """
    stack = PopulationStack([network], states)
    stack.network.eval()
    count = len(stack)
    smoothing = np.broadcast_to(np.asarray(label_smoothing, np.float64), (count,))
    smoothing = torch.as_tensor(smoothing.copy(), device=inputs.device)
    losses, right = torch.zeros(2, count, dtype=torch.float64, device=inputs.device)
    for rows in torch.arange(count).split(networks_at_once):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        parameters = {name: value[part] for name, value in stack.parameters.items()}
        buffers = {name: value[part] for name, value in stack.buffers.items()}
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            with stacked_layers(inputs.device):
                logits = vmap(stack.call, (0, 0, None))(parameters, buffers, x).double()
            losses[part] += smoothed_cross_entropy(logits, y.expand(len(rows), -1), smoothing[part]).sum(1)
            right[part] += (logits.argmax(-1) == y).sum(1)
    return losses / len(inputs), right / len(inputs)
