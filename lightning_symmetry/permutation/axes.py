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
    freeze,
    fresh,
    is_frozen,
    split,
    unify,
)

Letter = Hashable | None


class Axis:
    """One axis: a table of terms over the positions of its parents, which are axes of the same tensor."""

    __slots__ = ("parents", "table")

    def __init__(self, table: Any, parents: Sequence[Axis] = ()) -> None:
        if not isinstance(table, np.ndarray):
            table = array_of([table], ())
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
        gone = [parent for parent in parents if parent in self.parents]
        if not gone:
            return self
        table, kept = self.table, list(self.parents)
        for parent in gone:
            place = kept.index(parent)
            for line in np.moveaxis(table, place, -1).reshape(-1, table.shape[place]):
                for other in line[1:]:
                    unify(line[0], other)
            table = table.take(0, place)
            table = table if isinstance(table, np.ndarray) else array_of([table], ())
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


def array_of(terms: Sequence[Term], shape: Sequence[int]) -> np.ndarray:
    """Return a table of terms."""
    array = np.empty(len(terms), dtype=object)
    array[:] = terms
    return array.reshape(tuple(shape))


def plain_term(axis: Axis) -> Term:
    """Return the term of an axis, permuted alike along all of its parents."""
    return axis.without(axis.parents).table[()]


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
    return rebuild(axes, lambda axis: axis.without([p for p in axis.parents if p not in known]), {})


def rebuild(axes: Sequence[Axis], change: Any, done: dict[Axis, Axis]) -> list[Axis]:
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
    tables = [broadcast(axis.table, names, order, shape) for axis, names in places]
    for entries in zip(*(table.flat for table in tables), strict=True):
        for entry in entries[1:]:
            unify(entries[0], entry)
    return Axis(tables[0], [parents[name] for name in order]).settled()


def broadcast(table: np.ndarray, names: list[Any], order: list[Any], shape: list[int]) -> np.ndarray:
    """Arrange the axes of a table in a given order and repeat it along those that it lacks."""
    present = [name for name in order if name in names]
    table = table.transpose([names.index(name) for name in present])
    table = table.reshape([size if name in names else 1 for name, size in zip(order, shape, strict=True)])
    return np.broadcast_to(table, shape)


def tie(axes: Sequence[Axis], dims: Iterable[int]) -> list[Axis]:
    """Return the axes after a function that mixes the positions of ``dims``: other axes cannot depend on these."""
    mixed = {axes[dim] for dim in dims}
    return rebuild(
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
    new = Axis(array_of([cut[id(term)] for term in old.table.flat], old.table.shape), old.parents)
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

    return rebuild(axes, change, {old: new, new: new})


def replace_axis(axes: Sequence[Axis], dim: int, new: Axis) -> list[Axis]:
    """Put a new axis, on which nothing depends, in the place of an old one."""
    return _with(axes, dim, new, None)


def cat(operands: Sequence[Sequence[Axis]], dim: int) -> list[Axis]:
    """Return the axes of a concatenation along ``dim``.

    An axis on which no other depends may differ from part to part: it then depends on the new axis.
    """
    loose = [place for place in range(len(operands[0])) if place != dim and _differs(operands, place, dim)]
    operands = [_tie_all(axes, dim, loose) for axes in operands]
    met = [place for place in range(len(operands[0])) if place not in loose]
    letters = [[("cat", k) if place == dim else place for place in met] for k in range(len(operands))]
    others = [place for place in met if place != dim]
    joined = meet(
        [([axes[place] for place in met], names) for axes, names in zip(operands, letters, strict=True)],
        [*others, *(("cat", k) for k in range(len(operands)))],
    )
    result = dict(zip(others, joined, strict=False))
    sizes = [axes[dim].size for axes in operands]
    parts = [
        part if part.size == size else Axis(fresh(size))
        for part, size in zip(joined[len(others) :], sizes, strict=True)
    ]
    parents = list(dict.fromkeys(parent for part in parts for parent in part.parents))
    shape = [parent.size for parent in parents]
    tables = [broadcast(part.table, list(part.parents), parents, shape) for part in parts]
    entries = [concat(row) for row in zip(*(table.flat for table in tables), strict=True)]
    result[dim] = Axis(array_of(entries, shape), parents)
    for place in loose:
        result[place] = _stacked(operands, place, dim, result)
    return [result[place] for place in range(len(result))]


def _differs(operands: Sequence[Sequence[Axis]], place: int, dim: int) -> bool:
    """Whether an axis, on which no other depends, is permuted otherwise in some parts of a concatenation."""
    own = [axes[place] for axes in operands]
    if own[0].size == 1 or any(mine in axis.parents for mine, axes in zip(own, operands, strict=True) for axis in axes):
        return False
    if any(axes[dim] in mine.parents for mine, axes in zip(own, operands, strict=True)):
        return True
    parents = [[axes.index(parent) for parent in mine.parents] for mine, axes in zip(own, operands, strict=True)]
    if any(places != parents[0] for places in parents):
        return True
    return not all(all_same(entries) for entries in zip(*(mine.table.flat for mine in own), strict=True))


def _tie_all(axes: Sequence[Axis], dim: int, loose: Sequence[int]) -> list[Axis]:
    """Drop the dependence on ``dim`` of all axes but the loose ones."""
    free = {axes[place] for place in loose}
    return rebuild(axes, lambda axis: axis if axis in free else axis.without([axes[dim]]), {})


def _stacked(operands: Sequence[Sequence[Axis]], place: int, dim: int, result: dict[int, Axis]) -> Axis:
    """Join the tables of an axis along the new axis of a concatenation."""
    used = sorted({axes.index(p) for axes in operands for p in axes[place].parents} - {dim})
    tables = []
    for axes in operands:
        order = [axes[other] for other in (*used, dim)]
        mine = axes[place] if axes[dim].size > 1 else axes[place].without([axes[dim]])
        tables.append(broadcast(mine.table, list(mine.parents), order, [axis.size for axis in order]))
    return Axis(np.concatenate(tables, axis=-1), [result[other] for other in (*used, dim)]).settled()
