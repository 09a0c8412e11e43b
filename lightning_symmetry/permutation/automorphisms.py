"""The automorphism group of a labelled graph: what refinement leaves undecided is handed to BLISS."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import igraph
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lightning_symmetry.permutation.refinement import Ints, LabelledGraph, refine


@dataclass
class Part:
    """A factor of the automorphism group: it moves these vertices and no other factor does.

    Attributes:
        vertices: Numbers of the vertices in the graph.
        colours: Their stable colours.
        edges: Undirected edges of a graph of colours alone, which begins with the vertices, by their places here, and
            goes on with auxiliary ones.
        auxiliary: Colours of the auxiliary vertices.
    """

    vertices: Ints
    colours: Ints
    edges: list[tuple[int, int]] = field(default_factory=list)
    auxiliary: list[int] = field(default_factory=list)

    @cached_property
    def order(self) -> int:
        """Order of the factor."""
        return self._count(self.colours)

    def order_on(self, vertices: Ints) -> int:
        """Return in how many ways it moves some vertices that it maps to each other: its order over its kernel's."""
        inside = np.isin(self.vertices, vertices)
        if inside.all() or not inside.any():
            return self.order if inside.any() else 1
        still = self.colours.copy()
        still[inside] = -1 - np.arange(inside.sum())
        return self.order // self._count(still)

    def _count(self, colours: Ints) -> int:
        if not self.edges:
            return math.prod(math.factorial(int(count)) for count in np.unique(colours, return_counts=True)[1])
        return int(self._graph().count_automorphisms(color=self._numbered(colours)))

    @cached_property
    def generators(self) -> list[Ints]:
        """Generators: for each the images of the vertices."""
        if self.edges:
            images = self._graph().automorphism_group(color=self._numbered(self.colours))
            return [self.vertices[np.array(image[: len(self.vertices)])] for image in images]
        swap = self.vertices.copy()
        swap[:2] = swap[1::-1]
        return [swap, np.roll(self.vertices, 1)][: len(self.vertices) - 1]

    def _graph(self) -> igraph.Graph:
        return igraph.Graph(len(self.vertices) + len(self.auxiliary), self.edges)

    def _numbered(self, colours: Ints) -> list[int]:
        _, own = np.unique(colours, return_inverse=True)
        return [*own.reshape(-1).tolist(), *(len(own) + colour for colour in self.auxiliary)]


@dataclass(frozen=True)
class AutomorphismGroup:
    """The automorphisms of a labelled graph, a direct product.

    Attributes:
        size: Number of vertices.
        parts: Its nontrivial factors.
    """

    size: int
    parts: list[Part]

    @property
    def order(self) -> int:
        """Number of automorphisms."""
        return math.prod(part.order for part in self.parts)

    def order_on(self, vertices: Ints) -> int:
        """Return in how many ways the group moves some vertices, which it maps to each other."""
        return math.prod(part.order_on(vertices) for part in self.parts)

    @property
    def generators(self) -> list[Ints]:
        """Generators: for each the images of all vertices."""
        found = []
        for part in self.parts:
            for images in part.generators:
                whole = np.arange(self.size)
                whole[part.vertices] = images
                found.append(whole)
        return found

    def orbits(self) -> Ints:
        """Return the number of each vertex's orbit."""
        generators = self.generators
        ends = np.concatenate([np.zeros(0, np.int64), *generators])
        starts = np.tile(np.arange(self.size), len(generators))
        joined = coo_array((np.ones(len(ends)), (starts, ends)), shape=(self.size, self.size))
        return connected_components(joined, directed=False)[1].astype(np.int64)


