"""How the positions of a tensor's axis may be permuted: terms, and their unification.

A term stands for an index set of fixed size. An :class:`Atom` is a set that is permuted as one, or not at all; a
:class:`Concat` is blocks one after the other, each permuted within itself; a :class:`Tree` is equal blocks that are
permuted among each other and, each by itself, within. Unification makes two axes move together: an atom becomes equal
to whatever it meets, blocks are split where the other side has a boundary. What cannot be reconciled is frozen, which
is always correct: the identity is a symmetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

_MOST_BLOCKS = 1024  # blocks that are told apart; of more all are permuted within in the same way


class Term:
    """An index set of ``size`` positions; ``still`` once it is known that none may be permuted."""

    __slots__ = ("size", "still")
    size: int
    still: bool


class Atom(Term):
    """Positions that are permuted as one.

    Attributes:
        link: What the atom turned out to be: another atom or a structure.
        frozen: Why the positions may not be permuted; None where they may.
        functions: What acts on activations along the axis: names of elementwise functions and normalisations.
    """

    __slots__ = ("frozen", "functions", "link")

    def __init__(self, size: int, frozen: str | None = None) -> None:
        self.size = size
        self.still = False
        self.frozen = frozen
        self.link: Term | None = None
        self.functions: set[str] = set()


class Concat(Term):
    """Blocks one after the other."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Term]) -> None:
        self.parts = tuple(parts)
        self.size = sum(part.size for part in parts)
        self.still = False


class Tree(Term):
    """Equal blocks: ``outer`` says how they are permuted, ``inners`` how each is within; a single one is of all."""

    __slots__ = ("inners", "outer")

    def __init__(self, outer: Term, inners: Sequence[Term]) -> None:
        self.outer = outer
        self.inners = tuple(inners)
        self.size = outer.size * self.inners[0].size
        self.still = False

    def inner(self, block: int) -> Term:
        """Return how a block is permuted within."""
        return self.inners[block if len(self.inners) > 1 else 0]


UNIT = Atom(1, "it has one entry")


def find(term: Term) -> Term:
    """Follow the links of atoms."""
    while isinstance(term, Atom) and term.link is not None:
        if isinstance(term.link, Atom) and term.link.link is not None:
            term.link = term.link.link
        term = term.link
    return term


def fresh(size: int, frozen: str | None = None) -> Term:
    """Return a new atom."""
    return UNIT if size == 1 else Atom(size, frozen)


def concat(parts: Sequence[Term]) -> Term:
    """Return blocks one after the other; empty ones are left out."""
    parts = [part for part in parts if part.size > 0]
    if len(parts) == 1:
        return parts[0]
    return Concat(parts) if parts else Atom(0, "it is empty")


def tree(outer: Term, inners: Sequence[Term]) -> Term:
    """Return equal blocks, in the simplest form."""
    if outer.size == 1:
        return inners[0]
    if inners[0].size == 1:
        return outer
    if len(inners) > 1 and all_same(inners):
        inners = inners[:1]
    return Tree(outer, inners)


def atoms(term: Term) -> Iterator[Atom]:
    """Yield the atoms of a term, some perhaps several times."""
    term = find(term)
    if isinstance(term, Atom):
        yield term
    else:
        for part in term.parts if isinstance(term, Concat) else (term.outer, *term.inners):
            yield from atoms(part)


def is_frozen(term: Term) -> bool:
    """Whether no position may be permuted."""
    term = find(term)
    term.still = term.still or all(atom.frozen is not None or atom.size <= 1 for atom in atoms(term))
    return term.still


def freeze(term: Term, reason: str) -> None:
    """Forbid to permute any position."""
    if find(term).still:
        return
    for atom in atoms(term):
        if atom.frozen is None:
            atom.frozen = reason


def key(term: Term) -> tuple:
    """Return what two terms have in common that permute alike."""
    term = find(term)
    if isinstance(term, Atom):
        return ("frozen", term.size) if term.frozen is not None or term.size <= 1 else (id(term),)
    if is_frozen(term):
        return "frozen", term.size
    if isinstance(term, Concat):
        keys = [key(part) for part in term.parts]
        return ("concat", *(flat for own in keys for flat in (own[1:] if own[0] == "concat" else [own])))
    inners = [key(inner) for inner in term.inners]
    if len(set(inners)) == 1:
        inners = inners[:1]
    return ("tree", key(term.outer), *inners)


def all_same(terms: Sequence[Term]) -> bool:
    """Whether all terms permute alike."""
    first = find(terms[0])
    if all(find(term) is first for term in terms):
        return True
    return len({key(term) for term in terms}) == 1


def unify(a: Term, b: Term) -> None:
    """Make two axes of the same size move together."""
    a, b = find(a), find(b)
    if a is b or a.size <= 1:
        return
    if isinstance(b, Atom) and not isinstance(a, Atom):
        a, b = b, a
    if isinstance(a, Atom):
        _unify_atom(a, b)
    elif is_frozen(a) or is_frozen(b):
        reason = next(atom.frozen for atom in atoms(a if is_frozen(a) else b) if atom.frozen is not None)
        freeze(a, reason)
        freeze(b, reason)
    elif isinstance(a, Tree) and isinstance(b, Tree):
        _unify_trees(a, b)
    else:
        boundaries = sorted({*_boundaries(a), *_boundaries(b)})
        sizes = [end - start for start, end in zip([0, *boundaries], boundaries, strict=False)]
        for one, other in zip(split(a, sizes), split(b, sizes), strict=True):
            unify(one, other)


