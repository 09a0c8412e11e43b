"""The group of a network: inverse, composition, blocks within blocks, and what applying it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trace_reference import EXACT, Net, largest_deviation, normal, outputs_of, parameter, permuted, randomise

from lightning_symmetry import MLP
from lightning_symmetry.permutation.spec import trace_permutations

tokens = normal(2, 5, 3)


def nested(net, x):
    """Attend with heads in two kinds of groups: queries within the groups of keys and values, entries within heads."""
    q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (net.q, net.k, net.v))
    mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
    return net.o(F.relu(net.up(net.norm(mixed))))


def nested_network(seed=0):
    net = Net(
        nested,
        q=nn.Linear(3, 24),
        k=nn.Linear(3, 8),
        v=nn.Linear(3, 8),
        norm=Scale(24),
        up=nn.Linear(24, 6),
        o=nn.Linear(6, 2),
    )
    return randomise(net.double(), seed).eval()


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = parameter(width)

    def forward(self, x):
        return x * self.weight


NETWORKS = {
    "MLP": (lambda: randomise(MLP(3, (5, 4), 2).double()).eval(), normal(4, 3)),
    "encoder": (
        lambda: randomise(nn.TransformerEncoderLayer(12, 3, 6, batch_first=True).double()).eval(),
        normal(2, 5, 12),
    ),
    "nested heads": (nested_network, tokens),
    "grouped": (
        lambda: randomise(
            nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1)).double()
        ),
        normal(2, 3, 6, 6),
    ),
}
SPECS = {name: trace_permutations(factory(), inputs) for name, (factory, inputs) in NETWORKS.items()}
names = st.sampled_from(sorted(NETWORKS))
seeds = st.integers(0, 10**6)
SETTINGS = settings(deadline=None, max_examples=30)


def element(spec, seed):
    return spec.random(torch.Generator().manual_seed(seed))


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_heads_in_groups_are_blocks_within_blocks():
    spec = SPECS["nested heads"]
    outer = [name for name in spec.blocks if spec.groups[name].block_of is None]
    assert [spec.groups[name].size for name in outer] == [2]
    inside = {group.name: group for group in spec.groups.values() if group.block_of == outer[0]}
    assert sorted(group.size for group in inside.values()) == [3, 3, 4, 4, 4, 4]
    assert all(group.block in (0, 1) for group in inside.values())


@SETTINGS
@given(names, seeds)
def test_inverse_undoes(name, seed):
    spec, net = SPECS[name], NETWORKS[name][0]()
    moved = element(spec, seed)
    state = net.state_dict()
    assert_same(spec.apply(spec.apply(state, moved), spec.inverse(moved)), state)
    assert_same(spec.apply(spec.apply(state, spec.inverse(moved)), moved), state)
    assert_same(spec.inverse(spec.inverse(moved)), moved)


@SETTINGS
@given(names, seeds, seeds)
def test_composition_is_one_after_the_other(name, first, second):
    spec, net = SPECS[name], NETWORKS[name][0]()
    first, second = element(spec, first), element(spec, second)
    state = net.state_dict()
    assert_same(spec.apply(spec.apply(state, first), second), spec.apply(state, spec.compose(first, second)))


@SETTINGS
@given(names, seeds, seeds, seeds)
def test_group_axioms(name, a, b, c):
    spec = SPECS[name]
    a, b, c = (element(spec, seed) for seed in (a, b, c))
    assert_same(spec.compose(spec.compose(a, b), c), spec.compose(a, spec.compose(b, c)))
    assert_same(spec.compose(a, spec.inverse(a)), spec.identity())
    assert_same(spec.compose(spec.inverse(a), a), spec.identity())
    assert_same(spec.compose(spec.identity(), a), a)


@pytest.mark.parametrize("name", NETWORKS)
def test_each_group_alone_keeps_the_output_and_moves_something(name):
    factory, inputs = NETWORKS[name]
    net, spec = factory(), SPECS[name]
    for group in spec.groups.values():
        cycle = {group.name: torch.arange(group.size).roll(1)}
        assert largest_deviation(net, inputs, spec, cycle) < EXACT
        state, moved = net.state_dict(), spec.apply(net.state_dict(), cycle)
        changed = {key for key in state if not torch.equal(state[key], moved[key])}
        assert changed == {place.tensor for place in group.places}


@pytest.mark.parametrize("name", NETWORKS)
def test_places_are_what_apply_moves(name):
    """The new unit i is the old unit p[i], at every place that the group names."""
    factory, _ = NETWORKS[name]
    net, spec = factory(), SPECS[name]
    for group in spec.groups.values():
        order = torch.randperm(group.size, generator=torch.Generator().manual_seed(0))
        state, moved = net.state_dict(), spec.apply(net.state_dict(), {group.name: order})
        for place in group.places:
            if sum(other.tensor == place.tensor for other in group.places) == 1:
                old = state[place.tensor].movedim(place.axis, 0)
                new = moved[place.tensor].movedim(place.axis, 0)
                for unit in range(group.size):
                    assert torch.equal(new[place.index[unit]], old[place.index[order[unit]]])


def test_blocks_come_to_their_place_and_are_permuted_within_by_the_groups_of_that_place():
    """``new[h, d] = old[p[h], s_h[d]]``, with the heads' entries by name."""
    net, spec = NETWORKS["encoder"][0](), SPECS["encoder"]
    (heads,) = spec.blocks
    moved = element(spec, 3)
    old = net.self_attn.in_proj_bias.detach()[:12].view(3, 4)
    new = spec.apply(net.state_dict(), moved)["self_attn.in_proj_bias"][:12].view(3, 4)
    (queries,) = [
        kind
        for kind in spec.blocks[heads]
        if any(0 in p.index[:, 0] for p in spec.groups[kind[0]].places if p.axis == 0) and "in_proj" in kind[0]
    ][:1]
    for head in range(3):
        assert torch.equal(new[head], old[moved[heads][head], moved[queries[head]]])


