"""Weight matching undoes planted permutations; its objective is the inner product, and no single step improves it."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_networks import NETWORKS, assert_undone, draw, planted, similarity, train, trained
from torch import nn
from trace_reference import Net

from lightning_symmetry import MLP, asymmetrize, match_weights, trace_permutations
from lightning_symmetry.permutation.assignment import best_assignment, best_blocks


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_permutations_are_undone(name):
    net, _, spec = trained(name)
    state = net.state_dict()
    for seed in range(3):
        element, moved = planted(net, spec, seed)
        found = match_weights(net, moved, spec)
        assert_undone(spec, element, found.permutations)
        for key, tensor in spec.apply(moved.state_dict(), found.permutations).items():
            assert torch.equal(tensor, state[key]), key
        assert found.after == pytest.approx(similarity(state, state, spec), rel=1e-5)
        assert found.before == pytest.approx(similarity(state, moved.state_dict(), spec), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_objective_is_the_inner_product_and_does_not_fall(name):
    a, _, spec = trained(name, 0)
    b = trained(name, 1)[0].double()
    a = a.double()
    before = {key: tensor.clone() for key, tensor in [*a.state_dict().items()]}
    found = match_weights(a, b, spec, restarts=2)
    assert found.before == pytest.approx(similarity(a.state_dict(), b.state_dict(), spec), rel=1e-10)
    expected = similarity(a.state_dict(), b.state_dict(), spec, found.permutations)
    assert found.after == pytest.approx(expected, rel=1e-10)
    assert found.after > found.before
    objectives = [match_weights(a, b, spec, restarts=1, max_sweeps=sweeps).after for sweeps in range(1, 6)]
    assert objectives == sorted(objectives)
    assert all(torch.equal(before[key], tensor) for key, tensor in a.state_dict().items())


def test_squared_distance_falls_by_twice_the_gain():
    a, _, spec = trained("mlp", 0)
    b, found = trained("mlp", 1)[0], None
    found = match_weights(a, b, spec)
    ours = a.state_dict()

    def distance(permutations):
        moved = spec.apply(b.state_dict(), permutations)
        return sum(float((ours[name] - moved[name]).double().square().sum()) for name in ours)

    assert distance({}) - distance(found.permutations) == pytest.approx(2 * (found.after - found.before), rel=1e-4)


def random_pair(factory, seed):
    torch.manual_seed(seed)
    return factory().double(), factory().double()


def elements(spec):
    """All elements of a symmetry group."""
    names = list(spec.groups)
    choices = (itertools.permutations(range(spec.groups[name].size)) for name in names)
    for chosen in itertools.product(*choices):
        yield dict(zip(names, map(torch.tensor, chosen), strict=True))


def attention(net, x):
    return net.out(net.attention(x, x, x, need_weights=False)[0])


def depth(net, x):
    return net.out(F.relu(net.b(F.relu(net.a(x)))))


TINY = {  # network, example, whether the objective is exact for each group given the others
    "one layer": (lambda: MLP(3, (4,), 2), draw(2, 3)),
    "three layers": (lambda: MLP(3, (3, 3, 3), 2, norm=False), draw(2, 3)),
    "different widths": (lambda: MLP(2, (4, 2, 3), 2), draw(2, 2)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2)),
        draw(1, 1, 5, 5),
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 1, groups=2), nn.Flatten(), nn.Linear(6, 2)
        ),
        draw(2, 2, 1, 1),
    ),
    "heads": (
        lambda: Net(attention, attention=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 2)),
        draw(1, 3, 4),
    ),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("seed", range(4))
def test_ends_at_an_optimum_of_each_group_below_the_global_one(name, seed):
    factory, example = TINY[name]
    a, b = random_pair(factory, seed)
    spec = trace_permutations(a, example.double())
    ours, theirs = a.state_dict(), b.state_dict()
    everything = [similarity(ours, theirs, spec, element) for element in elements(spec)]
    assert len(everything) > 20
    rounding = 1e-9 * (1 + max(map(abs, everything)))
    found = match_weights(a, b, spec, restarts=1)
    assert found.after <= max(everything) + rounding
    for group in spec.groups.values():
        for choice in itertools.permutations(range(group.size)):
            step = spec.compose(found.permutations, {group.name: torch.tensor(choice)})
            assert similarity(ours, theirs, spec, step) <= found.after + rounding, group.name
    often = match_weights(a, b, spec, restarts=30)
    assert found.after - rounding <= often.after <= max(everything) + rounding


def test_many_restarts_find_the_global_optimum_of_a_tiny_network():
    reached = []
    for seed in range(8):
        a, b = random_pair(lambda: MLP(3, (3, 3), 2, norm=False), seed)
        spec = trace_permutations(a, draw(2, 3).double())
        best = max(similarity(a.state_dict(), b.state_dict(), spec, element) for element in elements(spec))
        reached.append(match_weights(a, b, spec, restarts=30).after >= best - 1e-9)
    assert sum(reached) >= 7


def best_by_swaps(a, b, spec, starts=2):
    """The best end of pairwise exchanges from random elements."""
    ours, theirs = a.state_dict(), b.state_dict()
    best = -math.inf
    for seed in range(starts):
        here = spec.random(torch.Generator().manual_seed(seed))
        value, moved = similarity(ours, theirs, spec, here), True
        while moved:
            moved = False
            for name, group in spec.groups.items():
                for i, j in itertools.combinations(range(group.size), 2):
                    swap = torch.arange(group.size)
                    swap[[i, j]] = swap[[j, i]]
                    step = spec.compose(here, {name: swap})
                    if (new := similarity(ours, theirs, spec, step)) > value + 1e-6:
                        here, value, moved = step, new, True
        best = max(best, value)
    return best


@pytest.mark.parametrize("name", ["rnn", "lstm", "square residual"])
def test_groups_that_act_twice_on_a_tensor(name):
    """A quadratic problem, which no one linear assignment solves: as good as many exchanges, from any start."""
    a, _, spec = trained(name, 0)
    b = trained(name, 1)[0]
    found = match_weights(a, b, spec)
    best = best_by_swaps(a, b, spec)
    assert found.after >= best - 1e-6 * abs(best)  # products of float32 weights, summed in another order
    again = match_weights(a, planted(b, spec, 5)[1], spec)
    assert again.after == pytest.approx(found.after, rel=0.1)


def test_heads_that_share_keys_gain_from_restarts():
    a, _, spec = trained("shared keys", 0)
    b = trained("shared keys", 1)[0]
    one, many = (match_weights(a, b, spec, restarts=restarts) for restarts in (1, 12))
    assert one.before < one.after < many.after


@pytest.mark.parametrize("seed", range(1, 5))
def test_heads_that_share_keys_end_at_an_optimum_of_each_group(seed):
    """The permutations of query heads and of their entries depend on each other, so that each is also chosen alone."""
    a, _, spec = trained("shared keys", 0)
    ours, theirs = a.double().state_dict(), trained("shared keys", seed)[0].double().state_dict()
    found = match_weights(ours, theirs, spec, restarts=1)
    within = [group for group in spec.groups.values() if group.block_of is not None]
    assert sorted(group.size for group in within) == [3, 3, 4, 4, 4, 4]
    for group in within:
        for choice in itertools.permutations(range(group.size)):
            step = spec.compose(found.permutations, {group.name: torch.tensor(choice)})
            assert similarity(ours, theirs, spec, step) <= found.after * (1 + 1e-9), group.name


def test_restarts_are_deterministic_and_more_are_never_worse():
    a, _, spec = trained("mlp without norm", 0)
    b = trained("mlp without norm", 1)[0]
    state = torch.get_rng_state()
    ends = [match_weights(a, b, spec, restarts=restarts) for restarts in (1, 2, 4, 8, 8)]
    assert torch.equal(torch.get_rng_state(), state)
    values = [end.after for end in ends]
    assert values == sorted(values)
    assert all(torch.equal(p, ends[-1].permutations[name]) for name, p in ends[-2].permutations.items())
    own = [match_weights(a, b, spec, restarts=3, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert own[0].after == own[1].after
    assert all(torch.equal(p, own[1].permutations[name]) for name, p in own[0].permutations.items())


@pytest.mark.parametrize("convert", [lambda net: net, lambda net: net.state_dict()], ids=["network", "state dict"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_networks_and_state_dicts_of_all_types(dtype, convert):
    net, inputs, _ = trained("convolutions")
    net = net.to(dtype)
    spec = trace_permutations(net, inputs.to(dtype))
    element, moved = planted(net, spec, 1)
    assert_undone(spec, element, match_weights(convert(net), convert(moved), spec).permutations)


def test_networks_of_different_types():
    net, _, spec = trained("mlp")
    element, moved = planted(net, spec, 1)
    for a, b in ((net, copy.deepcopy(moved).double()), (copy.deepcopy(net).bfloat16(), moved)):
        assert_undone(spec, element, match_weights(a, b, spec).permutations)


def test_complex_weights():
    def forward(net, x):
        return (net.out @ (net.hidden @ x.to(torch.complex128)).tanh()).abs()

    def complex_(*shape):
        return nn.Parameter(torch.complex(draw(*shape), draw(*shape, seed=1)).to(torch.complex128))

    net = Net(forward, hidden=complex_(6, 3), out=complex_(2, 6))
    spec = trace_permutations(net, draw(3, 4).double())
    assert [group.size for group in spec.groups.values()] == [6]
    element, moved = planted(net, spec, 2)
    found = match_weights(net, moved, spec)
    assert_undone(spec, element, found.permutations)
    squares = sum(float(tensor.abs().square().sum()) for tensor in net.state_dict().values())
    assert found.after == pytest.approx(squares, rel=1e-12)


def test_running_statistics_do_not_outweigh_the_weights():
    """Batch norm's statistics are permuted, but do not say which unit is which."""
    a, _, spec = trained("convolutions", 0)
    b = trained("convolutions", 1)[0]
    found = match_weights(a, b, spec)
    b[1].running_mean.add_(draw(6) * 1000)
    again = match_weights(a, b, spec)
    assert found.after == again.after
    moved = spec.apply(b.state_dict(), again.permutations)
    assert torch.equal(moved["1.running_mean"], b[1].running_mean[again.permutations["0"]])
    b[1].running_var[2] = math.inf
    assert match_weights(a, b, spec).after == found.after


