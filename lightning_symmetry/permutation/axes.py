"""The axes of a tensor while a network is traced, and what operations do to them.

The terms of an axis may depend on the position along another axis of the same tensor: the entries within a head may be
permuted differently in each head. Such an axis has the other as its parent and a table of terms, one a position.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from lightning_symmetry.permutation.terms import (
    UNIT,
    Term,
    all_same,
    concat,
    factor,
    freeze,
    fresh,
    is_frozen,
    split,
    tree,
    unify,
)

Letter = Hashable | None


class Axis:
    """One axis: a table of terms over the positions of its parents, which are axes of the same tensor."""

    __slots__ = ("parents", "table")

    def __init__(self, table: Any, parents: Sequence[Axis] = ()) -> None:
        if not isinstance(table, np.ndarray):
            table = _array([table], ())
        self.table: np.ndarray = table
        self.parents = tuple(parents)

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.table.flat[0].size

    @property
    def terms(self) -> list[Term]:
        """All terms of the table, each once."""
        return list({id(term): term for term in self.table.flat}.values())

    def without(self, parents: Iterable[Axis]) -> Axis:
        """Return the axis without some parents: what differed along them is permuted alike from now on."""
        table, kept = self.table, list(self.parents)
        for parent in parents:
            if parent in kept:
                place = kept.index(parent)
                for line in np.moveaxis(table, place, -1).reshape(-1, table.shape[place]):
                    for other in line[1:]:
                        unify(line[0], other)
                table = table.take(0, place)
                table = table if isinstance(table, np.ndarray) else _array([table], ())
                kept.pop(place)
        return Axis(table, kept)

    def settled(self) -> Axis:
        """Return the axis without the parents along which nothing differs."""
        idle = [
            parent
            for place, parent in enumerate(self.parents)
            if all(
                all_same(list(line)) for line in np.moveaxis(self.table, place, -1).reshape(-1, self.table.shape[place])
            )
        ]
        return self.without(idle) if idle else self


def _array(terms: Sequence[Term], shape: Sequence[int]) -> np.ndarray:
    array = np.empty(len(terms), dtype=object)
    array[:] = terms
    return array.reshape(tuple(shape))


def new_axes(shape: Iterable[int], frozen: str | None = None) -> list[Axis]:
    """Return axes with nothing known of them, or frozen ones."""
    return [Axis(fresh(size, frozen)) for size in shape]


def freeze_axes(axes: Iterable[Axis], reason: str) -> bool:
    """Freeze axes and return whether any was free."""
    was_free = False
    for axis in axes:
        for term in axis.terms:
            if not is_frozen(term):
                was_free = True
                freeze(term, reason)
    return was_free


def restrict(axes: Sequence[Axis]) -> list[Axis]:
    """Make a list of axes closed: a parent that is not among them no longer tells anything apart."""
    known = set(axes)
    if all(parent in known for axis in axes for parent in axis.parents):
        return list(axes)
    return _rebuild(axes, lambda axis: axis.without([p for p in axis.parents if p not in known]), {})


def _rebuild(axes: Sequence[Axis], change: Any, done: dict[Axis, Axis]) -> list[Axis]:
    """Change each axis and give its dependents the new one as their parent."""

    def new(axis: Axis) -> Axis:
        if axis not in done:
            changed = change(axis)
            parents = [new(parent) for parent in changed.parents]
            same = all(p is q for p, q in zip(parents, changed.parents, strict=True))
            done[axis] = changed if same else Axis(changed.table, parents)
        return done[axis]

    return [new(axis) for axis in axes]


def meet(operands: Sequence[tuple[Sequence[Axis], Sequence[Letter]]], out: Sequence[Letter]) -> list[Axis]:
    """Return the axes of the result of an Einstein sum, an elementwise function or a reduction.

    Axes with the same letter move together from now on. Letters that are not in ``out`` are summed, or otherwise
    reduced in a way that does not depend on the order.

    Args:
        operands: For each operand its axes and their letters; None, and axes of one entry, meet nothing.
        out: Letters of the result; None gives an axis of one entry.
    """
    found: dict[Letter, list[tuple[Axis, dict[Axis, Letter]]]] = {}
    for axes, letters in operands:
        names = dict(zip(axes, letters, strict=True))
        for axis, letter in names.items():
            if letter is not None and axis.size != 1:
                found.setdefault(letter, []).append((axis, names))
    resolved: dict[Letter, Axis] = {}
    open_letters: set[Letter] = set()

    def resolve(letter: Letter) -> Axis:
        if letter in resolved:
            return resolved[letter]
        open_letters.add(letter)
        places = []
        for axis, names in found.get(letter, ()):
            lost = [p for p in axis.parents if names.get(p) is None or names[p] in open_letters]
            reduced = axis.without(lost) if lost else axis
            places.append((reduced, [names[parent] for parent in reduced.parents]))
        joined = _joined(places, {p: resolve(p) for _, parents in places for p in parents})
        if any(joined is other for other in resolved.values()):  # a tensor met itself: each axis is its own
            joined = Axis(joined.table, joined.parents)
        resolved[letter] = joined
        open_letters.discard(letter)
        return joined

    for letter in found:
        resolve(letter)
    return restrict([resolved.get(letter) or Axis(UNIT) for letter in out])


def _joined(places: list[tuple[Axis, list[Letter]]], parents: dict[Letter, Axis]) -> Axis:
    """Unify the axes of one letter and return the result."""
    first, names = places[0]
    if len(places) == 1 or not parents:
        for other, _ in places[1:]:
            unify(first.table[()], other.table[()])
        if all(parents[name] is parent for name, parent in zip(names, first.parents, strict=True)):
            return first
        return Axis(first.table, [parents[name] for name in names])
    order = list(parents)
    shape = [parents[name].size for name in order]
    tables = [_broadcast(axis.table, names, order, shape) for axis, names in places]
    for entries in zip(*(table.flat for table in tables), strict=True):
        for entry in entries[1:]:
            unify(entries[0], entry)
    return Axis(tables[0], [parents[name] for name in order]).settled()


def _broadcast(table: np.ndarray, names: list[Any], order: list[Any], shape: list[int]) -> np.ndarray:
    """Arrange the axes of a table in a given order and repeat it along those that it lacks."""
    present = [name for name in order if name in names]
    table = table.transpose([names.index(name) for name in present])
    table = table.reshape([size if name in names else 1 for name, size in zip(order, shape, strict=True)])
    return np.broadcast_to(table, shape)


def tie(axes: Sequence[Axis], dims: Iterable[int]) -> list[Axis]:
    """Return the axes after a function that mixes the positions of ``dims``: other axes cannot depend on these."""
    mixed = {axes[dim] for dim in dims}
    return _rebuild(
        axes, lambda axis: axis if axis in mixed else axis.without([p for p in axis.parents if p in mixed]), {}
    )


def take(axes: Sequence[Axis], dim: int, start: int, length: int) -> list[Axis]:
    """Return the axes of a slice of consecutive positions; positions outside of it are no longer mixed with them."""
    old = axes[dim]
    if length == old.size:
        return list(axes)
    if length == 0:
        return _with(axes, dim, Axis(fresh(0, "it is empty")), None)
    sizes = [start, length, old.size - start - length]
    kept = [size > 0 for size in sizes]
    place = sum(kept[:1])
    cut = {id(term): split(term, [size for size in sizes if size > 0])[place] for term in old.terms}
    new = Axis(_array([cut[id(term)] for term in old.table.flat], old.table.shape), old.parents)
    return _with(axes, dim, new, slice(start, start + length))


def stride(axes: Sequence[Axis], dim: int, index: slice) -> list[Axis]:
    """Return the axes of a slice with a step; the axis is frozen."""
    old = axes[dim]
    freeze_axes([old], "it is sliced with a step")
    size = len(range(*index.indices(old.size)))
    return _with(axes, dim, Axis(fresh(size, "it is sliced with a step")), index)


def select(axes: Sequence[Axis], dim: int, index: int) -> list[Axis]:
    """Return the axes without one of them, of which one position is taken."""
    axes = take(axes, dim, index, 1)
    return restrict([axis for place, axis in enumerate(axes) if place != dim])


def _with(axes: Sequence[Axis], dim: int, new: Axis, index: slice | None) -> list[Axis]:
    """Put a new axis in the place of an old one; of what depends on it keep the entries at ``index``."""
    old = axes[dim]

    def change(axis: Axis) -> Axis:
        if old not in axis.parents:
            return axis
        if index is None:
            return axis.without([old])
        place = axis.parents.index(old)
        table = axis.table[(slice(None),) * place + (index,)]
        if new.size == 1:
            return Axis(table, axis.parents).without([old])
        parents = tuple(new if parent is old else parent for parent in axis.parents)
        return Axis(table, parents)

    return _rebuild(axes, change, {old: new, new: new})


def replace_axis(axes: Sequence[Axis], dim: int, new: Axis) -> list[Axis]:
    """Put a new axis, on which nothing depends, in the place of an old one."""
    return _with(axes, dim, new, None)


def cat(operands: Sequence[Sequence[Axis]], dim: int) -> list[Axis]:
    """Return the axes of a concatenation along ``dim``."""
    operands = [tie(axes, [dim]) for axes in operands]
    letters = [[("cat", k) if place == dim else place for place in range(len(a))] for k, a in enumerate(operands)]
    others = [place for place in range(len(operands[0])) if place != dim]
    joined = meet(list(zip(operands, letters, strict=True)), [*others, *(("cat", k) for k in range(len(operands)))])
    rest, parts = joined[: len(others)], joined[len(others) :]
    sizes = [axes[dim].size for axes in operands]
    parts = [part if part.size == size else Axis(fresh(size)) for part, size in zip(parts, sizes, strict=True)]
    parents = list(dict.fromkeys(parent for part in parts for parent in part.parents))
    shape = [parent.size for parent in parents]
    tables = [_broadcast(part.table, list(part.parents), parents, shape) for part in parts]
    entries = [concat(row) for row in zip(*(table.flat for table in tables), strict=True)]
    rest.insert(dim, Axis(_array(entries, shape), parents))
    return rest


def reshape(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """Return the axes after a reshape."""
    if 0 in shape:
        return new_axes(shape, "it is empty")
    blocks = _aligned([axis for axis in axes if axis.size != 1], [size for size in shape if size != 1])
    moved: dict[Axis, tuple[list[Axis], list[Axis]]] = {}  # old axis -> old and new axes of its block
    results: list[Axis] = []
    for olds, sizes in blocks:
        news = olds if len(olds) == len(sizes) == 1 else _unfold_block(_self_contained(olds), sizes)
        results += news
        if news is not olds:
            moved.update(dict.fromkeys(olds, (olds, news)))
    if moved:
        results = _rebuild(results, lambda axis: _moved(axis, moved), {})
        results = _rebuild(results, Axis.settled, {})
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


def _self_contained(olds: list[Axis]) -> list[Axis]:
    """Drop the dependence on axes of the block that come later: a tree has no room for it."""
    later = {axis: set(olds[place + 1 :]) for place, axis in enumerate(olds)}
    return _rebuild(olds, lambda axis: axis.without([p for p in axis.parents if p in later[axis]]), {})


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
        entries = [term for tables in made for term in _broadcast(*tables[place], needed, inner).flat]
        news.append(Axis(_array(entries, [*shape, *inner]), [*outside, *(news[parent] for parent in needed)]))
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
        return [(_array([term], ()), [])]
    outer, inners = factor(term, sizes[0])
    below = [_unfolded(inner, sizes[1:], place + 1) for inner in inners]
    tables: list[tuple[np.ndarray, list[int]]] = [(_array([outer], ()), [])]
    for later in range(len(sizes) - 1):
        if len(below) == 1:
            tables.append(below[0][later])
            continue
        needed = sorted({parent for tables_ in below for parent in tables_[later][1]})
        shape = [sizes[parent - place] for parent in needed]
        entries = [term for tables_ in below for term in _broadcast(*tables_[later], needed, shape).flat]
        tables.append((_array(entries, [sizes[0], *shape]), [place, *needed]))
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
                table = _broadcast(axis.table, list(axis.parents), order, [p.size for p in order])
                rest = order[len(olds) :]
                table = table.reshape([*(new.size for new in news), *(p.size for p in rest)])
                axis = Axis(table, [*news, *rest])
                changed = True
                break
    return axis
