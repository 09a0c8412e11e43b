"""The plain network that an asymmetric one stands for, and which entries of its tensors are constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_symmetry.permutation.spec import PermutationSpec, make_spec
from lightning_symmetry.permutation.trace import trace
from lightning_symmetry.surgery import HasConstants, ReparametrizedLayer, example_of, plain_copy

Kind = Literal["mask", "values", "gate"]
_UNKNOWN = "its layer has constants of a kind that is not known here"


@dataclass(frozen=True)
class Constants:
    """The constant entries of one tensor of the plain network.

    Attributes:
        layer: Name of the layer.
        kind: ``"mask"`` for fixed zeros, ``"values"`` for other fixed entries of a weight, ``"gate"`` for a tensor of
            constants only (FiGLU's F).
        fixed: Which entries are constants.
        values: Their values, and zero elsewhere.
    """

    layer: str
    kind: Kind
    fixed: Tensor
    values: Tensor


@dataclass(frozen=True)
class PlainNetwork:
    """A network in which each reparametrised layer is the plain layer that it stands for.

    Attributes:
        net: A deep copy.
        constants: The constants by the names of tensors in its state dict.
        spec: Its permutation symmetries if no entry were constant.
        example_input: What it was traced with.
    """

    net: nn.Module
    constants: dict[str, Constants]
    spec: PermutationSpec
    example_input: Any


def plain_network(net: nn.Module, example_input: Any) -> PlainNetwork:
    """Trace the plain network of ``net``, as if its constants could be permuted, and note where they are.

    Args:
        net: The network; it is left as it was.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``net.example_input_array``.

    Raises:
        DynamicNetworkError: If the computation depends on the values that flow through it.
        ValueError: If the network cannot be called with the example input, or there is none.
    """
    example_input = example_of(net, example_input)
    plain = plain_copy(net)
    state = plain.state_dict()
    found: dict[str, Constants] = {}
    frozen: dict[str, str] = {}
    for name, module in net.named_modules():
        if isinstance(module, HasConstants) and module.constants():
            known = _constants_of(name, module)
            found.update({key: value for key, value in known.items() if key in state})
            if not known:
                prefix = f"{name}." if name else ""
                frozen.update({key: _UNKNOWN for key in state if key.startswith(prefix)})
    shown = trace(plain, example_input, frozen)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    return PlainNetwork(plain, found, make_spec(shown, shapes, ()), example_input)


def _constants_of(name: str, module: nn.Module) -> dict[str, Constants]:
    """Return the constants of a layer by tensor; none if they are of another kind than is known here."""
    constants = module.constants()
    if not isinstance(module, ReparametrizedLayer):
        return {
            f"{name}.{key}".lstrip("."): Constants(name, "gate", torch.ones_like(t, dtype=torch.bool), t.detach())
            for key, t in constants.items()
        }
    if "mask" not in constants:
        return {}
    weight = module.canonical_weight().detach()
    mask = constants["mask"]
    fixed = mask.logical_not().repeat_interleave(weight[0].numel() // mask.shape[1], dim=1).view_as(weight)
    values = weight * fixed
    kind: Kind = "values" if values.any() else "mask"
    return {f"{name}.weight".lstrip("."): Constants(name, kind, fixed, values)}
