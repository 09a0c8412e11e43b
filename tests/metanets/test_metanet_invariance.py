"""Metanetworks give the same for networks that differ by a symmetry, and another answer for others."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metanet_cases import INVARIANT, NETWORKS, randomise, setting
from torch import Tensor, nn

from lightning_symmetry import ResNet, asymmetrize, trace_permutations
from lightning_symmetry.metanets import FlatMLP, GraphMetanetwork, StatNN, WeightDeepSets, WeightLayout, network_graph
from lightning_symmetry.surgery import constants_of

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(scope="module")
def traced():
    return {name: setting(name) for name in NETWORKS}


@pytest.mark.parametrize("metanet", INVARIANT)
@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000), dtype=st.sampled_from(list(TOLERANCE)))
def test_symmetries_do_not_change_the_answer(traced, name, metanet, seed, dtype):
    net, spec, layout = traced[name]
    torch.manual_seed(seed)
    reader = INVARIANT[metanet](layout, spec).to(dtype)
    state = randomise(net, seed).state_dict()
    moved = spec.apply(state, spec.random(torch.Generator().manual_seed(seed)))
    rows = torch.stack([layout.flatten(state), layout.flatten(moved)]).to(dtype)
    reader.fit_normalization(rows[:1] + 0.1 * torch.randn_like(rows[:1].expand(3, -1)))
    same = reader(rows)
    torch.testing.assert_close(same[0], same[1], rtol=0, atol=TOLERANCE[dtype])


PARTLY_ASYMMETRIC = {
    "w": lambda net: asymmetrize(net, "w", n_fix=2, kappa=1.0, layout="filters", skip=["stem", "stage3*"]),
    "sigma": lambda net: asymmetrize(net, "sigma", skip=["stage3.0.activation1"]),
}


@torch.no_grad()
def drawn(net: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return a state whose parameters and running statistics, but no constants, are random."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*net.named_parameters(), *net.named_buffers()]:
        if value.is_floating_point() and name not in constants_of(net):
            value.copy_(torch.randn(value.shape, generator=generator))
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("metanet", INVARIANT)
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("method", PARTLY_ASYMMETRIC)
def test_what_an_asymmetric_network_has_left_of_symmetries(method, norm, metanet):
    net = PARTLY_ASYMMETRIC[method](ResNet(1, norm))
    spec, layout = trace_permutations(net), WeightLayout.of(net)
    assert list(spec.groups) == ["stage3.0.conv1"]
    state = drawn(net, 0)
    moved = spec.apply(state, spec.random(torch.Generator().manual_seed(0)))
    rows = torch.stack([layout.flatten(state), layout.flatten(moved)]).double()
    changed = (rows[0] != rows[1]).float()
    per_tensor = torch.zeros(len(layout.names)).index_add(0, layout.tensor_of, changed)
    assert int((per_tensor > 0).sum()) == (4 if norm == "layer" else 6)  # two convolutions and a norm
    reader = (
        INVARIANT[metanet](layout, network_graph(net)).double().fit_normalization(rows + 0.1 * torch.randn_like(rows))
    )
    output = reader(rows)
    torch.testing.assert_close(output[0], output[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("name", ["standard", "partly w"])
def test_networks_that_compute_the_same_are_read_the_same(name, norm):
    """The permuted network, built and run: what the metanetworks need not tell apart is indeed the same function."""
    net = ResNet(1, norm) if name == "standard" else PARTLY_ASYMMETRIC["w"](ResNet(1, norm))
    state, spec = drawn(net, 1), trace_permutations(net)
    if norm == "batch":
        state = {k: v.abs() if k.endswith("running_var") else v for k, v in state.items()}
    moved = spec.apply(state, spec.random(torch.Generator().manual_seed(1)))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    outputs = []
    for weights in (state, moved):
        net.load_state_dict(weights)
        outputs.append(copy.deepcopy(net).double().eval()(images).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-8, atol=1e-8 * float(outputs[0].abs().max()))
    layout = WeightLayout.of(net)
    rows = torch.stack([layout.flatten(weights) for weights in (state, moved)]).double()
    for reader in INVARIANT.values():
        output = reader(layout, network_graph(net)).double()(rows)
        torch.testing.assert_close(output[0], output[1], rtol=0, atol=1e-10)


def test_a_plain_perceptron_is_not_invariant(traced):
    net, spec, layout = traced["mlp"]
    state = randomise(net, 0).state_dict()
    rows = torch.stack([layout.flatten(state), layout.flatten(spec.apply(state, spec.random()))])
    output = FlatMLP(layout)(rows)
    assert (output[0] - output[1]).abs() > 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_sees_what_sets_do_not(traced, name):
    """One tensor alone is permuted along a hidden axis, which is no symmetry of the network."""
    net, spec, layout = traced[name]
    torch.manual_seed(0)
    state = {key: value.clone() for key, value in randomise(net, 0).state_dict().items()}
    place = next(p for p in max(spec.groups.values(), key=lambda group: group.size).places if p.axis == 0)
    moved = {**state, place.tensor: state[place.tensor].roll(1, 0)}
    rows = torch.stack([layout.flatten(state), layout.flatten(moved)]).double()
    for blind in (WeightDeepSets(layout, 8), StatNN(layout, (8,))):
        output = blind.double()(rows)
        torch.testing.assert_close(output[0], output[1], rtol=0, atol=1e-12)
    output = GraphMetanetwork(layout, spec, hidden=8, layers=2).double()(rows)
    assert (output[0] - output[1]).abs() > 1e-9


def test_inputs_and_outputs_of_the_network_are_told_apart(traced):
    net, spec, layout = traced["mlp"]
    state = {key: value.double() for key, value in randomise(net, 0).state_dict().items()}
    first, last = "linears.0.weight", "linears.2.weight"
    rows = [state, {**state, first: state[first].roll(1, 1)}, {**state, last: state[last].roll(1, 0)}]
    output = GraphMetanetwork(layout, spec, hidden=8).double()(torch.stack([layout.flatten(row) for row in rows]))
    assert (output[1:] - output[0]).abs().min() > 1e-6
