"""Find the rescalings of a network, by the functions between its layers, and what its constants leave of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_symmetry.permutation.constants import Constants, PlainNetwork
from lightning_symmetry.permutation.functions import NORMS
from lightning_symmetry.permutation.rescaling import Action, Kind, Rescaling
from lightning_symmetry.permutation.rescaling_check import NORM_LAYERS, RescalingCheck
from lightning_symmetry.permutation.spec import Group, Place

HOMOGENEOUS = {"relu", "leaky_relu", "prelu", "_prelu_kernel", "maximum", "abs"}
"""Functions with f(s x) = s f(x) for all s > 0."""
ODD = {"tanh", "sin", "sinh", "asinh", "atan", "erf", "softshrink", "hardshrink"}
"""Functions with f(-x) = -f(x)."""
_GATE = {"sigmoid", "product"}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding)

Notes = dict[str, list[str]]
"""What is noted, with the names of all groups and weights of which it is true."""


@dataclass(frozen=True)
class _Proposal:
    """A rescaling of the plain network, if it is one.

    Attributes:
        rescaling: All of it.
        free: Which of its factors no constant forbids.
        factors: What has a factor of its own.
        note: What to say where constants forbid some.
    """

    rescaling: Rescaling
    free: Tensor
    factors: str
    note: str

    def left(self) -> Rescaling:
        """Return the part of it that constants leave."""
        whole = self.rescaling
        if self.free.all():
            return whole
        actions = tuple(dataclasses.replace(action, index=action.index[self.free]) for action in whole.actions)
        detail = whole.detail.replace(f"each {self.factors}", f"each of {self._count()} {self.factors}s", 1)
        return dataclasses.replace(whole, units=whole.units[self.free], actions=actions, detail=detail)

    def broken(self) -> str:
        """Say how much of it constants break."""
        which = f" of {int((~self.free).sum())} of {len(self.free)} {self.factors}s" if self.free.any() else ""
        return f"nonzero constants break the {self.rescaling.kind}{which}{self.note}"

    def _count(self) -> str:
        return f"{int(self.free.sum())} of {len(self.free)}"


def find_rescalings(network: PlainNetwork) -> tuple[list[Rescaling], Notes]:
    """Return the rescalings of a network, and what constants break.

    A rescaling of the plain network is proposed by what acts on its units, and kept if a random element of it leaves
    the function as it is, in float64, at random parameters around the given ones and a random input. Constants leave
    those of its factors that multiply none but zeros.

    Args:
        network: The plain network, its constants and groups.
    """
    found: list[Rescaling] = []
    notes: Notes = {}
    groups = [p for group in network.spec.groups.values() for p in _of_group(network, group)]
    for proposals, normalising in ((groups, False), (list(_normalised(network)), True)):
        check = RescalingCheck(network.net, network.example_input, normalising)
        if proposals and not check.is_possible:
            notes["not checked for rescalings, as they cannot be run on a random input in float64"] = ["the network"]
            continue
        holds = check.which_hold([proposal.rescaling for proposal in proposals])
        for proposal in (p for p, good in zip(proposals, holds, strict=True) if good):
            if not proposal.free.all():
                notes.setdefault(proposal.broken(), []).append(proposal.rescaling.where)
            if proposal.free.any():
                found.append(proposal.left())
    for name, constants in network.constants.items():
        if constants.kind == "gate":
            notes.setdefault(_about_gate(constants), []).append(name)
    return found, notes


def _about_gate(constants: Constants) -> str:
    zero = constants.values == 0
    if not zero.any():
        return "no zero entry, so no diagonal equivariance (Proposition 5)"
    if not zero.flatten(1).all(0).any():
        return "zero entries, but no zero column, so no diagonal equivariance"
    return "zero columns: Proposition 5 does not hold, no gate sees these units"


def _of_group(network: PlainNetwork, group: Group) -> Iterator[_Proposal]:
    """Propose what the functions on a group allow."""
    if group.name in network.spec.blocks:
        return
    actions = [action for place in group.places if (action := _action(network, place)).exponent]
    if not actions:
        return
    functions = set(group.functions) - set(NORMS.values())
    constants = [
        (place, network.constants[place.tensor]) for place in group.places if place.tensor in network.constants
    ]
    gates = any(own.kind == "gate" for _, own in constants)
    kinds: list[Kind] = []
    if gates and functions <= _GATE:
        kinds.append("scaling")
    elif functions:
        kinds += ["positive scaling"] if functions <= HOMOGENEOUS else []
        kinds += ["sign flip"] if functions <= ODD else []
    else:
        mixable = not constants and not group.functions and all(action.index.shape[1] == 1 for action in actions)
        kinds.append("general linear" if mixable else "scaling")
    free = torch.ones(group.size, dtype=torch.bool)
    for place, own in constants:
        free &= ~_nonzero(own, place.axis, place.index)
    acting = f"({', '.join(sorted(group.functions)) or 'no function'} between the layers)"
    for kind in kinds:
        units = torch.arange(group.size)
        if gates:  # only units that no gate sees are free of it, whatever the constants
            units, own_actions = units[free], [dataclasses.replace(a, index=a.index[free]) for a in actions]
            detail = f"each unit that no gate sees {acting}"
            if len(units):
                rescaling = Rescaling(kind, group.name, units, tuple(own_actions), detail)
                yield _Proposal(rescaling, torch.ones(len(units), dtype=torch.bool), "unit", "")
            continue
        detail = f"all units together {acting}" if kind == "general linear" else f"each unit {acting}"
        yield _Proposal(Rescaling(kind, group.name, units, tuple(actions), detail), free, "unit", "")


def _action(network: PlainNetwork, place: Place) -> Action:
    """Say with which power of its factor a unit enters a place; what a norm takes back stays as it is."""
    owner, _, last = place.tensor.rpartition(".")
    module = network.net.get_submodule(owner)
    constants = network.constants.get(place.tensor)
    normalised = {weight for weight, _ in network.spec.trace.normalised}
    exponent = 1
    if (constants is not None and constants.kind == "gate") or isinstance(module, nn.PReLU):
        exponent = 0
    elif isinstance(module, NORM_LAYERS):
        exponent = int(last in ("weight", "bias"))
    elif len(network.spec.shapes[place.tensor]) > 1:
        produces = place.axis == (1 if isinstance(module, _TRANSPOSED) else 0)
        exponent = 1 if produces else -1
        if getattr(module, "groups", 1) > 1 or (produces and place.tensor in normalised):
            exponent = 0
    elif any(weight.rpartition(".")[0] == owner for weight in normalised):
        exponent = 0
    return Action(place.tensor, place.axis, place.index, exponent)


def _nonzero(constants: Constants, axis: int, index: Tensor) -> Tensor:
    """Return which units have a nonzero constant on an axis; of a gate only what it sees counts."""
    if constants.kind == "gate" and axis == 0:
        return torch.zeros(len(index), dtype=torch.bool)
    nonzero = (constants.fixed & (constants.values != 0)).cpu().movedim(axis, 0).flatten(1).any(1)
    return nonzero[index].any(1)


def _normalised(network: PlainNetwork) -> Iterator[_Proposal]:
    """Propose the scale invariance of weights whose product is normalised."""
    state = network.net.state_dict()
    for name, norm in dict(network.spec.trace.normalised).items():
        owner, _, last = name.rpartition(".")
        axis = 1 if isinstance(network.net.get_submodule(owner), _TRANSPOSED) else 0
        size = state[name].shape[axis]
        by_row = norm == "batch norm"
        index = torch.arange(size).view(-1, 1) if by_row else torch.arange(size).view(1, -1)
        actions = [Action(name, axis, index, 1)]
        bias = f"{owner}.bias".lstrip(".")
        if last == "weight" and bias in state:
            actions.append(Action(bias, 0, index, 1))
        detail = f"{'each row' if by_row else 'all rows together'} (up to the eps of the {norm} that follows"
        detail += ", whose running statistics follow in training)" if by_row else ")"
        free = torch.ones(len(index), dtype=torch.bool)
        if name in network.constants:
            free &= ~_nonzero(network.constants[name], axis, index)
        rescaling = Rescaling("scale invariance", name, torch.arange(len(index)), tuple(actions), detail)
        yield _Proposal(rescaling, free, "row", f" before the {norm}")
