"""Which symmetries of its parameters a network has: those that its random constants leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_symmetry.permutation.automorphisms import automorphisms
from lightning_symmetry.permutation.constant_graph import constant_graph
from lightning_symmetry.permutation.constants import Constants, plain_network
from lightning_symmetry.permutation.refinement import Ints
from lightning_symmetry.permutation.rescaling import Rescaling
from lightning_symmetry.permutation.rescaling_search import find_rescalings
from lightning_symmetry.permutation.spec import Group, PermutationSpec


@dataclass(frozen=True)
class GroupSymmetry:
    """What constants leave of the permutations of one group of units.

    Attributes:
        name: Name of the group. A group of blocks (attention heads) stands for the units within its blocks too.
        size: Number of units, or blocks.
        plain_order: Number of permutations of the plain network: n! for n units.
        order: Number of permutations of these units that some symmetry of the whole network makes. Groups may only be
            able to move together, so the product over groups may exceed the order of the whole.
        moved: Number of units that some symmetry moves.
        reason: Why it is what it is.
    """

    name: str
    size: int
    plain_order: int = field(repr=False)
    order: int = field(repr=False)
    moved: int
    reason: str

    @property
    def is_trivial(self) -> bool:
        """Whether no unit can be moved."""
        return self.order == 1


@dataclass(frozen=True)
class SymmetryReport:
    """The symmetries of a network's parameters, each of which leaves its function and its constants as they are.

    Attributes:
        groups: What is left of each group of units of the plain network.
        order: Order of the group of all permutation symmetries.
        generators: Permutations that generate it, each with the groups that it moves: ``new[i] = old[p[i]]``, as
            ``spec.apply`` takes them.
        orbits: For each group the sets of units that can take each other's places, where there is more than one.
        rescalings: Symmetries that are no permutations.
        notes: What constants break, and what could not be seen through, with the names of groups, tensors or modules.
        spec: The permutation symmetries of the plain network, whose state dict (that of ``surgery.plain_copy(net)``)
            they act on.
    """

    groups: dict[str, GroupSymmetry]
    order: int = field(repr=False)
    generators: list[dict[str, Tensor]] = field(repr=False)
    orbits: dict[str, list[list[int]]] = field(repr=False)
    rescalings: list[Rescaling] = field(repr=False)
    notes: dict[str, list[str]]
    spec: PermutationSpec = field(repr=False)

    @property
    def is_asymmetric(self) -> bool:
        """Whether no permutation but the identity is a symmetry."""
        return self.order == 1

    @property
    def log10_order(self) -> float:
        """Logarithm of the order to base 10."""
        return math.log10(self.order)

    def __str__(self) -> str:
        rows = [("group", "units", "plain", "left", "why")]
        rows += [
            (g.name, str(g.size), _number(g.plain_order), _number(g.order), g.reason) for g in self.groups.values()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        left = "none but the identity" if self.is_asymmetric else f"a group of order {_number(self.order)}"
        lines.insert(0, f"permutation symmetries: {left}, in {len(self.groups)} groups of units")
        others: dict[str, list[str]] = {}
        for found in self.rescalings:
            others.setdefault(str(found), []).append(found.where)
        for title, listed in (("other symmetries:", others), ("notes:", self.notes)):
            lines += [title, *(f"  {what}: {_few(names)}" for what, names in listed.items())] if listed else []
        return "\n".join(lines)


def symmetries(net: nn.Module, example_input: Any = None) -> SymmetryReport:
    r"""Find the symmetries of a network's parameters that its constants leave.

    The plain network, in which each layer with fixed entries is the layer that it stands for, is traced. Of the
    permutations of its units those are symmetries that leave all constants where they are:

    - for fixed zeros the automorphisms of the layered graph of the masks (Theorem 3);
    - for other fixed entries those that also keep the values, which are distinct with probability 1;
    - for FiGLU the P with :math:`P F P^\top = F` (Proposition 4).

    The answer is exact for the groups that were traced: these permutations are the automorphisms of one graph of units
    and constants, which BLISS counts after colour refinement (whose 64-bit hashes do not collide but by accident).
    A symmetry that uses equal values of trainable parameters is not meant.

    Scalings, sign flips and general linear maps are listed where a random one leaves the function as it is, at random
    parameters. That list is correct rather than complete.

    A network without symmetry by structure can still have almost one, if its constants hardly matter: see
    :func:`effective_asymmetry`.

    Args:
        net: The network; it is left as it was.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``net.example_input_array``.

    Returns:
        The symmetries; print it for a table.

    Raises:
        DynamicNetworkError: If the computation depends on the values that flow through it.
        ValueError: If the network cannot be called with the example input, or there is none.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), Theorem 3, Propositions 4 and
    5. Values of constants as labels of edges are what appendix B.1 leaves to future work.
    """
    network = plain_network(net, example_input)
    spec = network.spec
    built = constant_graph(spec, network.constants)
    found = automorphisms(built.graph)
    units = {name: built.first[name] + np.arange(group.size) for name, group in spec.groups.items()}
    orbits = _orbits(found.orbits(), units)
    families: dict[str, list[str]] = {}
    for name, group in spec.groups.items():
        families.setdefault(_outermost(spec, group), []).append(name)
    groups = {}
    for name, members in families.items():
        order = found.order_on(np.concatenate([units[member] for member in members]))
        plain = math.prod(math.factorial(spec.groups[member].size) for member in members)
        moved = sum(len(orbit) for member in members for orbit in orbits[member])
        reason = _reason(spec, network.constants, members, order, plain)
        groups[name] = GroupSymmetry(name, spec.groups[name].size, plain, order, moved, reason)
    scalings, notes = find_rescalings(network)
    for operation, modules in spec.frozen_by.items():
        notes[f"no rule for {operation}, symmetries behind it are not seen"] = sorted(set(modules))
    generators = [_permutations(spec, built.first, images) for images in found.generators]
    return SymmetryReport(groups, found.order, generators, orbits, scalings, notes, spec)


def _outermost(spec: PermutationSpec, group: Group) -> str:
    return group.name if group.block_of is None else _outermost(spec, spec.groups[group.block_of])


def _orbits(numbers: Ints, units: Mapping[str, Ints]) -> dict[str, list[list[int]]]:
    found = {}
    for name, vertices in units.items():
        by_number: dict[int, list[int]] = {}
        for unit, number in enumerate(numbers[vertices].tolist()):
            by_number.setdefault(number, []).append(unit)
        found[name] = [orbit for orbit in by_number.values() if len(orbit) > 1]
    return found


def _permutations(spec: PermutationSpec, first: Mapping[str, int], images: Ints) -> dict[str, Tensor]:
    """Turn an automorphism into permutations: the unit at place i is the image of the unit i."""
    found = {}
    for name, group in spec.groups.items():
        there = images[first[name] + np.arange(group.size)]
        source = name
        if group.block_of is not None:
            source = next(n for n in spec.groups if first[n] <= there[0] < first[n] + spec.groups[n].size)
        permutation = there - first[source]
        if (permutation != np.arange(group.size)).any():
            found[name] = torch.from_numpy(permutation)
    return found


def _reason(
    spec: PermutationSpec, constants: Mapping[str, Constants], members: list[str], order: int, plain: int
) -> str:
    places = {(p.tensor, p.axis) for name in members for p in spec.groups[name].places if p.tensor in constants}
    touching = {tensor: constants[tensor] for tensor, _ in sorted(places)}
    if not touching:
        return "no constants on its units"
    if order == plain:
        return "its constants tell no unit from another"
    if order > 1:
        return "some units are alike in all constants"
    kinds = {found.kind for found in touching.values()}
    if kinds == {"gate"}:
        layers = _few(list(dict.fromkeys(found.layer for found in touching.values())))
        return f"F has no permutation symmetry (Proposition 4): {layers}"
    if kinds == {"mask"}:
        return "masks distinct (Theorem 3)" if _rows_are_distinct(spec, constants) else "the masks tell all units apart"
    if kinds == {"values"}:
        return "constants distinct"
    return "the constants tell all units apart"


def _rows_are_distinct(spec: PermutationSpec, constants: Mapping[str, Constants]) -> bool:
    """Whether all weights that make units have masks with distinct rows, as Theorem 3 asks."""
    places = {place.tensor for group in spec.groups.values() for place in group.places if place.axis == 0}
    weights = [constants.get(tensor) for tensor in places if len(spec.shapes[tensor]) > 1]
    masks = [own.fixed.flatten(1) for own in weights if own is not None and own.kind == "mask"]
    return len(masks) == len(weights) and all(len(torch.unique(mask, dim=0)) == len(mask) for mask in masks)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _number(order: int) -> str:
    return str(order) if order < 10**9 else f"10^{math.log10(order):.1f}"
