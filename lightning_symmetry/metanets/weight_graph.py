"""The graph of a network: units as nodes, weights as edges."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.graph_units import AxisUnits, Key, axis_units, orbit_of, part_of
from lightning_symmetry.metanets.metanetwork import Layout
from lightning_symmetry.metanets.weight_layout import WeightLayout
from lightning_symmetry.permutation.constants import plain_network
from lightning_symmetry.permutation.spec import PermutationSpec


@dataclass(frozen=True)
class TensorInGraph:
    """Where the entries of one tensor, or of a section of it, stand in the graph.

    Attributes:
        name: Name of the tensor.
        entries: Places in the flat vector that are the features of each node or edge, shape ``(n, k)``.
        nodes: The nodes, shape ``(1, n)``, or the ends of the edges from input to output, shape ``(2, n)``.
        fixed: Which entries are constants, booleans of shape ``(n, k)``; None if there are none.
    """

    name: str
    entries: Tensor
    nodes: Tensor
    fixed: Tensor | None

    @property
    def is_edge(self) -> bool:
        """Whether the entries stand on edges."""
        return len(self.nodes) == 2


@dataclass(frozen=True)
class WeightGraph:
    """A graph that is the same for all networks of an architecture; only its features are their weights.

    Nodes are units: the inputs, the outputs, and the neurons or channels of each permutation group. Activations that
    are added to each other share their units, so that a residual stream is one set of nodes, and a block leads from it
    back to it. A weight is an edge from an input unit to an output unit, with the entries of a kernel as its features;
    biases and parameters of normalisations are features of nodes.

    Permuting the weights by a symmetry of the network gives an isomorphic graph, by an isomorphism that keeps
    :attr:`orbit` and :attr:`part`.

    Attributes:
        orbit: For each of the N nodes the number of its orbit: units that can take each other's places share one, a
            unit that cannot move has its own.
        part: For each node the number of its part: all units that stand on the same axes.
        tensors: Where the entries of each tensor stand.
        layout: What stands where in the flat vectors.
    """

    orbit: Tensor
    part: Tensor
    tensors: tuple[TensorInGraph, ...]
    layout: WeightLayout

    @property
    def num_nodes(self) -> int:
        """Number of units."""
        return len(self.orbit)

    @property
    def edge_index(self) -> Tensor:
        """Ends of all edges, shape ``(2, E)``, in the order of :attr:`tensors`."""
        none = torch.zeros(2, 0, dtype=torch.long)
        return torch.cat([none, *(tensor.nodes for tensor in self.tensors if tensor.is_edge)], dim=1)


def weight_graph(layout: Layout, spec: PermutationSpec, constants: Collection[str] = ()) -> WeightGraph:
    """Build the graph of a network from its traced permutation symmetries.

    Args:
        layout: What stands where in the flat vectors. Tensors of the network that are not in it are left out.
        spec: What :func:`~lightning_symmetry.trace_permutations` has found. For an asymmetric network that of the
            plain one shows best which units are the same (:func:`network_graph`).
        constants: Tensors with constants, the units on whose axes cannot move; those with fixed entries in the layout
            are among them.

    Raises:
        ValueError: If a tensor is not the traced network's, or more than two of its axes are permuted.

    Source: Lim et al., Graph Metanetworks for Processing Diverse Neural Architectures (2024); Kofinas et al., Graph
    Neural Networks for Learning Equivariant Representations of Neural Networks (2024). Taking the units from the trace
    is this library's.
    """
    layout = WeightLayout.make(layout)
    numbers: dict[Key, int] = {}
    tensors = []
    for name, shape in layout.shapes.items():
        if spec.shapes.get(name) != shape:
            found = tuple(spec.shapes[name]) if name in spec.shapes else "no such tensor"
            raise ValueError(f"The layout has {name} of shape {tuple(shape)}, but the traced network has {found}.")
        tensors += _place(name, layout, spec, numbers)
    orbits: dict[Key, int] = {}
    parts: dict[Key, int] = {}
    constants = {*constants, *(tensor.name for tensor in tensors if tensor.fixed is not None)}
    orbit = [orbits.setdefault(orbit_of(spec, key, constants), len(orbits)) for key in numbers]
    part = [parts.setdefault(part_of(spec, key), len(parts)) for key in numbers]
    return WeightGraph(torch.tensor(orbit), torch.tensor(part), tuple(tensors), layout)


def network_graph(network: nn.Module, example_input: Any = None) -> WeightGraph:
    """Trace a network and build its graph.

    An asymmetric network is traced as if its constants could be permuted: it has the nodes and edges of the plain
    network, but each unit that meets constants is told apart from the others.

    Args:
        network: The network; it is left as it was.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``network.example_input_array``.

    Raises:
        DynamicNetworkError: If the computation depends on the values that flow through it.
        ValueError: If the network cannot be called with the example input, there is none, or it has layers in other
            coordinates (but those with fixed entries): give its ``plain_copy``.
    """
    found = plain_network(network, example_input)
    return weight_graph(WeightLayout.of(network), found.spec, found.constants)


def _place(name: str, layout: WeightLayout, spec: PermutationSpec, numbers: dict[Key, int]) -> Iterator[TensorInGraph]:
    """Yield the sections of a tensor, numbering units as they come."""
    shape = layout.shapes[name]
    whole = layout.offsets[name] + torch.arange(shape.numel()).view(shape or (1,))
    if shape:
        units = {axis: axis_units(spec, name, axis) for axis in range(len(shape))}
    else:
        units = {0: [AxisUnits([("one", name)], torch.zeros(1, 1, dtype=torch.long), False)]}
    chosen = _unit_axes(name, units)
    for sections in product(*(units[axis] for axis in chosen)):
        entries, rows = whole, []
        for place, (axis, section) in enumerate(zip(chosen, sections, strict=True)):
            at = axis + place  # units come to the front, and leave in each chosen axis what one has of it
            entries = entries.index_select(at, section.positions.flatten())
            entries = entries.unflatten(at, tuple(section.positions.shape)).movedim(at, place)
            rows.append(torch.tensor([numbers.setdefault(key, len(numbers)) for key in section.keys]))
        entries = entries.flatten(0, len(rows) - 1).flatten(1)
        # The first axis of a weight is its output, the second its input: edges lead from the second to the first.
        nodes = torch.cartesian_prod(*rows).view(len(entries), len(rows)).T.flip(0).contiguous()
        fixed = layout.fixed[entries]
        yield TensorInGraph(name, entries, nodes, fixed if bool(fixed.any()) else None)


def _unit_axes(name: str, units: dict[int, list[AxisUnits]]) -> list[int]:
    """Choose the one or two axes whose units are nodes; the others are features.

    Raises:
        ValueError: If more than two axes are permuted.
    """
    free = [axis for axis, found in units.items() if found[0].is_free]
    if len(free) > 2:
        raise ValueError(
            f"{len(free)} axes of {name} are permuted, but an edge has two ends: leave the tensor out of the layout."
        )
    for axis in list(units)[:2]:  # inputs and outputs; an axis of one entry is an input only if nothing else is
        if len(free) < 2 and axis not in free and (axis == 0 or _count(units[axis]) > 1):
            free.append(axis)
    return sorted(free)


def _count(sections: list[AxisUnits]) -> int:
    return sum(len(section.keys) for section in sections)
