"""Terms as index sets: what two axes have in common is exactly what unification leaves."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_symmetry.permutation.layout import free_atoms, layouts, normal, permutation_of, positions_of
from lightning_symmetry.permutation.terms import (
    Atom,
    Concat,
    Tree,
    atoms,
    concat,
    factor,
    find,
    freeze,
    fresh,
    is_frozen,
    split,
    tree,
    unify,
)

SETTINGS = settings(deadline=None, max_examples=60)


def orders(*terms):
    """Return all joint orders of axes: tuples of tuples, one for each choice of the free atoms' permutations."""
    found, _ = layouts({str(k): [term] for k, term in enumerate(terms)})
    axes = [found[str(k)][0] for k in range(len(terms))]
    free = list(dict.fromkeys(atom for axis in axes for atom in free_atoms(axis)))
    made = set()
    for chosen in product(*(permutations(range(atom.size)) for atom in free)):
        table = {atom: torch.tensor(order) for atom, order in zip(free, chosen, strict=True)}
        joint = []
        for axis in axes:
            order = permutation_of(axis, table.__getitem__)
            joint.append(tuple(range(axis.size)) if order is None else tuple(order.tolist()))
        made.add(tuple(joint))
    return made


def orders_of(term):
    return {joint[0] for joint in orders(term)}


def is_group(elements):
    """Whether orders contain the identity and are closed under composition."""
    first = next(iter(elements))
    identity = tuple(range(len(first)))
    return identity in elements and all(tuple(a[i] for i in b) in elements for a in elements for b in elements)


