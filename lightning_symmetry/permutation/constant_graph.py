"""The graph of units and constants, whose automorphisms are the permutations that leave every constant in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_symmetry.permutation.constants import Constants
from lightning_symmetry.permutation.refinement import Ints, LabelledGraph
from lightning_symmetry.permutation.spec import PermutationSpec
from lightning_symmetry.permutation.terms import Atom, Concat, Term, Tree, is_frozen

_Positions = tuple[Ints, Ints]


@dataclass(frozen=True)
class ConstantGraph:
    """Units, positions and constants of a network.

    Attributes:
        graph: The vertices are the units of all groups, positions of axes that are made up of several groups, and the
            positions that no group moves. Edges with labels are constants and ties.
        first: Number of the first unit of each group.
    """

    graph: LabelledGraph
    first: dict[str, int]


def constant_graph(spec: PermutationSpec, constants: Mapping[str, Constants]) -> ConstantGraph:
    """Build the graph, whose automorphisms are exactly the elements of the group that keep the constants.

    Args:
        spec: The groups.
        constants: Constants by tensor.
    """
    builder = _Builder(spec)
    for name, tensor in constants.items():
        builder.add_constants(name, tensor)
    return ConstantGraph(builder.graph(), builder.first)


class _Builder:
    """Collects vertices and edges.

    Args:
        spec: The groups.
    """

    def __init__(self, spec: PermutationSpec) -> None:
        self.spec = spec
        self.colours: list[Ints] = []
        self.edges: list[Ints] = []
        self.first: dict[str, int] = {}
        self._size = self._count = 0
        self._numbers: dict[Hashable, int] = {}
        self._places: Ints = np.zeros(0, np.int64)
        self._known: dict[Hashable, int] = {}
        for name, group in spec.groups.items():
            self.first[name] = self._add(np.full(group.size, self._number(self._kind(name))))[0]
        for name, group in spec.groups.items():
            if group.block_of is not None:
                block = self.first[group.block_of] + group.block
                self._join(self._units(name), np.full(group.size, block), self._number("block"))

    def add_constants(self, name: str, tensor: Constants) -> None:
        """Add the edges of one tensor with constants."""
        terms = self.spec.layouts[name]
        free = [axis for axis, term in enumerate(terms) if not is_frozen(term)]
        if not free:
            return
        classes = _classes(tensor, free)
        axes = [self._positions(terms[axis], (name, axis)) for axis in free]
        while len(axes) > 2:
            axes = [self._pairs((name, len(axes)), *axes[:2]), *axes[2:]]
            classes = classes.reshape(-1, *classes.shape[2:])
        if len(axes) == 1:
            axes.append((self._still(1), np.zeros(1, np.int64)))
            classes = classes[:, None]
        (rows, row_roles), (columns, column_roles) = axes
        values, counts = np.unique(classes, return_counts=True)
        i, j = np.nonzero(classes != values[counts.argmax()])
        kinds, label = _unique_rows(np.stack([classes[i, j], row_roles[i], column_roles[j]], 1))
        self._join(rows[i], columns[j], self._fresh(kinds) + label)

    def graph(self) -> LabelledGraph:
        """Return what was collected."""
        source, target, label = np.concatenate([np.zeros((0, 3), np.int64), *self.edges]).T.copy()
        loops = source == target  # an entry of one unit with itself says something of that unit
        if loops.any():
            target[loops] = self._still(1)
            label[loops] = [self._number(("loop", number)) for number in label[loops].tolist()]
        return LabelledGraph(np.concatenate([np.zeros(0, np.int64), *self.colours]), source, target, label)

    def _kind(self, name: str) -> Hashable:
        """Return what the units of a group share with those that blocks may exchange them with."""
        group = self.spec.groups[name]
        return name if group.block_of is None else (self._kind(group.block_of), group.slot)

    def _number(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = self._fresh(1)
        return self._numbers[key]

    def _fresh(self, count: int) -> int:
        """Return the first of so many new numbers."""
        self._count += count
        return self._count - count

    def _add(self, colours: Ints) -> Ints:
        self.colours.append(colours.astype(np.int64))
        self._size += len(colours)
        return np.arange(self._size - len(colours), self._size)

    def _join(self, source: Ints, target: Ints, label: Ints | int) -> None:
        self.edges.append(np.stack(np.broadcast_arrays(source, target, label), 1).astype(np.int64))

    def _units(self, name: str) -> Ints:
        return self.first[name] + np.arange(self.spec.groups[name].size)

    def _still(self, size: int) -> Ints:
        """Return vertices for positions that nothing moves, the same for all axes."""
        colours = [self._number(("still", i)) for i in range(len(self._places), size)]
        if colours:
            self._places = np.r_[self._places, self._add(np.array(colours))]
        return self._places[:size]

    def _positions(self, term: Term, path: Hashable, start: int = 0) -> _Positions:
        """Return the vertices of the positions of an axis, and a role of each: one vertex may have several positions.

        Args:
            term: How the axis is made up, in normal form.
            path: Says which axis, and which part of it: positions with other paths cannot be exchanged.
            start: Where the term begins within the axis or block, which tells its unmoved positions apart.
        """
        if isinstance(term, Atom):
            name = self.spec.names.get(term)
            vertices = self._still(start + term.size)[start:] if name is None else self._units(name)
            return vertices, np.full(term.size, self._number(path))
        if isinstance(term, Concat):
            found = []
            for number, part in enumerate(term.parts):
                found.append(self._positions(part, (path, number), start))
                start += part.size
            return _joined(found)
        assert isinstance(term, Tree)
        outer, _ = self._positions(term.outer, (path, "outer"), start)
        inners = [self._positions(inner, (path, "inner")) for inner in term.inners]
        if len(inners) > 1 and all(inner in self.spec.names for inner in term.inners):
            return _joined(inners)  # these units are tied to their blocks
        inners = inners * len(outer) if len(inners) == 1 else inners
        blocks = [self._pairs(path, (outer[k : k + 1], outer[:1] * 0), inside) for k, inside in enumerate(inners)]
        return _joined(blocks)

    def _pairs(self, path: Hashable, first: _Positions, second: _Positions) -> _Positions:
        """Return a vertex for each pair of positions, the same whenever the same pair is met on a path."""
        found = []
        for i, first_role in zip(*map(np.ndarray.tolist, first), strict=True):
            for j, second_role in zip(*map(np.ndarray.tolist, second), strict=True):
                key = (path, i, first_role, j, second_role)
                if key not in self._known:
                    (vertex,) = self._add(np.array([self._number(("pair", path))])).tolist()
                    labels = [self._number(("first", first_role)), self._number(("second", second_role))]
                    self._join(np.full(2, vertex), np.array([i, j]), np.array(labels))
                    self._known[key] = vertex
                found.append(self._known[key])
        return np.array(found, np.int64), np.full(len(found), self._number(path))


def _joined(parts: Sequence[_Positions]) -> _Positions:
    return np.concatenate([vertices for vertices, _ in parts]), np.concatenate([roles for _, roles in parts])


def _classes(tensor: Constants, free: list[int]) -> Ints:
    """Number the entries along the free axes: the same number where all that stands along the other axes agrees."""
    fixed, values = tensor.fixed.cpu().numpy(), tensor.values.cpu().double().numpy()
    _, numbers = np.unique(values, return_inverse=True)
    classes = np.where(fixed, numbers.reshape(values.shape) + 1, 0)
    rest = [axis for axis in range(classes.ndim) if axis not in free]
    classes = classes.transpose([*free, *rest])
    shape = classes.shape[: len(free)]
    return _unique_rows(classes.reshape(int(np.prod(shape)), -1))[1].reshape(shape)


def _unique_rows(rows: Ints) -> tuple[int, Ints]:
    """Number the rows of a matrix, equal ones alike; return how many there are, and the numbers."""
    flat = np.ascontiguousarray(rows, np.int64)
    if flat.shape[1] > 1:
        flat = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1])))
    values, numbers = np.unique(flat.reshape(-1), return_inverse=True)
    return len(values), numbers.reshape(-1).astype(np.int64)
