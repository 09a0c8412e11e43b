"""The permutation symmetries of a network, as groups that act on its state dict."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.permutation.layout import (
    Layouts,
    free_atoms,
    layouts,
    name_of,
    occurrences,
    permutation_of,
    positions_of,
    why_frozen,
)
from lightning_symmetry.permutation.terms import Atom, atoms
from lightning_symmetry.permutation.trace import Trace, trace
from lightning_symmetry.surgery import HasConstants, example_of

Permutations = Mapping[str, Tensor]
FIXED = "its layer has fixed entries, which belong to their places"


@dataclass(frozen=True)
class Place:
    """Positions of one axis of one tensor that a group moves.

    Attributes:
        tensor: Name in the state dict.
        axis: Axis of the tensor.
        index: The positions that belong to each unit, of shape ``(units, k)``.
    """

    tensor: str
    axis: int
    index: Tensor


@dataclass(frozen=True)
class Group:
    """All permutations of some units, which leave the network's function as it is.

    Attributes:
        name: Name of the layer that makes the units, or the slice of the tensor where they first stand.
        size: Number of units.
        places: Every tensor and axis that is permuted.
        block_of: Name of the group that permutes blocks (heads), if these are units within one of its blocks.
        block: Number of that block.
        slot: Number of the part of a block that these units are (queries and keys, or values).
        functions: Functions that act on the units' activations.
    """

    name: str
    size: int
    places: tuple[Place, ...]
    block_of: str | None = None
    block: int = 0
    slot: int = 0
    functions: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PermutationSpec:
    r"""The permutation symmetries of a network.

    An element of the symmetry group is one permutation for each of :attr:`groups`, with ``new[i] = old[p[i]]`` on every
    axis that the group acts on. Where a group permutes blocks (the heads of attention), block h comes from block
    ``p[h]`` and is permuted within by the permutation of block h.

    Attributes:
        groups: The groups by name.
        shapes: Shape of each tensor of the state dict.
        blocks: For each group of blocks the groups within them: for each slot one name a block.
        frozen_by: Operations that could not be seen through, with the modules in which they stand.
        fixed: Layers with fixed entries, none of which is ever permuted.
        trace: What the forward pass showed.
        layouts: How each axis of each tensor is made up of groups.
    """

    groups: dict[str, Group]
    blocks: dict[str, tuple[tuple[str, ...], ...]]
    shapes: dict[str, torch.Size]
    frozen_by: dict[str, list[str]]
    fixed: tuple[str, ...]
    trace: Trace = field(repr=False)
    layouts: Layouts = field(repr=False)
    names: dict[Atom, str] = field(repr=False)

    @property
    def moved(self) -> list[str]:
        """Names of the tensors that take part."""
        return [name for name, terms in self.layouts.items() if any(free_atoms(term) for term in terms)]

    def identity(self) -> dict[str, Tensor]:
        """Return the identity of every group."""
        return {name: torch.arange(group.size) for name, group in self.groups.items()}

    def random(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return a uniformly random element of the symmetry group."""
        return {name: torch.randperm(group.size, generator=generator) for name, group in self.groups.items()}

    def inverse(self, permutations: Permutations) -> dict[str, Tensor]:
        """Return the element that undoes another."""
        whole = self._complete(permutations)
        return {self._source(name, whole): torch.argsort(permutation) for name, permutation in whole.items()}

    def compose(self, first: Permutations, second: Permutations) -> dict[str, Tensor]:
        """Return the element that acts like ``first`` and then ``second``."""
        first, second = self._complete(first), self._complete(second)
        return {name: first[self._source(name, second)][permutation] for name, permutation in second.items()}

    def _complete(self, permutations: Permutations) -> dict[str, Tensor]:
        self.check(permutations)
        return {**self.identity(), **permutations}

    def _source(self, name: str, permutations: Permutations) -> str:
        """Return the group whose place a group takes: that of the block which comes to its own block."""
        group = self.groups[name]
        if group.block_of is None:
            return name
        block = int(permutations[group.block_of][group.block])
        return self.blocks[self._source(group.block_of, permutations)][group.slot][block]

    def apply(self, state_dict: Mapping[str, Tensor], permutations: Permutations) -> dict[str, Tensor]:
        """Return a new state dict of the same function.

        Args:
            state_dict: State dict of the traced network or of another of its architecture.
            permutations: A permutation for some or all groups; the others stay as they are.

        Raises:
            ValueError: If a group does not exist, a permutation is none, or a tensor has another shape.
        """
        self.check(permutations)
        tensors = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}
        check_shapes(self.shapes, {name: tensor.shape for name, tensor in tensors.items()}, "the traced network")
        found = OrderedDict(state_dict)
        if hasattr(state_dict, "_metadata"):
            found._metadata = state_dict._metadata  # versions, which some modules ask for when they load
        for name, tensor in tensors.items():
            found[name] = self.permute(name, tensor.detach().clone(), permutations)
        return found

    def permute(self, name: str, tensor: Tensor, permutations: Permutations) -> Tensor:
        """Return one tensor of the state dict in its new order; the tensor itself where nothing moves."""
        for axis, term in enumerate(self.layouts[name]):
            order = permutation_of(term, lambda atom: permutations.get(self.names[atom]))
            if order is not None:
                tensor = tensor.index_select(axis, order.to(tensor.device))
        return tensor

    def why_nothing(self) -> str:
        """Return why there is no group at all."""
        if self.fixed:
            return (
                f"Nothing can be permuted: the layers {', '.join(self.fixed[:3])} have fixed entries, constants that "
                "belong to their places, so that no permutation of units gives the same function. Asymmetric networks "
                "have no such symmetry to undo: interpolate them as they are."
            )
        return f"Nothing can be permuted: the network has no hidden units that are free to move.\n{self.report()}"

    def check(self, permutations: Permutations) -> None:
        """Check that permutations are some of these groups'.

        Raises:
            ValueError: If they are not.
        """
        for name, permutation in permutations.items():
            if name not in self.groups:
                raise ValueError(self._no_such_group(name))
            size = self.groups[name].size
            whole = torch.arange(size)
            integers = permutation.shape == whole.shape and not permutation.is_floating_point()
            if not integers or not torch.equal(permutation.cpu().long().sort().values, whole):
                raise ValueError(
                    f"Expected a permutation of {size} units for the group {name!r} but got {permutation}."
                )

    def _no_such_group(self, name: str) -> str:
        for layer in self.fixed:
            if name == layer or name.startswith(f"{layer}."):
                return (
                    f"The units of {layer!r} cannot be permuted: the layer has fixed entries, constants that belong to "
                    "their places and are shared by all networks with this asymmetry seed. A permuted network would "
                    "be none of them, and there is no symmetry to undo: interpolate asymmetric networks as they are."
                )
        reasons = self.frozen()
        if name in reasons:
            return f"{name!r} is not permuted: {reasons[name]}."
        listed = ", ".join(list(self.groups)[:5])
        return f"There is no group {name!r}; there are {len(self.groups)}: {listed}{', …' * (len(self.groups) > 5)}."

    def frozen(self) -> dict[str, str]:
        """Return the tensors with an axis that is not permuted, each with the axes and the reasons."""
        found = {}
        for name, terms in self.layouts.items():
            parts = []
            for axis, term in enumerate(terms):
                if any(atom.frozen is not None and atom.size > 1 for atom in atoms(term)):
                    parts.append(f"axis {axis}: {why_frozen(term)}")
            if parts:
                found[name] = "; ".join(parts)
        return found

    def report(self) -> str:
        """Return a table of the groups and of what is not permuted, with the reasons."""
        moved = self.moved
        still = {name: reason for name, reason in self.frozen().items() if name not in moved}
        lines = [
            f"{len(self.groups)} permutation groups; {len(moved)} of {len(self.layouts)} tensors take part",
            *(f"  {name}: {self._units(g)}, {_places(g)}" for name, g in self.groups.items() if g.block_of is None),
            *(["not permuted:"] if still else []),
            *(f"  {name}: {reason}" for name, reason in still.items()),
        ]
        if self.trace.tied:
            lines += ["permuted alike, though each could be by itself:", *(f"  {what}" for what in self.trace.tied)]
        for operation, modules in self.frozen_by.items():
            lines.append(f"no rule for {operation} (in {', '.join(sorted(set(modules)))}): what it touches is frozen")
        return "\n".join(lines)

    def _units(self, group: Group) -> str:
        if group.name not in self.blocks:
            return f"{group.size} units"
        inside = [f"{self.groups[kind[0]].size}" for kind in self.blocks[group.name]]
        return f"{group.size} blocks with {' and '.join(inside)} units within each"

    __str__ = report


