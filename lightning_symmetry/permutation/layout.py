"""From the terms of a trace to groups: which permutations act on which positions of which tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_symmetry.permutation.terms import Atom, Concat, Term, Tree, atoms, find, is_frozen, tree

Layouts = dict[str, list[Term]]
"""The term of each axis of each tensor, in normal form."""


def normal(term: Term) -> Term:
    """Return a term in normal form: the outer of each tree is a single atom, free unless all blocks are alike."""
    term = find(term)
    if is_frozen(term):
        return Atom(term.size, why_frozen(term))
    if isinstance(term, Atom):
        return term
    if isinstance(term, Concat):
        return _concat([normal(part) for part in term.parts])
    return _normal_tree(normal(term.outer), [normal(inner) for inner in term.inners])


def _normal_tree(outer: Term, inners: list[Term]) -> Term:
    if len(inners) > 1 and len({_signature(inner, exact=True) for inner in inners}) == 1:
        inners = inners[:1]
    if isinstance(outer, Concat):
        parts, start = [], 0
        for part in outer.parts:
            inside = inners if len(inners) == 1 else inners[start : start + part.size]
            parts.append(_normal_tree(part, inside) if part.size > 1 else inside[0])
            start += part.size
        return _concat(parts)
    if isinstance(outer, Tree):
        width = outer.inners[0].size
        blocks = len(outer.inners) if len(inners) == 1 else outer.outer.size
        below = []
        for block in range(blocks):
            inside = inners if len(inners) == 1 else inners[block * width : (block + 1) * width]
            below.append(_normal_tree(outer.inner(block), inside))
        return _normal_tree(outer.outer, below)
    if outer.frozen is not None and len(inners) > 1:
        return _concat(inners)
    made = tree(outer, inners)
    return Atom(made.size, why_frozen(made)) if is_frozen(made) else made


def _concat(parts: Sequence[Term]) -> Term:
    """Join blocks; frozen neighbours become one."""
    flat: list[Term] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Concat) else [part]:
            if flat and is_frozen(piece) and is_frozen(flat[-1]):
                flat[-1] = Atom(flat[-1].size + piece.size, why_frozen(flat[-1]))
            else:
                flat.append(piece)
    return flat[0] if len(flat) == 1 else Concat(flat)


def why_frozen(term: Term) -> str:
    """Return why a term, or the first frozen part of it, is frozen."""
    return next((atom.frozen for atom in atoms(term) if atom.frozen is not None), "it has one entry")


def _signature(term: Term, exact: bool) -> tuple:
    """Return the structure of a term in normal form, with its atoms if ``exact``."""
    if isinstance(term, Atom):
        return ("frozen", term.size) if term.frozen is not None else (id(term) if exact else "free", term.size)
    if isinstance(term, Concat):
        return ("concat", *(_signature(part, exact) for part in term.parts))
    return ("tree", _signature(term.outer, exact), *(_signature(inner, exact) for inner in term.inners))


def free_atoms(term: Term) -> list[Atom]:
    """Return the free atoms of a term, each once, in order."""
    return list(dict.fromkeys(atom for atom in atoms(term) if atom.frozen is None and atom.size > 1))


def layouts(axes: Mapping[str, Sequence[Term]]) -> tuple[Layouts, dict[Atom, list[list[Atom]]]]:
    """Return the normal form of all axes, and for each atom of blocks the atoms inside of each block.

    Blocks are exchangeable only if all are alike within, and what acts within one acts nowhere else. Where that does
    not hold they are frozen.
    """
    while True:
        found = {name: [normal(term) for term in terms] for name, terms in axes.items()}
        blocks = _blocks(found)
        broken = [outer for outer, inside in blocks.items() if not _exchangeable(outer, inside, found)]
        if not broken:
            return found, {outer: _owned(inside) for outer, inside in blocks.items()}
        for outer in broken:
            outer.frozen = "its blocks are not alike"


def _blocks(found: Layouts) -> dict[Atom, list[list[Term]]]:
    """Return for each atom of unlike blocks the terms inside of each block, over all tensors."""
    blocks: dict[Atom, list[list[Term]]] = {}

    def visit(term: Term) -> None:
        if isinstance(term, Concat):
            for part in term.parts:
                visit(part)
        elif isinstance(term, Tree):
            if len(term.inners) > 1:
                inside = blocks.setdefault(term.outer, [[] for _ in term.inners])
                for block, inner in zip(inside, term.inners, strict=True):
                    block.append(inner)
            for inner in term.inners:
                visit(inner)

    for terms in found.values():
        for term in terms:
            visit(term)
    return blocks


def _exchangeable(outer: Atom, inside: list[list[Term]], found: Layouts) -> bool:
    if len({tuple(_signature(term, exact=False) for term in block) for block in inside}) > 1:
        return False
    slots = list(zip(*([atom for term in block for atom in _leaves(term)] for block in inside), strict=True))
    own = []
    for slot in slots:
        if len(set(slot)) == len(slot):
            own.append(slot)
        elif len(set(slot)) > 1:
            return False
    place = {atom: block for slot in own for block, atom in enumerate(slot)}
    if any(place[atom] != block for slot in own for block, atom in enumerate(slot)):
        return False
    return all(
        block == place[atom] for terms in found.values() for term in terms for atom, block in _seen(term, outer, place)
    )


def _leaves(term: Term) -> list[Atom]:
    return [atom for atom in atoms(term) if atom.frozen is None]


def _seen(term: Term, outer: Atom, wanted: Mapping[Atom, int], block: int = -1) -> Iterator[tuple[Atom, int]]:
    """Yield each occurrence of the wanted atoms with the block of ``outer`` in which it stands (-1: in none)."""
    if isinstance(term, Atom):
        if term in wanted:
            yield term, block
    elif isinstance(term, Concat):
        for part in term.parts:
            yield from _seen(part, outer, wanted, block)
    else:
        yield from _seen(term.outer, outer, wanted, block)
        for number, inner in enumerate(term.inners):
            inside = number if term.outer is outer and len(term.inners) > 1 else block
            yield from _seen(inner, outer, wanted, inside)


def _owned(inside: list[list[Term]]) -> list[list[Atom]]:
    """Return for each block the atoms that act within it alone, in the same order for all blocks."""
    slots = zip(*([atom for term in block for atom in _leaves(term)] for block in inside), strict=True)
    own = [slot for slot in dict.fromkeys(slots) if len(set(slot)) == len(slot)]
    return [list(block) for block in zip(*own, strict=True)] if own else [[] for _ in inside]


def permutation_of(term: Term, permutations: Callable[[Atom], Tensor | None]) -> Tensor | None:
    """Return the positions of an axis in their new order, ``new[i] = old[p[i]]``; None for the identity.

    Block h of a tree comes from block ``p[h]``, and within it the permutation of block h applies.
    """
    if isinstance(term, Atom):
        return permutations(term) if term.frozen is None else None
    if isinstance(term, Concat):
        parts = [permutation_of(part, permutations) for part in term.parts]
        if all(part is None for part in parts):
            return None
        start, shifted = 0, []
        for piece, part in zip(term.parts, parts, strict=True):
            shifted.append((torch.arange(piece.size) if part is None else part) + start)
            start += piece.size
        return torch.cat(shifted)
    outer = permutation_of(term.outer, permutations)
    inners = [permutation_of(inner, permutations) for inner in term.inners]
    if outer is None and all(inner is None for inner in inners):
        return None
    width = term.inners[0].size
    outer = torch.arange(term.outer.size) if outer is None else outer
    rows = torch.stack([torch.arange(width) if inner is None else inner for inner in inners])
    return (outer[:, None] * width + rows).flatten()


def positions_of(term: Term, atom: Atom, start: int = 0) -> list[Tensor]:
    """Return the positions that an atom moves along an axis: arrays of shape ``(atom.size, k)``."""
    if isinstance(term, Atom):
        return [torch.arange(start, start + term.size).unsqueeze(1)] if term is atom else []
    found: list[Tensor] = []
    if isinstance(term, Concat):
        for part in term.parts:
            found += positions_of(part, atom, start)
            start += part.size
        return found
    width = term.inners[0].size
    if term.outer is atom:
        found.append(torch.arange(start, start + term.size).view(term.outer.size, width))
    if len(term.inners) > 1:
        for block, inner in enumerate(term.inners):
            found += positions_of(inner, atom, start + block * width)
    elif inside := positions_of(term.inners[0], atom):
        blocks = start + width * torch.arange(term.outer.size)
        found += [(within[:, :, None] + blocks).flatten(1) for within in inside]
    return found


def name_of(term: Term, atom: Atom, start: int = 0) -> str | None:
    """Return where an atom first stands along an axis, as a slice; an empty string for the whole axis."""
    if isinstance(term, Atom):
        return (f"{start}:{start + term.size}") if term is atom else None
    if isinstance(term, Concat):
        for part in term.parts:
            if (found := name_of(part, atom, start)) is not None:
                return found
            start += part.size
        return None
    width = term.inners[0].size
    if term.outer is atom:
        return f"{start}:{start + term.size}:{width}"
    for block, inner in enumerate(term.inners):
        if (found := name_of(inner, atom, start + block * width)) is not None:
            return found
    return None


def occurrences(found: Layouts) -> dict[Atom, list[tuple[str, int]]]:
    """Return for each free atom the axes on which it acts."""
    places: dict[Atom, list[tuple[str, int]]] = defaultdict(list)
    for name, terms in found.items():
        for axis, term in enumerate(terms):
            for atom in free_atoms(term):
                places[atom].append((name, axis))
    return dict(places)
