"""What a reshape does to the axes of a tensor: the axes of a block merge into one, and this is split again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_symmetry.permutation.axes import Axis, array_of, broadcast, new_axes, rebuild
from lightning_symmetry.permutation.terms import UNIT, Term, factor, tree


def reshape(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """Return the axes after a reshape."""
    if 0 in shape:
        return new_axes(shape, "it is empty")
    blocks = _acyclic(_aligned([axis for axis in axes if axis.size != 1], [size for size in shape if size != 1]))
    moved: dict[Axis, tuple[list[Axis], list[Axis]]] = {}  # old axis -> old and new axes of its block
    results: list[Axis] = []
    for olds, sizes in blocks:
        news = olds if len(olds) == len(sizes) == 1 else _unfold_block(_self_contained(olds), sizes)
        results += news
        if news is not olds:
            moved.update(dict.fromkeys(olds, (olds, news)))
    if moved:
        results = rebuild(results, lambda axis: _moved(axis, moved), {})
        results = rebuild(results, Axis.settled, {})
    ordered = iter(results)
    return [Axis(UNIT) if size == 1 else next(ordered) for size in shape]


def _aligned(axes: list[Axis], shape: list[int]) -> list[tuple[list[Axis], list[int]]]:
    """Group axes and new sizes into the smallest blocks that hold the same entries."""
    blocks = []
    axes, shape = axes[::-1], shape[::-1]
    while axes:
        olds, sizes = [axes.pop()], [shape.pop()]
        old, new = olds[0].size, sizes[0]
        while old != new:
            if old < new:
                olds.append(axes.pop())
                old *= olds[-1].size
            else:
                sizes.append(shape.pop())
                new *= sizes[-1]
        blocks.append((olds, sizes))
    return blocks


def _acyclic(blocks: list[tuple[list[Axis], list[int]]]) -> list[tuple[list[Axis], list[int]]]:
    """Drop dependences such that no block, as a whole, depends on itself by way of another."""
    block_of = {axis: number for number, (olds, _) in enumerate(blocks) for axis in olds}
    needs: list[set[int]] = [set() for _ in blocks]  # the blocks on which each depends, also indirectly
    lost: dict[Axis, list[Axis]] = {}
    for axis, own in block_of.items():
        for parent in axis.parents:
            other = block_of[parent]
            if other == own:
                continue
            if own in needs[other]:
                lost.setdefault(axis, []).append(parent)
                continue
            for number, known in enumerate(needs):
                if number == own or own in known:
                    known |= {other, *needs[other]}
    if not lost:
        return blocks
    axes = rebuild(list(block_of), lambda axis: axis.without(lost.get(axis, ())), {})
    new = dict(zip(block_of, axes, strict=True))
    return [([new[axis] for axis in olds], sizes) for olds, sizes in blocks]


def _self_contained(olds: list[Axis]) -> list[Axis]:
    """Drop the dependence on axes of the block that come later: a tree has no room for it."""
    later = {axis: set(olds[place + 1 :]) for place, axis in enumerate(olds)}
    return rebuild(olds, lambda axis: axis.without([p for p in axis.parents if p in later.get(axis, ())]), {})


def _unfold_block(olds: list[Axis], sizes: list[int]) -> list[Axis]:
    """Merge the axes of a block into one and split this into the new ones; other parents stay the old ones."""
    outside = list(dict.fromkeys(p for axis in olds for p in axis.parents if p not in olds))
    shape = [parent.size for parent in outside]
    made = []
    for index in np.ndindex(*shape):
        term = _merged(olds, dict(zip(outside, index, strict=True)))
        made.append(_unfolded(term, sizes))
    news: list[Axis] = []
    for place in range(len(sizes)):
        needed = sorted({parent for tables in made for parent in tables[place][1]})
        inner = [sizes[parent] for parent in needed]
        entries = [term for tables in made for term in broadcast(*tables[place], needed, inner).flat]
        news.append(Axis(array_of(entries, [*shape, *inner]), [*outside, *(news[parent] for parent in needed)]))
    return news


def _merged(olds: list[Axis], at: dict[Axis, int], place: int = 0) -> Term:
    axis = olds[place]
    term = axis.table[tuple(at[parent] for parent in axis.parents)]
    if place == len(olds) - 1:
        return term
    if any(axis in later.parents for later in olds[place + 1 :]):
        inners = [_merged(olds, {**at, axis: position}, place + 1) for position in range(axis.size)]
    else:
        inners = [_merged(olds, at, place + 1)]
    return tree(term, inners)


def _unfolded(term: Term, sizes: Sequence[int], place: int = 0) -> list[tuple[np.ndarray, list[int]]]:
    """Split a term into factors: for each the table of terms and the factors before it on which it depends."""
    if len(sizes) == 1:
        return [(array_of([term], ()), [])]
    outer, inners = factor(term, sizes[0])
    below = [_unfolded(inner, sizes[1:], place + 1) for inner in inners]
    tables: list[tuple[np.ndarray, list[int]]] = [(array_of([outer], ()), [])]
    for later in range(len(sizes) - 1):
        if len(below) == 1:
            tables.append(below[0][later])
            continue
        needed = sorted({parent for tables_ in below for parent in tables_[later][1]})
        shape = [sizes[parent - place] for parent in needed]
        entries = [term for tables_ in below for term in broadcast(*tables_[later], needed, shape).flat]
        tables.append((array_of(entries, [sizes[0], *shape]), [place, *needed]))
    return tables


def _moved(axis: Axis, moved: dict[Axis, tuple[list[Axis], list[Axis]]]) -> Axis:
    """Give an axis the new axes as parents in the place of the old ones."""
    changed = True
    while changed:
        changed = False
        for parent in axis.parents:
            if parent in moved:
                olds, news = moved[parent]
                order = [*olds, *(p for p in axis.parents if p not in olds)]
                table = broadcast(axis.table, list(axis.parents), order, [p.size for p in order])
                rest = order[len(olds) :]
                table = table.reshape([*(new.size for new in news), *(p.size for p in rest)])
                axis = Axis(table, [*news, *rest])
                changed = True
                break
    return axis
