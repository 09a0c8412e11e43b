"""Automorphism groups of labelled graphs against brute force, above all where refinement decides nothing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_symmetry.permutation.automorphisms import automorphisms
from lightning_symmetry.permutation.refinement import LabelledGraph, refine

EXAMPLES = settings(max_examples=150, deadline=None)


def graph(colours, edges):
    """Edges are (source, target, label)."""
    source, target, label = np.array(list(edges), np.int64).reshape(-1, 3).T
    return LabelledGraph(np.array(colours, np.int64), source, target, label)


def brute_force(g):
    """All automorphisms: they permute vertices of equal colour, and edges as a multiset."""
    edges = sorted(zip(g.source.tolist(), g.target.tolist(), g.label.tolist(), strict=True))
    cells = [np.flatnonzero(g.colours == colour).tolist() for colour in np.unique(g.colours)]
    found = set()
    for images in itertools.product(*(itertools.permutations(cell) for cell in cells)):
        to = dict(zip(itertools.chain(*cells), itertools.chain(*images), strict=True))
        if sorted((to[u], to[v], label) for u, v, label in edges) == edges:
            found.add(tuple(to[vertex] for vertex in range(len(g.colours))))
    return found


def closure(size, generators):
    start = tuple(range(size))
    found, edge = {start}, [start]
    while edge:
        made = {tuple(int(generator[i]) for i in element) for element in edge for generator in generators} - found
        found |= made
        edge = list(made)
    return found


def assert_agrees(g):
    group, expected = automorphisms(g), brute_force(g)
    assert group.order == len(expected)
    assert closure(group.size, group.generators) == expected
    orbits = [tuple(sorted({e[vertex] for e in expected})) for vertex in range(group.size)]
    numbers = group.orbits()
    assert [tuple(np.flatnonzero(numbers == numbers[v]).tolist()) for v in range(group.size)] == orbits
    for colour in np.unique(g.colours):
        cell = np.flatnonzero(g.colours == colour)
        assert group.order_on(cell) == len({tuple(e[v] for v in cell) for e in expected})
    return group


@EXAMPLES
@given(data=st.data(), n=st.integers(2, 6))
def test_a_regular_directed_graph(data, n):
    """A circulant graph: all vertices look the same, and the labels of the shifts decide."""
    labels = data.draw(st.lists(st.integers(0, 2), min_size=n - 1, max_size=n - 1))
    edges = [(i, (i + shift) % n, label) for i in range(n) for shift, label in enumerate(labels, 1) if label]
    g = graph([0] * n, edges)
    assert len(set(refine(g))) == 1
    assert assert_agrees(g).order % n == 0


@EXAMPLES
@given(data=st.data(), n=st.integers(2, 4))
def test_several_regular_cells(data, n):
    """Three cells with circulant edges within and between, in both directions and several at once."""
    cells = 3 if n < 4 else 2
    edges = []
    for first, second in itertools.product(range(cells), repeat=2):
        for shift in range(n):
            for label in data.draw(st.sampled_from([(), (), (), (1,), (2,), (1, 2)])):
                if first != second or shift:
                    edges += [(first * n + i, second * n + (i + shift) % n, label) for i in range(n)]
    assert_agrees(graph(np.repeat(np.arange(cells), n), edges))


@EXAMPLES
@given(data=st.data())
def test_any_graph(data):
    colours = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=6))
    n = len(colours)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    edges = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.integers(1, 2)), max_size=12, unique=True))
    assert_agrees(graph(colours, [(i, j, label) for (i, j), label in edges]))


def test_graphs_that_refinement_cannot_tell_apart():
    """Two triangles, and a hexagon: both are regular of degree two, on six vertices of one colour."""
    triangles = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]
    g = graph([0] * 6, [(i, j, 1) for a, b in triangles for i, j in ((a, b), (b, a))])
    assert assert_agrees(g).order == 72
    hexagon = [(i, (i + 1) % 6) for i in range(6)]
    g = graph([0] * 6, [(i, j, 1) for a, b in hexagon for i, j in ((a, b), (b, a))])
    assert assert_agrees(g).order == 12


def test_large_symmetric_groups_are_exact():
    n = 400
    g = graph(np.repeat([0, 1], n), [(i, n + i, 1) for i in range(n)])
    group = automorphisms(g)
    assert group.order == group.order_on(np.arange(n)) == math.factorial(n)


def test_distinct_labels_leave_nothing_and_equal_ones_everything():
    n = 60
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    assert automorphisms(graph([0] * n, [(i, j, k) for k, (i, j) in enumerate(pairs)])).order == 1
    assert automorphisms(graph([0] * n, [(i, j, 1) for i, j in pairs])).order == math.factorial(n)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_no_edges(size):
    group = automorphisms(graph([0] * size, []))
    assert group.order == math.factorial(size)
    assert len(closure(size, group.generators)) == math.factorial(size)


@EXAMPLES
@given(data=st.data())
def test_refinement_is_stable_and_keeps_symmetries(data):
    """In a stable colouring, vertices of one colour have as many edges of each label to each colour."""
    n = data.draw(st.integers(2, 6))
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    edges = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.integers(1, 2)), max_size=10, unique=True))
    g = graph(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), [(i, j, k) for (i, j), k in edges])
    colours = refine(g).tolist()
    seen = {}
    for vertex in range(n):
        out = sorted((k, colours[j]) for (i, j), k in edges if i == vertex)
        into = sorted((k, colours[i]) for (i, j), k in edges if j == vertex)
        assert seen.setdefault(colours[vertex], (g.colours[vertex], out, into)) == (g.colours[vertex], out, into)
    for element in brute_force(g):
        assert [colours[element[vertex]] for vertex in range(n)] == colours