def trace_permutations(net: nn.Module, example_input: Any = None) -> PermutationSpec:
    """Find the permutation symmetries of a network by following one forward pass.

    Every operation says which axes of its operands move together: what a linear map sums over, what is added to each
    other, what a normalisation scales. Axes that meet the input, the output, the space of a convolution, a lookup or an
    operation that cannot be seen through stay as they are. No list of layers is needed: convolutions with groups,
    normalisation with its running statistics, skips, concatenations, attention (heads, and the entries within each),
    message passing over graphs and elementwise functions are followed as they occur.

    Args:
        net: The network. It is run once, in evaluation mode and without gradients, and left as it was.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``net.example_input_array``.

    Returns:
        The groups; print it for a report. It holds for inputs that take the same way through the network.

    Raises:
        DynamicNetworkError: If the computation depends on the values that flow through it.
        ValueError: If the network cannot be called with the example input, or there is none.

    Source: Lim et al., Graph Metanetworks (2024) call these neural DAG automorphisms; Ainsworth et al., Git Re-Basin
    (2023), section 2. Following axes through the operations is this library's.
    """
    fixed = {
        name: module for name, module in net.named_modules() if isinstance(module, HasConstants) and module.constants()
    }
    frozen = {
        f"{name}.{key}".lstrip("."): FIXED
        for name, module in fixed.items()
        for key in module.state_dict(keep_vars=True)
    }
    shown = trace(net, example_of(net, example_input), frozen)
    return make_spec(shown, {n: t.shape for n, t in net.state_dict().items() if isinstance(t, Tensor)}, tuple(fixed))