def test_layers_with_fixed_entries_keep_their_places():
    def build(seed):
        torch.manual_seed(seed)
        net = asymmetrize(MLP(12, (8, 7, 6), 4), n_fix=3, kappa=1.0, skip=["linears.0", "linears.1"], seed=1)
        return train(net, draw(32, 12), 5)

    a, b = build(0), build(1)
    spec = trace_permutations(a)
    assert set(spec.groups) == {"linears.0"}
    found = match_weights(a, b, spec)
    moved = spec.apply(b.state_dict(), found.permutations)
    assert found.after > found.before
    constants = [key for key in moved if key.endswith(("mask", "fixed"))]
    assert len(constants) == 4
    for key in constants:
        assert torch.equal(moved[key], a.state_dict()[key])
    element, shuffled = planted(a, spec, 3)
    assert_undone(spec, element, match_weights(a, shuffled, spec).permutations)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000))
def test_best_assignment_is_that_of_enumeration(size, seed):
    gain = draw(size, size, seed=seed).double().round(decimals=1)
    chosen, gained = best_assignment(gain)
    values = [sum(float(gain[i, j]) for i, j in enumerate(q)) for q in itertools.permutations(range(size))]
    now = sum(float(gain[i, j]) for i, j in enumerate(chosen.tolist()))
    assert sorted(chosen.tolist()) == list(range(size))
    assert now == pytest.approx(max(values))
    assert gained == pytest.approx(now - float(gain.trace()))


