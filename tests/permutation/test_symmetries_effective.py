"""The effective asymmetry: exchanged units, constants that stay, and the loss that follows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_symmetries import NETS, mlp
from torch import nn
from trace_reference import normal

from lightning_symmetry import GNN, ResNet20, asymmetrize
from lightning_symmetry.landscape import graph_step
from lightning_symmetry.permutation.effective import effective_asymmetry

ROUNDING = 1e-12


def batches(features=4, classes=3, sizes=(7, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(normal(n, features, seed=seed + n), torch.randint(classes, (n,), generator=generator)) for n in sizes]


def measure(net, data, example_input=None, **kwargs):
    example_input = data[0][0] if example_input is None else example_input
    return effective_asymmetry(net, data, example_input, progress=False, **kwargs)


def mean_loss(net, data):
    with torch.no_grad():
        losses = [F.cross_entropy(net(x), y, reduction="none") for x, y in data]
    return float(torch.cat(losses).mean())


def test_a_standard_network_does_not_change():
    found = measure(mlp(4, 6, 5, 3), batches())
    assert {name: len(pairs) for name, pairs in found.pairs.items()} == {"linears.0": 15, "linears.1": 10}
    assert max(found.max.values()) < ROUNDING
    assert found.loss == pytest.approx(mean_loss(mlp(4, 6, 5, 3), batches()), rel=1e-12)


def test_constants_matter_by_their_size():
    data = batches(16, 3, (64,))
    medians = []
    for kappa in (0.02, 1.0):
        net = asymmetrize(mlp(16, 32, 32, 3), "w", n_fix=4, kappa=kappa)
        medians.append(measure(net, data).median)
    for name in ("linears.0", "linears.1"):
        assert 1e-6 < medians[0][name] < medians[1][name] / 3


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_every_pair_by_hand(kappa):
    net, data = asymmetrize(mlp(4, 4, 5, 3, activation=nn.Tanh), "w", n_fix=2, kappa=kappa), batches()
    found = measure(net, data, pairs=100)
    base = mean_loss(net, data)
    for layer, name in enumerate(("linears.0", "linears.1")):
        for (i, j), loss in zip(found.pairs[name].tolist(), found.losses[name].tolist(), strict=True):
            other = copy.deepcopy(net)
            state = other.state_dict()
            for tensor in (state[f"{name}.weight"], state[f"{name}.bias"], state[f"linears.{layer + 1}.weight"].t()):
                tensor[[i, j]] = tensor[[j, i]]
            other.load_state_dict(state)  # which writes the constants back
            assert loss == pytest.approx(mean_loss(other, data), rel=1e-12)
            assert abs(loss - base) > 1e-8
    assert found.mean["linears.0"] == pytest.approx(float((found.losses["linears.0"] - base).abs().mean()))
    assert found.max["linears.0"] == pytest.approx(float((found.losses["linears.0"] - base).abs().max()))


def test_gates_stay():
    net, data = mlp(4, 4, 3), batches()
    asymmetrize(net, "sigma", example_input=data[0][0])
    found = measure(net, data, pairs=2)
    assert len(found.pairs["linears.0"]) == 2
    for (i, j), loss in zip(found.pairs["linears.0"].tolist(), found.losses["linears.0"].tolist(), strict=True):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for tensor in (other.linears[0].weight, other.linears[0].bias, other.linears[1].weight.t()):
                tensor[[i, j]] = tensor[[j, i]]
        assert loss == pytest.approx(mean_loss(other, data), rel=1e-12)
        assert abs(loss - found.loss) > 1e-6


def test_batch_norm_and_its_statistics_move_along():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    for tensor in (*net[1].parameters(), net[1].running_mean, net[1].running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    found = measure(net, batches())
    assert found.max["0"] < ROUNDING and net[1].training
    data = [(normal(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))]
    assert max(measure(ResNet20(norm="batch").double(), data, pairs=1).max.values()) < 1e-9


def test_heads_and_tied_layers():
    for name in ("heads", "shared"):
        net, shape = NETS[name]()
        data = [(normal(*shape, seed=1), torch.zeros(shape[0], dtype=torch.long))]

        def loss(output, target):
            return output.flatten(1).square().sum(1)

        found = measure(net.double(), data, loss=loss)
        assert len(found.pairs) > 0 and found.loss > 0
        assert max(found.max.values()) < ROUNDING * max(1, found.loss)


def test_graphs():
    from torch_geometric.data import Data

    net = GNN(6, 3, 5).double().eval()
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graph = Data(normal(4, 6), edges, y=torch.tensor([0, 1, 2, 0]), test_mask=torch.tensor([True, True, False, True]))
    found = measure(net, [graph], (graph.x, edges), step=graph_step("test_mask"), pairs=3)
    assert max(found.max.values()) < ROUNDING
    with torch.no_grad():
        expected = F.cross_entropy(net(graph.x, edges)[graph.test_mask], graph.y[graph.test_mask])
    assert found.loss == pytest.approx(float(expected))


def test_pairs_are_distinct_and_repeatable():
    net, data = mlp(4, 9, 3), batches()
    found = measure(net, data, pairs=12)
    pairs = found.pairs["linears.0"]
    assert pairs.shape == (12, 2) and len(torch.unique(pairs, dim=0)) == 12 and (pairs[:, 0] < pairs[:, 1]).all()
    assert torch.equal(pairs, measure(net, data, pairs=12).pairs["linears.0"])
    other = measure(net, data, pairs=12, generator=torch.Generator().manual_seed(1)).pairs["linears.0"]
    assert not torch.equal(pairs, other)


def test_options():
    net, data = asymmetrize(mlp(4, 4, 5, 3), "w", n_fix=2), batches()
    every = measure(net, data)
    some = measure(net, iter(data), data[0][0], groups=["linears.1"], loss=F.cross_entropy)
    assert list(some.pairs) == ["linears.1"]
    torch.testing.assert_close(some.losses["linears.1"], every.losses["linears.1"], rtol=1e-12, atol=0)
    assert "linears.1  10" in str(some) and "linears.0" not in str(some)


def test_the_network_is_left_as_it_was():
    net, data = asymmetrize(mlp(4, 4, 5, 3), "w", n_fix=2).train(), batches()
    before, state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    measure(net, data)
    assert net.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_errors():
    net, data = mlp(4, 4, 3), batches()
    with pytest.raises(ValueError, match="`pairs` to be at least 1"):
        measure(net, data, pairs=0)
    with pytest.raises(ValueError, match=r"There is no group 'linears\.7'; the plain network has linears\.0"):
        measure(net, data, groups=["linears.7"])
    with pytest.raises(ValueError, match="no samples"):
        measure(net, [], data[0][0])
    with pytest.raises(ValueError, match="no units to exchange"):
        measure(nn.Sequential(nn.Linear(4, 3)).double(), data)
    with pytest.raises(TypeError, match="Expected batches"):
        measure(net, [data[0][0]], data[0][0])