def blocks_of(size):
    """Strategy of structures over ``size`` positions, as functions that build new terms."""
    atom = st.builds(
        lambda frozen: lambda: fresh(size, "frozen" if frozen else None), st.integers(0, 5).map(lambda n: n == 0)
    )
    choices = [atom]
    if size > 1:
        cut = st.integers(1, size - 1).flatmap(lambda n: st.tuples(blocks_of(n), blocks_of(size - n)))
        choices.append(cut.map(lambda parts: lambda: concat([part() for part in parts])))
    for count in (2, 3):
        if size % count == 0 and size > count:
            inner = blocks_of(size // count)
            choices.append(
                inner.map(lambda make, count=count: lambda: tree(fresh(count), [make() for _ in range(count)]))
            )
            choices.append(inner.map(lambda make, count=count: lambda: tree(fresh(count), [make()])))
    return st.one_of(choices)


pairs = st.sampled_from([1, 2, 3, 4, 4, 6]).flatmap(lambda size: st.tuples(blocks_of(size), blocks_of(size)))


@SETTINGS
@given(pairs)
def test_unified_axes_move_together_by_orders_that_both_had(makers):
    one, other = makers
    before = orders_of(one()) & orders_of(other())
    a, b = one(), other()
    unify(a, b)
    joint = orders(a, b)
    assert all(first == second for first, second in joint)
    after = {first for first, _ in joint}
    assert after <= before
    assert is_group(after)


@SETTINGS
@given(pairs)
def test_unifying_twice_or_the_other_way_changes_nothing(makers):
    one, other = makers
    a, b = one(), other()
    unify(a, b)
    before = orders(a, b)
    unify(b, a)
    unify(a, a)
    assert orders(a, b) == before
    c, d = one(), other()
    unify(d, c)
    assert orders(c, d) == before


@SETTINGS
@given(st.sampled_from([2, 3, 4, 6]).flatmap(lambda n: st.tuples(blocks_of(n), st.integers(1, n - 1))))
def test_split_leaves_the_orders_that_do_not_cross_the_cut(maker_and_place):
    make, place = maker_and_place
    whole = make()
    size = whole.size
    apart = {order for order in orders_of(make()) if sorted(order[:place]) == list(range(place))}
    parts = split(whole, [place, size - place])
    assert [part.size for part in parts] == [place, size - place]
    after = orders(whole, *parts)
    for order, first, second in after:
        assert order == (*first, *(place + i for i in second))
    assert {order for order, _, _ in after} <= apart
    if isinstance(find(make()), Atom | Concat):
        assert {order for order, _, _ in after} == apart


@SETTINGS
@given(st.sampled_from([(4, 2), (6, 2), (6, 3)]).flatmap(lambda n: st.tuples(blocks_of(n[0]), st.just(n[1]))))
def test_factor_leaves_orders_of_whole_blocks(maker_and_count):
    make, count = maker_and_count
    whole = make()
    width = whole.size // count
    outer, inners = factor(whole, count)
    assert outer.size == count
    assert len(inners) in (1, count)
    assert all(inner.size == width for inner in inners)
    rebuilt = Tree(outer, inners)
    for order, same in orders(whole, rebuilt):
        assert order == same
        blocks = [{i // width for i in order[h * width : (h + 1) * width]} for h in range(count)]
        assert all(len(block) == 1 for block in blocks)
    assert is_group(orders_of(whole))


def test_unification_by_example():
    """Exactly the orders that both have, where the structures are simple."""
    for one, other, expected in [
        (lambda: fresh(4), lambda: fresh(4), 24),
        (lambda: fresh(4), lambda: concat([fresh(1), fresh(3)]), 6),
        (lambda: concat([fresh(2), fresh(4)]), lambda: concat([fresh(4), fresh(2)]), 8),
        (lambda: fresh(6), lambda: tree(fresh(3), [fresh(2) for _ in range(3)]), 6 * 8),
        (lambda: fresh(6), lambda: tree(fresh(3), [fresh(2)]), 6 * 2),
        (lambda: concat([fresh(2), fresh(2)]), lambda: tree(fresh(2), [fresh(2), fresh(2)]), 4),
        (lambda: fresh(4), lambda: fresh(4, "frozen"), 1),
    ]:
        a, b = one(), other()
        unify(a, b)
        assert len(orders(a, b)) == expected


def test_an_axis_that_meets_a_part_of_itself_is_frozen():
    inside = fresh(2)
    whole = concat([inside, fresh(2)])
    outer = fresh(4)
    unify(outer, whole)
    unify(split(outer, [1, 3])[1], split(whole, [3, 1])[0])  # shifted by one
    assert orders_of(whole) == {(0, 1, 2, 3)}


def test_freezing_reaches_what_is_linked():
    a, b = fresh(4), tree(fresh(2), [fresh(2), fresh(2)])
    unify(a, b)
    assert not is_frozen(a)
    freeze(b, "a reason")
    assert is_frozen(a)
    assert {atom.frozen for atom in atoms(a)} == {"a reason"}


def test_blocks_that_are_not_alike_are_not_exchanged():
    entries = [fresh(2), fresh(2, "frozen")]
    term = tree(fresh(2), entries)
    assert orders_of(term) == {(0, 1, 2, 3), (1, 0, 2, 3)}


def test_blocks_whose_entries_stand_elsewhere_are_not_exchanged():
    entries = [fresh(2), fresh(2)]
    blocks, elsewhere = tree(fresh(2), entries), entries[0]
    assert len(orders(blocks, elsewhere)) == 4  # each block within itself
    assert len(orders(tree(fresh(2), [fresh(2), fresh(2)]))) == 8


@pytest.mark.parametrize("alike", [True, False])
def test_positions_are_those_that_an_atom_moves(alike):
    inners = [fresh(2)] if alike else [fresh(2) for _ in range(3)]
    outer = fresh(3)
    term = normal(concat([fresh(1), tree(outer, inners)]))
    assert torch.cat(positions_of(term, outer), 1).tolist() == [[1, 2], [3, 4], [5, 6]]
    expected = [[[1, 3, 5], [2, 4, 6]]] if alike else [[[1], [2]], [[3], [4]], [[5], [6]]]
    assert [torch.cat(positions_of(term, inner), 1).tolist() for inner in inners] == expected


def test_nested_blocks_have_one_normal_form():
    entries = [fresh(2) for _ in range(4)]
    nested = normal(tree(fresh(2), [tree(fresh(2), entries[:2]), tree(fresh(2), entries[2:])]))
    assert isinstance(nested, Tree)
    assert nested.outer.size == 2
    assert all(isinstance(inner, Tree) for inner in nested.inners)
    joined = fresh(8)
    unify(joined, nested)
    outer, inners = factor(joined, 4)
    assert isinstance(normal(outer), Tree)
    assert [find(inner) for inner in inners] == entries
