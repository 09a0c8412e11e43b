"""An aligned network computes the same function and lies closer; barriers between trained networks fall."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from matching_networks import NETWORKS, ROWS, draw, planted, train, trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_symmetry import (
    MLP,
    Alignment,
    DigitsData,
    align,
    asymmetrize,
    evaluate_path,
    parameter_distance,
    trace_permutations,
)
from lightning_symmetry.surgery import call


def state_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def assert_bitwise(net, state):
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("method", ["weights", "activations"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_copy_of_the_same_function_comes_closer(name, method):
    to, inputs, spec = trained(name, 0)
    b = trained(name, 1)[0]
    before = state_of(to), state_of(b)
    random = torch.get_rng_state()
    batches = [(inputs, None)] if method == "activations" else None
    found = align(b, to, method, example_input=inputs, dataloader=batches)
    assert torch.equal(torch.get_rng_state(), random)
    assert_bitwise(to, before[0])
    assert_bitwise(b, before[1])
    assert found.network is not b
    assert type(found.network) is type(b)
    with torch.no_grad():
        torch.testing.assert_close(call(found.network, inputs), call(b, inputs), rtol=1e-4, atol=1e-5)
    assert found.deviation < 1e-4
    assert found.after > found.before
    assert found.method == method
    assert_bitwise(found.network, spec.apply(before[1], found.permutations))
    if method == "weights":
        assert parameter_distance(found.network, to) < parameter_distance(b, to)


@pytest.mark.parametrize("method", ["weights", "activations"])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "transformer", "gnn"])
def test_a_permuted_network_comes_back(name, method):
    net, inputs, spec = trained(name)
    moved = planted(net, spec, 4)[1].train()
    found = align(moved, net, method, dataloader=[(inputs, None)])
    assert_bitwise(found.network, net.state_dict())
    assert found.network.training
    assert found.num_moved > 0
    text = str(found)
    assert f"aligned by {method}" in text
    assert f"{found.num_moved} of {sum(group.size for group in spec.groups.values())} units" in text
    assert align(net, net, method, dataloader=[(inputs, None)]).num_moved == 0


@cache
def digits():
    data = DigitsData(64)
    data.setup()
    return data


@cache
def digits_mlp(seed, width=64):
    """An MLP trained on the handwritten digits."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = MLP(64, (width,) * 3, 10)
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
        for _ in range(20):
            for x, y in digits().train_dataloader():
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
    return net.eval()


def barrier(a, b):
    test = digits().eval_dataloader("test")
    return evaluate_path(a, b, test, 11, progress=False).max_barrier


@pytest.mark.parametrize("method", ["weights", "activations"])
def test_the_barrier_of_trained_networks_falls_to_a_third(method):
    a, b = digits_mlp(0), digits_mlp(1)
    found = align(b, a, method, dataloader=digits().eval_dataloader("train"), num_batches=10)
    unaligned, aligned = barrier(b, a), barrier(found.network, a)
    assert unaligned > 0.1
    assert aligned <= unaligned / 3


class OneShot:
    """Batches that are given once."""

    def __init__(self, batches):
        self.batches, self.given = iter(batches), 0

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.batches)
        self.given += 1
        return batch


def test_batches_that_come_only_once_are_all_used():
    to, inputs, _ = trained("mlp", 0)
    b = trained("mlp", 1)[0]
    batches = list(inputs.split(8))
    expected = align(b, to, "activations", dataloader=batches)
    once = OneShot(batches)
    found = align(b, to, "activations", dataloader=once)
    assert found.after == expected.after
    assert once.given == 4
    once = OneShot(batches)
    assert align(b, to, "activations", dataloader=once, num_batches=2).after != expected.after
    assert once.given == 2
    assert align(b, to, "activations", dataloader=OneShot([inputs])).after > expected.before
    once = OneShot(batches)
    align(b, to, dataloader=once)
    assert once.given == 1


def test_inputs_and_examples():
    to, inputs, _ = trained("convolutions", 0)
    b = trained("convolutions", 1)[0]
    loader = DataLoader(TensorDataset(torch.zeros(16), inputs), 8)
    expected = align(b, to, "activations", dataloader=list(inputs.split(8)))
    found = align(b, to, "activations", dataloader=loader, inputs=lambda batch: batch[1])
    assert found.after == expected.after
    with pytest.raises(ValueError, match="has no `example_input_array`"):
        align(b, to)
    b.example_input_array = torch.zeros(1, 1, 8, 8)
    assert align(b, to).after == align(b, to, example_input=inputs).after