def _unify_atom(a: Atom, b: Term) -> None:
    if a.frozen is not None:
        freeze(b, a.frozen)
        if isinstance(b, Atom):
            a.link = b
            b.functions |= a.functions
        return
    inside = list(atoms(b))
    if any(atom is a for atom in inside):
        freeze(b, "the axis meets a part of itself")
        return
    a.link = b
    for atom in inside:
        if atom.size > 1:
            atom.functions |= a.functions


def _boundaries(term: Term) -> list[int]:
    return list(accumulate(part.size for part in term.parts)) if isinstance(term, Concat) else [term.size]


def _unify_trees(a: Tree, b: Tree) -> None:
    if a.outer.size > b.outer.size:
        a, b = b, a
    outer, inners = factor(b, a.outer.size)
    unify(a.outer, outer)
    for block in range(max(len(a.inners), len(inners))):
        unify(a.inner(block), inners[block if len(inners) > 1 else 0])


def split(term: Term, sizes: Sequence[int]) -> list[Term]:
    """Cut an axis into blocks of these sizes, none of which is permuted with another."""
    term = find(term)
    if len(sizes) == 1 or term.size == 0:
        return [term] if len(sizes) == 1 else [fresh(size, "it is empty") for size in sizes]
    if isinstance(term, Atom):
        parts = [fresh(size, term.frozen) for size in sizes]
        if term.frozen is None:
            for part in parts:
                if part is not UNIT:
                    part.functions |= term.functions
            term.link = concat(parts)
        return parts
    if isinstance(term, Concat):
        return _regroup(list(term.parts), sizes)
    return _split_tree(term, sizes)


def _regroup(parts: list[Term], sizes: Sequence[int]) -> list[Term]:
    """Cut a row of blocks at other boundaries."""
    groups = []
    parts = parts[::-1]
    for size in sizes:
        group: list[Term] = []
        missing = size
        while missing > 0:
            part = parts.pop()
            if part.size > missing:
                part, rest = split(part, [missing, part.size - missing])
                parts.append(rest)
            group.append(part)
            missing -= part.size
        groups.append(concat(group))
    return groups


def _split_tree(term: Tree, sizes: Sequence[int]) -> list[Term]:
    """Cut between blocks where possible; a block that is cut stays in its place."""
    width = term.inners[0].size
    ends = list(accumulate(sizes))
    cuts = sorted({end // width for end in ends} | {-(-end // width) for end in ends if end % width})
    cuts = [cut for cut in cuts if cut > 0]
    counts = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    outers = split(term.outer, counts)
    parts: list[Term] = []
    start = 0
    for outer, count in zip(outers, counts, strict=True):
        inners = term.inners if len(term.inners) == 1 else term.inners[start : start + count]
        parts.append(tree(outer, inners))
        start += count
    return _regroup(parts, sizes)


def factor(term: Term, blocks: int) -> tuple[Term, list[Term]]:
    """See an axis as so many equal blocks: how they are permuted, and how each is within (one term: all alike)."""
    term = find(term)
    width = term.size // blocks
    if blocks == 1:
        return UNIT, [term]
    if width == 1:
        return term, [UNIT]
    if is_frozen(term):
        reason = next(atom.frozen for atom in atoms(term) if atom.frozen is not None)
        return Atom(blocks, reason), [Atom(width, reason)]
    if isinstance(term, Atom):
        parts = [Atom(blocks), *(Atom(width) for _ in range(blocks if blocks <= _MOST_BLOCKS else 1))]
        for part in parts:
            part.functions |= term.functions
        term.link = Tree(parts[0], parts[1:])
        return parts[0], parts[1:]
    found = _factor_concat(term, width) if isinstance(term, Concat) else _factor_tree(term, blocks)
    if found is None:
        freeze(term, "it is reshaped across its blocks")
        return factor(term, blocks)
    return found


def _factor_concat(term: Concat, width: int) -> tuple[Term, list[Term]] | None:
    if any(part.size % width for part in term.parts):
        return None
    outers, inners = [], []
    for part in term.parts:
        count = part.size // width
        outer, inside = factor(part, count)
        outers.append(outer)
        inners += inside * count if len(inside) == 1 else inside
    return concat(outers), inners[:1] if all_same(inners) else inners


def _factor_tree(term: Tree, blocks: int) -> tuple[Term, list[Term]] | None:
    count = term.outer.size
    if count == blocks:
        return term.outer, list(term.inners)
    if count % blocks == 0:
        each = count // blocks
        outer, middles = factor(term.outer, blocks)
        inners = []
        for block in range(blocks if len(middles) > 1 or len(term.inners) > 1 else 1):
            inside = term.inners if len(term.inners) == 1 else term.inners[block * each : (block + 1) * each]
            inners.append(tree(middles[block if len(middles) > 1 else 0], inside))
        return outer, inners
    if blocks % count == 0:
        each = blocks // count
        middles, inners = [], []
        for inner in term.inners:
            middle, inside = factor(inner, each)
            middles.append(middle)
            inners.append(inside)
        outer = tree(term.outer, middles)
        if len(inners) == 1:
            return outer, inners[0] if len(inners[0]) == 1 else inners[0] * count
        return outer, [inside[i if len(inside) > 1 else 0] for inside in inners for i in range(each)]
    return None