def automorphisms(graph: LabelledGraph) -> AutomorphismGroup:
    """Return the automorphism group of a graph.

    The vertices are coloured stably first. Those whose colour is their own are fixed and drop out, with their edges.
    Between two colours all edges of the most frequent kind are left away (at random entries, the sparser of mask and
    complement); colours that no edge joins any more are independent of each other. BLISS decides what is left.

    Source: Junttila and Kaski, Engineering an efficient canonical labeling tool for large and sparse graphs (2007).
    """
    colours = refine(graph)
    cells = np.bincount(colours)
    source, target, label = graph.source, graph.target, 2 * graph.label
    kept = (cells[colours[source]] > 1) & (cells[colours[target]] > 1)
    source, target, label = source[kept], target[kept], label[kept]
    turned = colours[source] > colours[target]
    source, target = np.where(turned, target, source), np.where(turned, source, target)
    between = _sparsest(colours, source, target, label + turned)
    ends = np.array([pair for pair in between if between[pair]], np.int64).reshape(-1, 2)
    joined = coo_array((np.ones(len(ends)), ends.T), shape=(len(cells), len(cells)))
    component = connected_components(joined, directed=False)[1]
    members = np.flatnonzero(cells[colours] > 1)
    order = np.argsort(component[colours[members]], kind="stable")
    members = members[order]
    starts = np.flatnonzero(np.diff(component[colours[members]])) + 1
    parts = [Part(vertices, colours[vertices]) for vertices in np.split(members, starts) if len(vertices)]
    by_component = {int(component[part.colours[0]]): part for part in parts}
    for (first, second), relations in between.items():
        if relations:
            _add_edges(by_component[int(component[first])], first == second, relations)
    return AutomorphismGroup(len(colours), [part for part in parts if not part.edges or part.order > 1])


_Relations = dict[int, tuple[Ints, Ints]]


def _sparsest(colours: Ints, source: Ints, target: Ints, label: Ints) -> dict[tuple[int, int], _Relations]:
    """Return the edges between each two colours by kind, without the most frequent kind.

    All labels on a pair of vertices are taken together as one kind, and so is that there is none.
    """
    found: dict[tuple[int, int], _Relations] = {}
    order = np.lexsort((label, target, source, colours[target], colours[source]))
    source, target, label = source[order], target[order], label[order]
    new = np.r_[True, (source[1:] != source[:-1]) | (target[1:] != target[:-1])] if len(source) else np.zeros(0, bool)
    firsts = np.flatnonzero(new)
    numbers: dict[tuple[int, ...], int] = {}
    kinds = np.array(
        [numbers.setdefault(tuple(labels), len(numbers) + 1) for labels in _split(label, firsts)], np.int64
    )
    source, target = source[firsts], target[firsts]
    blocks = np.stack([colours[source], colours[target]], 1)
    changed = np.flatnonzero((blocks[1:] != blocks[:-1]).any(1)) + 1 if len(blocks) else np.zeros(0, np.int64)
    for rows, columns, kind in zip(*(np.split(a, changed) for a in (source, target, kinds)), strict=True):
        if len(rows):
            pair = int(colours[rows[0]]), int(colours[columns[0]])
            found[pair] = _without_background(colours, pair, rows, columns, kind)
    return found


def _split(label: Ints, firsts: Ints) -> Iterable[list[int]]:
    values = label.tolist()
    bounds = [*firsts.tolist(), len(values)]
    return (values[start:end] for start, end in pairwise(bounds))


def _without_background(colours: Ints, pair: tuple[int, int], rows: Ints, columns: Ints, kind: Ints) -> _Relations:
    first, second = (np.flatnonzero(colours == colour) for colour in pair)
    matrix = np.zeros((len(first), len(second)), np.int64)
    matrix[np.searchsorted(first, rows), np.searchsorted(second, columns)] = kind
    if pair[0] == pair[1]:
        np.fill_diagonal(matrix, -1)
    values, counts = np.unique(matrix[matrix >= 0], return_counts=True)
    background = values[counts.argmax()]
    left = {}
    for value in values[values != background].tolist():
        i, j = np.nonzero(matrix == value)
        left[value] = first[i], second[j]
    return left


def _add_edges(part: Part, within: bool, relations: _Relations) -> None:
    """Write edges of several kinds, and directed ones within a colour, as plain ones through auxiliary vertices."""
    place = {int(vertex): number for number, vertex in enumerate(part.vertices)}
    base = max(part.auxiliary, default=-1) + 1
    for number, (rows, columns) in enumerate(relations.values()):
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
            if len(relations) == 1 and not within:
                part.edges.append((place[i], place[j]))
                continue
            chain: Sequence[int] = (base + 2 * number, base + 2 * number + 1) if within else (base + 2 * number,)
            start = len(place) + len(part.auxiliary)
            stops = [place[i], *range(start, start + len(chain)), place[j]]
            part.auxiliary.extend(chain)
            part.edges.extend(pairwise(stops))
