"""Axes that depend on each other, and rules of kernels that do not run here."""

from __future__ import annotations

import pytest
import torch

from lightning_symmetry.permutation.axes import Axis, array_of, cat, meet, new_axes
from lightning_symmetry.permutation.layout import normal
from lightning_symmetry.permutation.reshape import reshape
from lightning_symmetry.permutation.rules import RULES
from lightning_symmetry.permutation.rules_products import scaled_dot_product
from lightning_symmetry.permutation.terms import all_same, concat, fresh, is_frozen


def depending(size, *parents):
    """Return an axis of which nothing is known, for each position of its parents."""
    shape = [parent.size for parent in parents]
    count = torch.Size(shape).numel()
    return Axis(array_of([fresh(size) for _ in range(count)], shape), parents)


def order(axes):
    """Return the axes with parents first; fails where an axis depends on itself, or on one of another tensor."""
    done = []
    while len(done) < len(axes):
        ready = [axis for axis in axes if axis not in done and all(parent in done for parent in axis.parents)]
        assert ready, "the axes are not closed or depend on each other in a circle"
        done += ready
    return done


def test_merged_axes_do_not_depend_on_themselves_by_way_of_others():
    a = depending(2)
    q = depending(3, a)
    b = depending(2, q)
    made = reshape([q, a, b], [3, 4])
    assert [axis.size for axis in order(made)] in ([3, 4], [4, 3])

    a, d = depending(2), depending(2)
    b, c = depending(2, d), depending(2, a)
    made = reshape([a, b, c, d], [4, 4])  # (a, b) needs d, and (c, d) needs a
    assert len(order(made)) == 2


def test_merged_axes_keep_what_others_allow():
    batch, head = depending(5), depending(3)
    entry = depending(2, head)
    (first, second) = reshape([batch, head, entry], [5, 6])
    assert not first.parents
    assert not second.parents
    again = reshape([first, second], [5, 3, 2])
    assert again[2].parents == (again[1],)
    assert not all_same(list(again[2].table))


def test_axes_that_depend_on_each_other_in_two_operands_meet_without_a_circle():
    a = depending(2)
    b = depending(3, a)
    d = depending(3)
    c = depending(2, d)
    made = meet([([a, b], "xy"), ([c, d], "xy")], "xy")
    order(made)
    assert all_same(list(b.table)) or all_same(list(c.table))


def test_an_axis_that_meets_itself_is_two_axes():
    a, k = depending(3), depending(4)
    first, second = meet([([a, k], "ik"), ([a, k], "jk")], "ij")
    assert first is not second
    assert first.table[()] is second.table[()]


def test_parts_of_a_concatenation_are_told_apart():
    shared = depending(5)
    one, other = ([shared, depending(2), depending(3)] for _ in range(2))
    made = cat([one, other], 1)
    order(made)
    assert made[0].table[()] is shared.table[()]
    assert made[1].size == 4
    assert made[2].parents == (made[1],)
    assert list(made[2].table) == [*2 * [one[2].table[()]], *2 * [other[2].table[()]]]


@pytest.mark.parametrize(("name", "gates"), [("_thnn_fused_lstm_cell", 4), ("_thnn_fused_gru_cell", 3)])
def test_fused_cells_have_the_units_of_the_state_in_each_gate(name, gates):
    ours, theirs, state = torch.zeros(2, gates * 5), torch.zeros(2, gates * 5), torch.zeros(2, 5)
    bias = torch.zeros(gates * 5)
    axes = {id(tensor): new_axes(tensor.shape) for tensor in (ours, theirs, state, bias)}
    new, workspace = RULES[name](lambda t: axes[id(t)], [state, torch.zeros(2, 25)], ours, theirs, state, bias, None)
    units = normal(new[1].table[()])
    assert not is_frozen(units)
    for tensor in (ours, theirs, bias):
        assert all_same([axes[id(tensor)][-1].table[()], concat([units] * gates)])
    assert all_same([axes[id(state)][1].table[()], units])
    assert all(is_frozen(axis.table[()]) for axis in workspace)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_of_other_devices(causal):
    """Their arguments stand in another order: a flag that is set is not always that of causal attention."""
    q, k, v, bias = (torch.zeros(*shape) for shape in ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7), (1, 3, 5, 6)))
    axes = {id(tensor): new_axes(tensor.shape) for tensor in (q, k, v, bias)}
    arguments = {"attn_bias": bias, "compute_log_sumexp": True, "dropout_p": 0.0, "is_causal": causal, "scale": 0.5}
    outputs = [torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 5), torch.zeros(()), torch.zeros(())]
    made = scaled_dot_product(lambda t: axes[id(t)], outputs, query=q, key=k, value=v, **arguments)
    assert [[axis.size for axis in own] for own in made] == [list(output.shape) for output in outputs]
    assert [is_frozen(axis.table[()]) for axis in made[0]] == [False, False, causal, False]
    assert [is_frozen(axis.table[()]) for axis in axes[id(bias)]] == [True, False, causal, causal]
    assert all_same([axes[id(q)][3].table[()], axes[id(k)][3].table[()]])
    assert all_same([axes[id(v)][3].table[()], made[0][3].table[()]])