def test_names_are_unique_and_say_where():
    for spec in SPECS.values():
        assert len(spec.names) == len(spec.groups) == len(set(spec.names.values()))
    assert list(SPECS["MLP"].groups) == ["linears.0", "linears.1"]


def test_identity_and_missing_groups_leave_all_as_it_is():
    net, spec = NETWORKS["MLP"][0](), SPECS["MLP"]
    assert_same(spec.apply(net.state_dict(), spec.identity()), net.state_dict())
    assert_same(spec.apply(net.state_dict(), {}), net.state_dict())
    part = {"linears.1": torch.tensor([1, 2, 3, 0])}
    assert_same(spec.apply(net.state_dict(), part), spec.apply(net.state_dict(), {**spec.identity(), **part}))


def test_apply_copies_and_takes_other_networks_of_the_architecture():
    spec = SPECS["MLP"]
    net, other = NETWORKS["MLP"][0](), randomise(MLP(3, (5, 4), 2).double(), seed=1).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = spec.apply(net.state_dict(), spec.identity())
    found["linears.0.weight"].zero_()
    assert_same(dict(net.state_dict()), before)
    assert largest_deviation(other, normal(4, 3), spec, element(spec, 0)) < EXACT


def test_random_is_reproducible_and_leaves_the_global_generator():
    spec = SPECS["encoder"]
    assert_same(element(spec, 5), element(spec, 5))
    state = torch.get_rng_state()
    moved = element(spec, 6)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(not torch.equal(moved[name], spec.identity()[name]) for name in moved)


class Versioned(nn.Linear):
    """Refuses state dicts without a version, and keeps a note in its state."""

    _version = 2

    def get_extra_state(self):
        return {"note": [1, 2]}

    def set_extra_state(self, state):
        self.note = state["note"]

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_and_extra_state_survive():
    net = randomise(nn.Sequential(Versioned(3, 5), nn.ReLU(), nn.Linear(5, 2)).double())
    spec = trace_permutations(net, normal(4, 3))
    moved = permuted(net, spec, element(spec, 0))
    assert moved[0].note == [1, 2]
    for a, b in zip(outputs_of(net, normal(4, 3)), outputs_of(moved, normal(4, 3)), strict=True):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


def test_report_and_frozen_say_why():
    spec = SPECS["MLP"]
    lines = spec.report().splitlines()
    assert lines[0] == "2 permutation groups; 9 of 10 tensors take part"
    assert lines[1].startswith("  linears.0: 5 units, linears.0.weight[0], linears.0.bias[0]")
    assert "  linears.2.bias: axis 0: it belongs to the output" in lines
    assert spec.frozen()["linears.0.weight"] == "axis 1: it belongs to the input"
    assert "3 blocks with 4 and 4 units within each" in SPECS["encoder"].report()


MISTAKES = {
    "unknown group": ({"linears.7": torch.arange(5)}, "no group 'linears.7'; there are 2: linears.0, linears.1"),
    "frozen tensor": (
        {"linears.2.bias": torch.arange(2)},
        "'linears.2.bias' is not permuted: axis 0: it belongs to the",
    ),
    "too short": (
        {"linears.0": torch.arange(4)},
        "Expected a permutation of 5 units for the group 'linears.0' but got",
    ),
    "twice the same": ({"linears.0": torch.tensor([0, 1, 2, 3, 3])}, "Expected a permutation of 5 units"),
    "out of range": ({"linears.0": torch.tensor([1, 2, 3, 4, 5])}, "Expected a permutation of 5 units"),
    "real": ({"linears.0": torch.arange(5.0)}, "Expected a permutation of 5 units"),
    "matrix": ({"linears.0": torch.eye(5)}, "Expected a permutation of 5 units"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    permutations, message = MISTAKES[name]
    net, spec = NETWORKS["MLP"][0](), SPECS["MLP"]
    for use in (spec.check, spec.inverse, lambda p: spec.apply(net.state_dict(), p), lambda p: spec.compose(p, {})):
        with pytest.raises(ValueError, match=message):
            use(permutations)


def test_another_architecture_is_named():
    state = NETWORKS["MLP"][0]().state_dict()
    spec = SPECS["MLP"]
    with pytest.raises(ValueError, match=r"it has no linears\.3\.weight"):
        spec.apply(MLP(3, (5, 4, 4), 2).state_dict(), {})
    with pytest.raises(ValueError, match=r"norms\.0\.weight is missing \(4 in all\)"):
        spec.apply(MLP(3, (5, 4), 2, norm=False).state_dict(), {})
    state["linears.0.weight"] = torch.zeros(5, 7)
    with pytest.raises(ValueError, match=r"linears\.0\.weight has shape \(5, 7\) and not \(5, 3\)"):
        spec.apply(state, {})


def test_the_report_says_what_is_tied() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    report = trace_permutations(net, torch.zeros(1, 3, 5, 5)).report()
    assert "permuted alike, though each could be by itself:\n  2: the channels within each of its 2 groups" in report
    plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert "permuted alike" not in trace_permutations(plain, torch.zeros(1, 3, 5, 5)).report()
