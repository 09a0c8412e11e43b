r"""Graphs with labelled edges, and the stable colouring of their vertices.

Vertices of one colour are told apart by the multiset of (label, colour of the other end) of their edges, until nothing
is told apart any more (one-dimensional Weisfeiler-Leman refinement). Every automorphism keeps the stable colours, so a
vertex whose colour is its own is fixed by all of them.

Multisets are compared by 64-bit hashes. Equal multisets have equal hashes: no symmetry is ever lost. Two different ones
among n vertices collide with probability about :math:`n^2 / 2^{64}`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class LabelledGraph:
    """A directed graph without loops; several edges may join the same two vertices.

    Attributes:
        colours: Colour of each vertex.
        source: Vertex where each edge begins.
        target: Vertex where it ends.
        label: Its label.
    """

    colours: Ints
    source: Ints
    target: Ints
    label: Ints


def refine(graph: LabelledGraph) -> Ints:
    """Return the stable colouring, with colours 0, 1, ..."""
    _, colours = np.unique(graph.colours, return_inverse=True)
    colours = colours.reshape(-1).astype(np.int64)
    source, target, label = graph.source, graph.target, graph.label
    count = colours.max(initial=-1) + 1
    while True:
        single = np.bincount(colours, minlength=count) == 1
        open_ = ~(single[colours[source]] & single[colours[target]])
        source, target, label = source[open_], target[open_], label[open_]
        seen = _sums(source, _hash(label, colours[target], 1), len(colours))
        seen += _sums(target, _hash(label, colours[source], 2), len(colours))
        pairs = np.stack([colours.astype(np.uint64), seen], 1)
        _, colours = np.unique(pairs, axis=0, return_inverse=True)
        colours = colours.reshape(-1)
        previous, count = count, colours.max(initial=-1) + 1
        if count == previous:
            return colours


def _hash(label: Ints, colour: Ints, direction: int) -> _Hashes:
    """Mix numbers to 64 bits (the finaliser of splitmix64, after each)."""
    with np.errstate(over="ignore"):
        mixed = np.full(len(label), direction, dtype=np.uint64)
        for part in (label, colour):
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + part.astype(np.uint64)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def _sums(place: Ints, values: _Hashes, size: int) -> _Hashes:
    """Add values at places, modulo 2^64."""
    totals = np.zeros(size, dtype=np.uint64)
    if len(place):
        order = np.argsort(place, kind="stable")
        ordered = place[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        totals[ordered[starts]] = np.add.reduceat(values[order], starts)
    return totals
