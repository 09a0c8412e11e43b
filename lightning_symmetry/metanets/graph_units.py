"""Which unit of a network each position of a tensor's axis belongs to."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_symmetry.permutation.spec import PermutationSpec
from lightning_symmetry.permutation.terms import UNIT, Atom, Concat, Term, find

Key = Hashable
_STILL = "still"  # a position that no permutation moves, within a block that one may


@dataclass(frozen=True)
class AxisUnits:
    """The units along one axis.

    Attributes:
        keys: What names each unit: axes that move together have the same keys.
        positions: Positions of each unit, shape ``(U, S)``. S > 1 where the axis runs over units and over what does not
            move, as after an image is flattened: then each unit has S features.
        is_free: Whether any unit may be permuted.
    """

    keys: list[Key]
    positions: Tensor
    is_free: bool


def axis_units(spec: PermutationSpec, name: str, axis: int) -> list[AxisUnits]:
    """Return the units along one axis of a tensor, in sections within which each unit occurs once.

    There is one section but where units recur along an axis: the queries and keys of attention, which are permuted
    together, stand in one projection.

    Args:
        spec: The permutation symmetries of the network.
        name: Name of the tensor in its ``state_dict``.
        axis: The axis.
    """
    term = spec.layouts[name][axis]
    keys = _free_keys(term)
    is_free = any(key is not None for key in keys)
    if None in keys:
        keys = [raw if key is None else key for key, raw in zip(keys, _raw_keys(spec, name, axis), strict=True)]
    split = [_split(key) for key in keys]
    units = list(dict.fromkeys(unit for unit, _ in split))
    features = sorted({feature for _, feature in split})
    places = {pair: place for place, pair in enumerate(split)}
    if len(places) == len(units) * len(features) == len(keys):
        rows = [[places[unit, feature] for feature in features] for unit in units]
        return [AxisUnits(units, torch.tensor(rows), is_free)]
    sections: list[dict[Key, int]] = []
    for place, key in enumerate(keys):
        section = next((section for section in sections if key not in section), None)
        if section is None:
            section = {}
            sections.append(section)
        section[key] = place
    return [AxisUnits(list(s), torch.tensor(list(s.values())).unsqueeze(1), is_free) for s in sections]


def _free_keys(term: Term) -> list[Key | None]:
    """Name the units of a term in normal form; None for those that are frozen."""
    if isinstance(term, Atom):
        return [None if term.frozen is not None else (term, i) for i in range(term.size)]
    if isinstance(term, Concat):
        return [key for part in term.parts for key in _free_keys(part)]
    outer = _within(term.outer)
    inners = [_within(inner) for inner in term.inners]
    return [(block, key) for h, block in enumerate(outer) for key in (inners[h] if len(inners) > 1 else inners[0])]


def _within(term: Term) -> list[Key]:
    """Name the units within a tree, where the frozen ones have no identity beyond their place."""
    return [(_STILL, i) if key is None else key for i, key in enumerate(_free_keys(term))]


def _raw_keys(spec: PermutationSpec, name: str, axis: int) -> list[Key]:
    """Name units by what the trace tied together; it tells frozen axes apart, which the normal form does not."""
    traced = spec.trace.axes[name][axis]
    term = traced.without(traced.parents).table[()]
    if term.size == 1:  # an axis of one entry meets nothing in the trace: take weight and bias of a layer as one
        return [("one", name.rpartition(".")[0], axis)]
    return [("one", name, axis, i) if key[0] is UNIT else key for i, key in enumerate(_expand(term))]


def _expand(term: Term) -> list[tuple]:
    term = find(term)
    if isinstance(term, Atom):
        return [(term, i) for i in range(term.size)]
    if isinstance(term, Concat):
        return [key for part in term.parts for key in _expand(part)]
    return [(block, key) for h, block in enumerate(_expand(term.outer)) for key in _expand(term.inner(h))]


def _split(key: Key) -> tuple[Key, tuple[int, ...]]:
    """Split a key into what may move and the place within it that does not."""
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], tuple):
        outer, inner = key
        if outer[0] is _STILL:
            unit, feature = _split(inner)
            return unit, (outer[1], *feature)
        if inner[0] is _STILL:
            unit, feature = _split(outer)
            return unit, (*feature, inner[1])
    return key, ()


def orbit_of(spec: PermutationSpec, key: Key, constants: Collection[str] = ()) -> Key:
    """Return what a unit has in common with those whose places it can take; the unit itself if it cannot move.

    Args:
        spec: The permutation symmetries of the network.
        key: The unit.
        constants: Tensors with constants, which tell apart the units of every axis.
    """
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], tuple):
        return orbit_of(spec, key[0], constants), orbit_of(spec, key[1], constants)
    if not isinstance(key[0], Atom) or key[0].frozen is not None or key[0] not in spec.names:
        return key
    group = spec.groups[spec.names[key[0]]]
    blocks = []
    while group.block_of is not None:
        blocks.append(group.slot)
        group = spec.groups[group.block_of]
    if any(place.tensor in constants for place in group.places):  # blocks move with all that is within them
        return key
    return (group.name, *blocks)


def part_of(spec: PermutationSpec, key: Key) -> Key:
    """Return what a unit has in common with all others on its axes, over which a mean is taken."""
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], tuple):
        return part_of(spec, key[0]), part_of(spec, key[1])
    orbit = orbit_of(spec, key)
    return key[0] if orbit is key and isinstance(key[0], Atom) else orbit
