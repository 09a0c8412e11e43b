"""Carry an optimizer's momentum through a change of coordinates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

LINEAR_STATE = ("momentum_buffer", "exp_avg")
"""Names of optimizer states that are sums of gradients, and steps of the parameter up to a factor."""


class LinearCoordinates(Protocol):
    """A layer whose parameters are a linear function of a canonical weight and bias."""

    weight: Tensor
    bias: Tensor | None

    def to_canonical(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map a direction in the layer's parameters to one in the canonical parameters."""

    def to_whitened(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map it back."""


class MomentumTransport:
    r"""Keep the canonical direction of an optimizer's momentum while layers change their coordinates.

    A step along the momentum m of parameters :math:`\Omega = J^{-1} \theta` moves the canonical parameters along
    :math:`J m`. With new coordinates J' the momentum becomes

    .. math:: m' = J'^{-1} J m,

    which goes on in the same direction: exact for the momentum of SGD, whose iterates are those of coordinates that
    never changed but for the metric. It is applied to ``momentum_buffer`` (SGD, RMSprop) and ``exp_avg`` (Adam and its
    kin). Second moments have no exact transform, since they are kept entry by entry: they stay as they are, as do
    numbers of steps. In whitened coordinates entries of the gradient keep their scale from one change to the next.

    Build it before the coordinates change and call :meth:`finish` afterwards.

    Args:
        optimizers: The optimizers.
        layers: The layers that will change.
    """

    def __init__(self, optimizers: Iterable[Optimizer], layers: Iterable[LinearCoordinates]) -> None:
        self._moves: list[tuple[LinearCoordinates, list[Tensor | None], tuple[Tensor, Tensor | None]]] = []
        optimizers = list(optimizers)
        for layer in layers:
            for optimizer in optimizers:
                for name in LINEAR_STATE:
                    states = [_state(optimizer, parameter, name) for parameter in (layer.weight, layer.bias)]
                    if any(state is not None for state in states):
                        self._moves.append((layer, states, layer.to_canonical(*_filled(layer, states))))

    @torch.no_grad()
    def finish(self) -> None:
        """Write the momentum in the present coordinates."""
        for layer, states, canonical in self._moves:
            for state, value in zip(states, layer.to_whitened(*canonical), strict=True):
                if state is not None:
                    state.copy_(value)


def _state(optimizer: Optimizer, parameter: Tensor | None, name: str) -> Tensor | None:
    """Return a state of a parameter; looked up without adding an empty one."""
    return None if parameter is None or parameter not in optimizer.state else optimizer.state[parameter].get(name)


def _filled(layer: LinearCoordinates, states: list[Tensor | None]) -> list[Tensor | None]:
    """Return the states, zeros where a parameter has none."""
    parameters = (layer.weight, layer.bias)
    return [
        p if p is None else torch.zeros_like(p) if s is None else s for p, s in zip(parameters, states, strict=True)
    ]
