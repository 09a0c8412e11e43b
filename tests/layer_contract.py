"""What tests of layers in other coordinates check: copies, gradients, and a network with a shared module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "moved": lambda net: copy.deepcopy(net).to("cpu", memory_format=torch.channels_last),
    "double and back": lambda net: copy.deepcopy(net).double().float(),
}

Gradients = tuple[Tensor, dict[str, Tensor]]


def gradients(net: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Gradients:
    """Return the output, and the gradient of its squared norm in each parameter."""
    net.zero_grad()
    output = (net if call is None else call)(x)
    output.square().sum().backward()
    return output.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


def assert_same(a: Gradients, b: Gradients, **tolerances: Any) -> None:
    torch.testing.assert_close(a[0], b[0], **tolerances)
    assert a[1].keys() == b[1].keys()
    for name, value in a[1].items():
        torch.testing.assert_close(value, b[1][name], **tolerances)


class Special(nn.Linear):
    """A subclass of a layer that does something else with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Shared(nn.Module):
    """Has one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.ModuleList([self.first, nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.block[1](self.block[0](x)))
