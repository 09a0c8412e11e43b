"""What cannot be traced says so: dynamic networks, wrong inputs, constants that belong to their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trace_reference import Net, assert_symmetric, normal, permuted, randomise, sizes

from lightning_symmetry import MLP, FiGLU, ResNet20, asymmetrize
from lightning_symmetry.permutation.spec import trace_permutations
from lightning_symmetry.permutation.trace import DynamicNetworkError

rows = normal(5, 3)


class Branching(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.decide = decide
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.decide(self, x)


def into_new_memory(net, x):
    made = torch.zeros(5, 6, dtype=x.dtype)
    made[:, :3].copy_(x[:, :3])
    return x * float(made.sum())


DYNAMIC = {
    "branch": lambda net, x: x if x.sum() > 0 else -x,
    "item": lambda net, x: x * x.mean().item(),
    "float of a parameter": lambda net, x: x * float(net.scale),
    "item of a new tensor": into_new_memory,
    "mask": lambda net, x: x[x > 0],
    "masked_select": lambda net, x: x.masked_select(x > 0).sum() + x,
    "nonzero": lambda net, x: x[(x > 0).nonzero()[:, 0]],
    "argwhere": lambda net, x: torch.argwhere(x > 0).sum() + x,
    "unique": lambda net, x: x.unique(),
    "equal": lambda net, x: x if torch.equal(x, x + 1) else -x,
    "allclose": lambda net, x: x if torch.allclose(x, x + 1) else -x,
    "numpy": lambda net, x: torch.from_numpy(np.sort(x.detach().numpy(), 1)),
    "asarray": lambda net, x: torch.from_numpy(np.asarray(x.detach()) + 1),
    "tolist": lambda net, x: torch.tensor(x.tolist()) + x,
    "repeats": lambda net, x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0),
    "loop": lambda net, x: sum(x for _ in range(int(x.abs().sum()))),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_networks_are_refused_by_the_name_of_the_module(name):
    net = nn.Sequential(nn.Linear(3, 6), nn.Sequential(Branching(DYNAMIC[name])), nn.Linear(6, 2)).double()
    with pytest.raises(DynamicNetworkError, match=r"reads values that depend on .* \(\w+ in 1\.0\)"):
        trace_permutations(net, rows)


def test_dynamic_networks_without_modules_are_refused():
    net = Net(lambda net, x: net.a(x) if x.max() > 0 else x, a=nn.Linear(3, 3)).double()
    with pytest.raises(DynamicNetworkError, match="in the network itself"):
        trace_permutations(net, rows)


STATIC = {
    "number of nodes": lambda net, x, index: net.b(
        torch.zeros(int(index.max()) + 1, 6).to(x).index_add(0, index, net.a(x))
    ),
    "branch on an integer": lambda net, x, index: net.b(net.a(x)) if index.sum() > 0 else x,
    "mask of integers": lambda net, x, index: net.b(net.a(x)[index > 1]),
    "nonzero of integers": lambda net, x, index: net.b(net.a(x)[(index > 1).nonzero()[:, 0]]),
    "repeats": lambda net, x, index: net.b(net.a(x).repeat_interleave(index, 0)),
    "list of integers": lambda net, x, index: net.b(net.a(x)[index.tolist()]),
    "masked_select by integers": lambda net, x, index: net.b(net.a(x)) * x.masked_select(index[:, None] > 2).sum(),
    "branch on shapes": lambda net, x, index: net.b(net.a(x)) if x.shape[0] > 2 and x.dtype.is_floating_point else x,
}


@pytest.mark.parametrize("name", STATIC)
def test_integers_of_the_input_may_be_read(name):
    net = Net(STATIC[name], a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
    assert sizes(assert_symmetric(net, (rows, torch.tensor([1, 2, 3, 4, 0])))) == [6]


def test_wrong_inputs_name_module_and_shapes():
    net = nn.Sequential(nn.Linear(3, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))
    with pytest.raises(
        ValueError, match=r"Sequential cannot be called with the example input \(\(5, 4\)\), in 0: .*4.*3"
    ):
        trace_permutations(net, torch.zeros(5, 4))
    with pytest.raises(
        ValueError, match=r"cannot be called with the example input \(\(5, 3\), \(5, 3\)\), in the network"
    ):
        trace_permutations(net, (torch.zeros(5, 3), torch.zeros(5, 3)))
    wrong = nn.Sequential(nn.Linear(3, 6), nn.Sequential(nn.ReLU(), nn.Linear(7, 2)))
    with pytest.raises(ValueError, match=r"in 1\.1: "):
        trace_permutations(wrong, torch.zeros(5, 3))


def test_no_input_is_named():
    with pytest.raises(ValueError, match="Linear has no `example_input_array`: give `example_input`"):
        trace_permutations(nn.Linear(3, 2))
    assert sizes(trace_permutations(MLP(3, (5,), 2))) == [5]


def test_no_output_is_named():
    with pytest.raises(ValueError, match="Net returned no tensor but NoneType"):
        trace_permutations(Net(lambda net, x: None, a=nn.Linear(3, 2)), rows)


def test_lazy_parameters_are_named():
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: call Sequential once"):
        trace_permutations(net, torch.zeros(5, 3))


def test_operations_without_a_rule_are_named_and_frozen():
    net = Net(lambda net, x: net.b(torch.linalg.qr(net.a(x).T @ net.a(x))[0]), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    spec = assert_symmetric(net.double(), rows)
    assert list(spec.frozen_by) == ["linalg_qr"]
    assert "no rule for linalg_qr (in the network itself): what it touches is frozen" in spec.report()
    assert "linalg_qr in the network itself cannot be seen through" in spec.frozen()["a.weight"]


ASYMMETRIC = {
    "W": (lambda: asymmetrize(MLP(6, (5, 4), 3).double(), "w", n_fix=2, kappa=1.0, seed=0), normal(4, 6)),
    "sigma": (lambda: asymmetrize(MLP(6, (5, 4), 3), "sigma", seed=0).double(), normal(4, 6)),
    "some layers": (
        lambda: asymmetrize(
            MLP(6, (5, 4, 7), 3).double(), "w", n_fix=2, kappa=1.0, seed=0, skip=["linears.2", "linears.3"]
        ),
        normal(4, 6),
    ),
    "ResNet": (lambda: asymmetrize(ResNet20().double(), "w", n_fix=2, kappa=1.0, seed=0), normal(1, 3, 8, 8)),
}


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_layers_with_fixed_entries_are_never_moved(name):
    factory, inputs = ASYMMETRIC[name]
    net = factory().eval()
    spec = trace_permutations(net, inputs)
    assert spec.fixed
    state = net.state_dict()
    moved = spec.apply(state, spec.random(torch.Generator().manual_seed(0)))
    for layer in spec.fixed:
        for key in state:
            if key.startswith(f"{layer}."):
                assert torch.equal(state[key], moved[key])
    torch.testing.assert_close(permuted(net, spec, spec.random())(inputs), net(inputs), rtol=1e-10, atol=1e-12)
    layer = spec.fixed[0]
    for group in (layer, f"{layer}.weight"):
        with pytest.raises(ValueError, match=rf"units of '{layer}' cannot be permuted: the layer has fixed entries"):
            spec.apply(state, {group: torch.arange(5)})


def test_free_layers_next_to_fixed_ones_are_free():
    factory, inputs = ASYMMETRIC["some layers"]
    assert sizes(trace_permutations(factory(), inputs)) == [7]
    spec = trace_permutations(ASYMMETRIC["W"][0](), inputs)
    assert not spec.groups
    assert "have fixed entries" in spec.why_nothing()


def test_figlu_freezes_what_it_gates():
    net = nn.Sequential(nn.Linear(3, 6), FiGLU(6, seed=0), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    spec = trace_permutations(randomise_but_constants(net), rows)
    assert sizes(spec) == [5]
    assert "fixed entries" in spec.frozen()["0.weight"]


def randomise_but_constants(net):
    constants = {name: tensor.clone() for name, tensor in net[1].state_dict().items()}
    randomise(net)
    net[1].load_state_dict(constants)
    return net


def test_print_of_an_activation_is_refused_with_the_reason():
    net = Net(lambda net, x: net.a(F.relu(x) + bool((x > 0).any())), a=nn.Linear(3, 2)).double()
    with pytest.raises(DynamicNetworkError, match="Take such a branch out of `forward`"):
        trace_permutations(net, rows)