def test_settings_are_passed_on():
    to, _, spec = trained("mlp without norm", 0)
    b = trained("mlp without norm", 1)[0]
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    first, second = (align(b, to, restarts=5, generator=generator, spec=spec) for generator in generators)
    assert first.after == second.after
    assert first.spec is spec
    assert not torch.equal(generators[0].get_state(), torch.Generator().manual_seed(3).get_state())
    assert align(b, to, restarts=1).after <= align(b, to, restarts=10).after


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    net, inputs, spec = trained("convolutions")
    net = net.to(dtype)
    moved = planted(net, spec, 1)[1]
    found = align(moved, net, example_input=inputs.to(dtype))
    assert_bitwise(found.network, net.state_dict())
    assert found.deviation <= {torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]


def test_extra_state_and_module_versions_are_kept():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            self.seen = state

    torch.manual_seed(0)
    net = nn.Sequential(Extra(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    moved = planted(net, trace_permutations(net, draw(4, 5)), 1)[1]
    found = align(moved, net, example_input=draw(4, 5))
    assert found.network[0].seen == {"calls": 3}
    assert torch.equal(found.network[0].weight, net[0].weight)


def asymmetric(seed, asymmetry_seed=1, **kwargs):
    torch.manual_seed(seed)
    net = asymmetrize(MLP(12, (8, 7, 6), 4), n_fix=3, kappa=1.0, seed=asymmetry_seed, **kwargs)
    return train(net, ROWS, 5)


def test_asymmetric_networks_are_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"Nothing can be permuted: .* have fixed entries.*interpolate them as they are"
    ):
        align(asymmetric(0), asymmetric(1))
    with pytest.raises(ValueError, match="have different masks"):
        align(asymmetric(0), asymmetric(1, asymmetry_seed=2))
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="Another architecture than the network to align to"):
        align(asymmetric(0), MLP(12, (8, 7, 6), 4))


@pytest.mark.parametrize("method", ["weights", "activations"])
def test_free_layers_of_an_asymmetric_network_are_aligned(method):
    skip = ["linears.0", "linears.1"]
    to, b = asymmetric(0, skip=skip), asymmetric(1, skip=skip)
    found = align(b, to, method, dataloader=[(ROWS, None)])
    assert set(found.permutations) == {"linears.0"}
    assert found.num_moved > 0
    assert found.after > found.before
    constants = [name for name in b.state_dict() if name.endswith(("mask", "fixed"))]
    assert len(constants) == 4
    for name in constants:
        assert torch.equal(found.network.state_dict()[name], b.state_dict()[name])
    for layer in ("linears.2", "linears.3"):
        for name, tensor in found.network.get_submodule(layer).state_dict().items():
            assert torch.equal(tensor, b.get_submodule(layer).state_dict()[name])


def test_errors():
    net = trained("mlp")[0]
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="Expected `method` to be 'weights' or 'activations' but got 'units'"):
        align(net, net, "units")
    with pytest.raises(ValueError, match="needs `dataloader`"):
        align(net, net, "activations")
    with pytest.raises(ValueError, match="gave no batches"):
        align(net, net, dataloader=[])
    with pytest.raises(ValueError, match=r"Another architecture than the network to align to: linears\.1\.weight"):
        align(MLP(12, (16, 13, 16), 4), net)
    with pytest.raises(ValueError, match="Another architecture than the traced network"):
        align(net, net, spec=trained("mlp without norm")[2])
    with pytest.raises(ValueError, match="cannot be called with the example input"):
        align(net, net, example_input=draw(2, 5))
    diverged = copy.deepcopy(net)
    diverged.linears[0].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="is not finite"):
        align(diverged, net)


def test_result_is_documented_by_its_types():
    net, _, spec = trained("mlp")
    found = align(net, net)
    assert isinstance(found, Alignment)
    assert found.seconds > 0
    assert found.sweeps >= 1
    assert set(found.permutations) == set(found.spec.groups) == set(spec.groups)