BLOCKS = [(1, [3, 2]), (2, [3]), (2, [2, 2]), (3, [2]), (3, []), (4, [1]), (2, [3, 1])]  # blocks, units of each slot


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BLOCKS), st.integers(0, 10_000))
def test_best_blocks_are_those_of_enumeration(shape, seed):
    count, widths = shape
    outside = draw(count, count, seed=seed).double()
    inside = {slot: draw(count, d, count, d, seed=seed + 1 + slot).double() for slot, d in enumerate(widths)}

    def value(outer, inner):
        total = sum(float(outside[h, q]) for h, q in enumerate(outer))
        for slot, gains in inside.items():
            for h, q in enumerate(outer):
                total += sum(float(gains[h, i, q, j]) for i, j in enumerate(inner[slot][h]))
        return total

    best = -math.inf
    for outer in itertools.permutations(range(count)):
        tables = [list(itertools.product(itertools.permutations(range(d)), repeat=count)) for d in widths]
        for inner in itertools.product(*tables):
            best = max(best, value(outer, inner))
    outer, inner, gained = best_blocks(outside, inside)
    found = value(outer.tolist(), {slot: table.tolist() for slot, table in inner.items()})
    identity = value(range(count), [[range(d)] * count for d in widths])
    assert found == pytest.approx(best)
    assert gained == pytest.approx(found - identity)


def test_errors():
    net, _, spec = trained("mlp")
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"Another architecture than the traced network: linears\.1\.weight has shape"):
        match_weights(net, MLP(12, (16, 15, 16), 4), spec)
    with pytest.raises(ValueError, match="Another architecture"):
        match_weights(MLP(12, (16, 14, 16), 4, norm=False), net, spec)
    for arguments in ({"restarts": 0}, {"max_sweeps": 0}):
        with pytest.raises(ValueError, match=f"Expected `{next(iter(arguments))}` to be at least 1 but got 0"):
            match_weights(net, net, spec, **arguments)
    linear = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="Nothing can be permuted: the network has no hidden units"):
        match_weights(linear, linear, trace_permutations(linear, draw(2, 3)))
    asymmetric = asymmetrize(MLP(12, (16, 16), 4), n_fix=3, kappa=1.0)
    with pytest.raises(ValueError, match="have fixed entries, constants that belong to their places"):
        match_weights(asymmetric, asymmetric, trace_permutations(asymmetric))
    broken = copy.deepcopy(net)
    broken.linears[1].weight.data[0, 0] = math.nan
    for pair, title in (((broken, net), "first"), ((net, broken), "second")):
        with pytest.raises(ValueError, match=rf"linears\.1\.weight of the {title} network is not finite"):
            match_weights(*pair, spec)
