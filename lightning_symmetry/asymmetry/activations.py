"""Find the nonlinearities of a network, the places where they act and the channels that they see there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_symmetry.asymmetry.graph_linear import graph_linear
from lightning_symmetry.surgery import call, evaluating

ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.RReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
"""Elementwise modules that act as hidden nonlinearities. Sigmoids are gates or outputs and are not among them."""

# A functional form is called like its module, but for LeakyReLU.
_NAMES = ["leaky_relu", *(activation.__name__.lower() for activation in ACTIVATIONS)]
FUNCTIONS = {
    getattr(owner, name + ending): name
    for owner in (F, torch, Tensor)
    for name in _NAMES
    for ending in ("", "_")
    if hasattr(owner, name + ending)
}
"""Functional forms of the same nonlinearities."""


@dataclass
class Sightings:
    """What one forward pass showed.

    Attributes:
        sizes: For each activation, the (channel axis, number of channels) pairs with which it was called.
        functional: Functional activations outside of activation modules, as (function, module name).
        called: Names of the modules that were called.
    """

    sizes: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    functional: list[tuple[str, str]] = field(default_factory=list)
    called: set[str] = field(default_factory=set)


def watch(net: nn.Module, example_input: Any) -> Sightings:
    """Run ``net`` once on ``example_input``, without gradients and in evaluation mode, and note what it does.

    The channel axis of an activation is that of the linear map last called before it: 1 after a convolution,
    -1 after a linear layer.

    Args:
        net: The network; its modes, buffers and the global random state are left as they were.
        example_input: A tensor, or a tuple or dictionary of arguments.
    """
    seen = Sightings()
    stack: list[str] = []
    axis = [-1]

    def enter(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            stack.append(name)
            seen.called.add(name)
            if isinstance(module, ACTIVATIONS) and args and isinstance(args[0], Tensor):
                x = args[0]
                dim = axis[0] if x.ndim > 2 else -1
                seen.sizes[name].add((dim, x.shape[dim]))

        return hook

    def leave(module: nn.Module) -> Any:
        def hook(*_: Any) -> None:
            stack.pop()
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                axis[0] = 1
            elif isinstance(module, (nn.Linear, *graph_linear())):
                axis[0] = -1

        return hook

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in FUNCTIONS:
                where = stack[-1] if stack else ""
                if not isinstance(net.get_submodule(where), (*ACTIVATIONS, *_OWN_ACTIVATION)):
                    seen.functional.append((FUNCTIONS[function], where))
            return function(*args, **(kwargs or {}))

    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name, module)))
        handles.append(module.register_forward_hook(leave(module), always_call=True))
    try:
        with evaluating(net), Watch():
            call(net, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return seen


# Their activation is an attribute, replaced as such, or part of a fused operation.
_OWN_ACTIVATION = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase, nn.RNNCellBase)