def make_spec(shown: Trace, shapes: dict[str, torch.Size], fixed: tuple[str, ...]) -> PermutationSpec:
    """Turn a trace into groups."""
    terms = {name: [axis.without(axis.parents).table[()] for axis in axes] for name, axes in shown.axes.items()}
    found, blocks = layouts(terms)
    places = occurrences(found)
    names = {atom: _name(atom, where, found) for atom, where in places.items()}
    parents: dict[Atom, tuple[str, int, int]] = {}
    for outer, inside in sorted(blocks.items(), key=lambda item: -sum(map(len, item[1]))):  # the innermost comes last
        for block, own in enumerate(inside):
            parents.update({atom: (names[outer], block, slot) for slot, atom in enumerate(own)})
    groups = {}
    for atom, where in places.items():
        acts = tuple(
            Place(tensor, axis, torch.cat(positions_of(found[tensor][axis], atom), dim=1)) for tensor, axis in where
        )
        groups[names[atom]] = Group(
            names[atom], atom.size, acts, *parents.get(atom, (None, 0, 0)), functions=frozenset(atom.functions)
        )
    parts = {
        names[outer]: tuple(
            tuple(names[atom] for atom in slot)
            for slot in zip(*inside, strict=True)
            if parents[slot[0]][0] == names[outer]
        )
        for outer, inside in blocks.items()
    }
    slots = {name: slot for kinds in parts.values() for slot, kind in enumerate(kinds) for name in kind}
    groups = {name: dataclasses.replace(group, slot=slots.get(name, 0)) for name, group in groups.items()}
    return PermutationSpec(groups, parts, shapes, shown.frozen_by, fixed, shown, found, names)


def _name(atom: Atom, where: list[tuple[str, int]], found: Layouts) -> str:
    """Name a group after the layer whose output it permutes, or the slice where it first stands."""
    tensor, axis = next(((t, a) for t, a in where if a == 0 and len(found[t]) > 1), where[0])
    if found[tensor][axis] is atom and axis == 0:
        return tensor.removesuffix(".weight")
    return f"{tensor}[{':, ' * axis}{name_of(found[tensor][axis], atom)}]"


def check_shapes(ours: Mapping[str, torch.Size], theirs: Mapping[str, torch.Size], title: str) -> None:
    """Check that two state dicts belong to the same architecture.

    Raises:
        ValueError: If they do not; the message names the first difference.
    """
    if missing := [name for name in ours if name not in theirs]:
        raise ValueError(f"Another architecture than {title}: {missing[0]} is missing ({len(missing)} in all).")
    if extra := [name for name in theirs if name not in ours]:
        raise ValueError(f"Another architecture than {title}: it has no {extra[0]} ({len(extra)} in all).")
    for name, shape in ours.items():
        if shape != theirs[name]:
            raise ValueError(
                f"Another architecture than {title}: {name} has shape {tuple(theirs[name])} and not {tuple(shape)}."
            )


def _places(group: Group) -> str:
    shown = [f"{place.tensor}[{place.axis}]" for place in group.places[:4]]
    return ", ".join(shown) + (f" and {len(group.places) - 4} more" if len(group.places) > 4 else "")
