"""Activation matching undoes planted permutations; its correlations are those of all samples at once."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matching_networks import EDGES, NETWORKS, ROWS, assert_undone, draw, planted, trained
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch_geometric.data import Data
from trace_reference import Net

from lightning_symmetry import MLP, match_activations, trace_permutations
from lightning_symmetry.permutation.activations import _Correlation


def batches_of(inputs, sizes):
    """Batches of ``(inputs, target)`` of some sizes; a graph stays whole."""
    if isinstance(inputs, tuple):
        return [(inputs, None)]
    return [(part, torch.zeros(len(part))) for part in inputs.split(sizes)]


def sizes_of(inputs):
    return [len(inputs) - 3, 3] if isinstance(inputs, torch.Tensor) else None  # a smaller batch comes last


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_permutations_are_undone(name):
    net, inputs, spec = trained(name)
    for seed in range(2):
        element, moved = planted(net, spec, seed)
        state = {key: tensor.clone() for key, tensor in moved.state_dict().items()}
        found = match_activations(net, moved, spec, batches_of(inputs, sizes_of(inputs)))
        assert_undone(spec, element, found.permutations)
        assert found.after > found.before
        assert all(torch.equal(tensor, state[key]) for key, tensor in moved.state_dict().items())


def hidden_activations(net, x):
    """Outputs of the hidden linear layers of an MLP without normalisation."""
    found = []
    for linear, activation in zip(net.linears, net.activations, strict=False):
        found.append(linear(x))
        x = activation(found[-1])
    return found


def test_objective_is_the_correlation_of_the_units():
    a, inputs, spec = trained("mlp without norm", 0)
    b = trained("mlp without norm", 1)[0].double()
    a, inputs = a.double(), inputs.double()
    found = match_activations(a, b, spec, batches_of(inputs, [10, 10, 12]))
    before = after = 0.0
    with torch.no_grad():
        pairs = zip(hidden_activations(a, inputs), hidden_activations(b, inputs), spec.groups, strict=True)
        for ours, theirs, name in pairs:
            size = ours.shape[1]
            correlation = np.corrcoef(ours.numpy().T, theirs.numpy().T)[:size, size:]
            before += correlation.trace()
            after += correlation[range(size), found.permutations[name]].sum()
            for i, j in itertools.combinations(range(size), 2):  # no exchange is better
                p = found.permutations[name].tolist()
                assert (
                    correlation[i, p[i]] + correlation[j, p[j]] >= correlation[i, p[j]] + correlation[j, p[i]] - 1e-12
                )
    assert found.before == pytest.approx(before, rel=1e-10)
    assert found.after == pytest.approx(after, rel=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_correlations_by_batches_are_those_of_all_samples(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    offset = torch.tensor([[0.0], [100.0], [-3.0], [1e-3]], dtype=dtype)
    a = torch.randn(4, 200, generator=generator, dtype=dtype) + offset
    b = 0.5 * a.flip(0) + torch.randn(4, 200, generator=generator, dtype=dtype)
    sums = _Correlation()
    for one, other in zip(a.split([120, 50, 29, 1], 1), b.split([120, 50, 29, 1], 1), strict=True):
        sums.add(one, other)
    expected = torch.from_numpy(np.corrcoef(a.double(), b.double())[:4, 4:])
    torch.testing.assert_close(sums.matrix(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_units_that_never_change_are_like_none(dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 90, generator=generator, dtype=dtype)
    b = a.clone()
    a[1] = torch.nextafter(torch.tensor(0.1, dtype=dtype), (a[1] > 0).to(dtype))  # the two numbers beside 0.1
    b[2] = 1e4 / 3
    a[3, 7] = float("inf")
    sums = _Correlation()
    for one, other in zip(a.split(30, 1), b.split(30, 1), strict=True):
        sums.add(one, other)
    found = sums.matrix()
    assert found.isfinite().all()
    assert not found[1].any()
    assert not found[:, 2].any()
    assert not found[3].any()
    assert found[0, 0] == pytest.approx(1, abs=1e-5)


def test_dead_units_leave_the_others_to_be_found():
    net, inputs, spec = trained("mlp without norm")
    net.linears[0].weight.data[3:6] = 0
    element, moved = planted(net, spec, 2)
    found = match_activations(net, moved, spec, batches_of(inputs, 16)).permutations
    for name, permutation in spec.compose(element, found).items():
        alive = [unit for unit in range(len(permutation)) if name != "linears.0" or unit not in (3, 4, 5)]
        assert permutation[alive].tolist() == alive


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(ROWS)


def test_loaders_of_all_kinds():
    net, inputs, spec = trained("mlp")
    element, moved = planted(net, spec, 1)
    loaders = [
        DataLoader(TensorDataset(inputs, torch.zeros(32)), 10, shuffle=True),
        DataLoader(inputs, 10),
        DataLoader(Stream(), 10),
        (batch for batch in inputs.split(10)),
        [inputs],
    ]
    for loader in loaders:
        assert_undone(spec, element, match_activations(net, moved, spec, loader).permutations)


def test_num_batches():
    net, inputs, spec = trained("mlp")
    other = trained("mlp", 1)[0]
    given = []

    def watched():
        for batch in inputs.split(8):
            given.append(batch)
            yield batch

    few = match_activations(net, other, spec, watched(), num_batches=2)
    assert len(given) == 2
    same = match_activations(net, other, spec, inputs[:16].split(8))
    assert few.after == same.after
    assert few.after != match_activations(net, other, spec, inputs.split(8)).after
    assert match_activations(net, other, spec, inputs.split(8), num_batches=99).after == pytest.approx(
        match_activations(net, other, spec, [inputs]).after, rel=1e-4
    )
    with pytest.raises(ValueError, match="Expected `num_batches` to be at least 1 but got 0"):
        match_activations(net, other, spec, [inputs], num_batches=0)


def test_inputs_of_a_batch():
    net, inputs, spec = trained("mlp")
    element, moved = planted(net, spec, 1)
    batches = [{"label": torch.zeros(16), "pixels": part} for part in inputs.split(16)]
    assert_undone(
        spec, element, match_activations(net, moved, spec, batches, inputs=lambda b: b["pixels"]).permutations
    )
    named = [{"input": part} for part in inputs.split(16)]
    assert_undone(spec, element, match_activations(net, moved, spec, named).permutations)
    with pytest.raises(ValueError, match="cannot be called with the example input"):
        match_activations(net, moved, spec, batches)


def test_batches_of_graphs():
    net, _, spec = trained("gnn")
    element, moved = planted(net, spec, 1)
    few = EDGES[:, (EDGES < 9).all(0)]
    graphs = [Data(x=ROWS, edge_index=EDGES), Data(x=draw(9, 12, seed=3), edge_index=few)]
    assert_undone(spec, element, match_activations(net, moved, spec, graphs).permutations)


def test_which_operations_run_may_depend_on_the_shape_of_a_batch():
    def forward(net, x):
        state = torch.zeros(len(x), 6, dtype=x.dtype)
        for step in range(x.shape[1]):
            state = net.cell(x[:, step], state)
        return net.out(F.relu(net.hidden(state)))

    torch.manual_seed(0)
    net = Net(forward, cell=nn.GRUCell(5, 6), hidden=nn.Linear(6, 7), out=nn.Linear(7, 2))
    spec = trace_permutations(net, draw(2, 3, 5))
    element, moved = planted(net, spec, 1)
    batches = [draw(20, 4, 5), draw(20, 7, 5, seed=1), draw(3, 2, 5, seed=2)]
    assert_undone(spec, element, match_activations(net, moved, spec, batches).permutations)


def test_units_that_stand_beside_the_samples():
    """Where the batch is an inner part of an axis, units stand elsewhere in a smaller batch."""

    def forward(net, x):
        side = torch.stack([net.hidden(x).T, net.other(x).T], 1).flatten(1)  # units x (2 samples)
        units, count = side.shape
        return net.out(side.flatten().view(units, count).relu().T).sum(0)

    torch.manual_seed(0)
    net = Net(forward, hidden=nn.Linear(3, 6), other=nn.Linear(3, 6), out=nn.Linear(6, 2))
    spec = trace_permutations(net, draw(8, 3))
    assert [group.size for group in spec.groups.values()] == [6]
    element, moved = planted(net, spec, 1)
    for batches in ([draw(20, 3), draw(9, 3)], [draw(9, 3), draw(20, 3)]):
        assert_undone(spec, element, match_activations(net, moved, spec, batches).permutations)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    net, inputs, spec = trained("convolutions")
    element, moved = planted(net.to(dtype), spec, 1)
    assert_undone(spec, element, match_activations(net, moved, spec, [inputs.to(dtype)]).permutations)


def test_networks_and_random_state_are_as_before():
    net, inputs, spec = trained("convolutions")
    net[1].train()
    moved = planted(net, spec, 1)[1].train()
    state = torch.get_rng_state()
    before = copy.deepcopy(net.state_dict()), copy.deepcopy(moved.state_dict())
    match_activations(net, moved, spec, [inputs])
    assert torch.equal(torch.get_rng_state(), state)
    for kept, network in zip(before, (net, moved), strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in network.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert net[1].training
    assert not net[0].training
    assert all(module.training for module in moved.modules())


def test_errors():
    net, inputs, spec = trained("mlp")
    with pytest.raises(ValueError, match="gave no batches"):
        match_activations(net, net, spec, [])
    torch.manual_seed(0)
    for other in (MLP(12, (16, 15, 16), 4), MLP(12, (16, 16), 4)):
        for pair in ((net, other), (other, net)):
            with pytest.raises(ValueError, match="Another architecture than the traced network"):
                match_activations(*pair, spec, [inputs])
        with pytest.raises(ValueError, match="Another architecture than the traced network"):
            match_activations(net, net, trace_permutations(other), [inputs])
    broken = copy.deepcopy(net)
    broken.linears[1].bias.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"linears\.1\.bias of the second network is not finite"):
        match_activations(net, broken, spec, [inputs])
    linear = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="Nothing can be permuted"):
        match_activations(linear, linear, trace_permutations(linear, draw(2, 3)), [draw(2, 3)])


def test_networks_that_run_different_operations():
    def build(function):
        torch.manual_seed(0)
        return Net(lambda net, x: net.out(function(net.hidden(x))), hidden=nn.Linear(3, 6), out=nn.Linear(6, 2))

    plain, twice = build(F.relu), build(lambda h: (h * 2) @ torch.eye(6) + h)
    spec = trace_permutations(plain, draw(4, 3))
    with pytest.raises(ValueError, match="other symmetries on this data"):
        match_activations(twice, plain, spec, [draw(4, 3)])
    skipping = build(F.relu)
    skipping.function = lambda net, x: net.out(F.relu(net.hidden(x) if x.shape[0] < 0 else x.new_ones(len(x), 6)))
    with pytest.raises(ValueError, match="do not run the same operations: addmm in hidden"):
        match_activations(plain, skipping, spec, [draw(4, 3)])
