"""Two networks are compared by what they compute, and the first layer that differs is named."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matching_networks import NETWORKS, draw, planted, trained
from torch import nn
from trace_reference import Net

from lightning_symmetry import MLP, check_equivalence
from lightning_symmetry.permutation import NotEquivalentError
from lightning_symmetry.permutation.equivalence import TOLERANCES, deviation, rounds_to_tf32


@pytest.mark.parametrize("name", NETWORKS)
def test_permuted_networks_pass_and_others_do_not(name):
    net, inputs, spec = trained(name)
    assert check_equivalence(net, copy.deepcopy(net), inputs) == 0
    moved = planted(net, spec, 1)[1]
    assert 0 < check_equivalence(net, moved, inputs) < 1e-5
    with pytest.raises(NotEquivalentError, match="do not compute the same function"):
        check_equivalence(net, trained(name, 1)[0], inputs)


def forget(net, spec, tensor):
    """A permuted network in which one tensor stayed as it was."""
    moved = planted(net, spec, 1)[1]
    moved.state_dict()[tensor].copy_(net.state_dict()[tensor])
    return moved


FORGOTTEN = [  # network, tensor that was not permuted, first layer whose output differs
    ("mlp", "linears.0.bias", r"'linears\.0' \(Linear\)"),
    ("mlp", "norms.1.weight", r"'norms\.1' \(LayerNorm\)"),
    ("mlp", "linears.3.weight", r"'linears\.3' \(Linear\)"),
    ("resnet20, batch norm", "stage2.1.norm1.running_mean", r"'stage2\.1\.norm1' \(BatchNorm2d\)"),
    ("resnet20, batch norm", "stage3.0.skip.1.running_var", r"'stage3\.0\.skip\.1' \(BatchNorm2d\)"),
    ("resnet20, layer norm", "stage1.2.conv2.weight", r"'stage1\.2\.conv2' \(Conv2d\)"),
    ("transformer", "1.layers.1.self_attn.in_proj_weight", r"'1\.layers\.1\.self_attn' \(MultiheadAttention\)"),
    ("transformer", "1.layers.0.self_attn.out_proj.weight", r"'1\.layers\.0\.self_attn' \(MultiheadAttention\)"),
    ("vit", "token", r"'encoder\.layers\.0\.norm1' \(LayerNorm\)"),
    ("gnn", "norms.2.running_var", r"'norms\.2' \(BatchNorm1d\)"),
    ("gru", "rnn.weight_hh_l1", r"'rnn' \(GRU\)"),
    ("language", "0.weight", r"'1\.layers\.0\.self_attn' \(MultiheadAttention\)"),
]


@pytest.mark.parametrize(("name", "tensor", "layer"), FORGOTTEN)
def test_the_first_layer_that_differs_is_named(name, tensor, layer):
    net, inputs, spec = trained(name)
    with pytest.raises(NotEquivalentError, match=f"The first layer whose output differs is {layer}"):
        check_equivalence(net, forget(net, spec, tensor), inputs)


def test_operations_outside_of_layers_are_named_by_the_module_that_runs_them():
    def forward(net, x):
        return net.b(net.a(x) * net.scale)

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2), scale=nn.Parameter(torch.rand(4)))
    other = copy.deepcopy(net)
    other.scale.data.mul_(2)
    with pytest.raises(NotEquivalentError, match="differs is 'b'"):
        check_equivalence(net, other, draw(5, 3))
    inner = Net(lambda net, x: net.layer(x) * net.scale, layer=nn.Linear(3, 4), scale=nn.Parameter(torch.rand(4)))
    net = nn.Sequential(nn.Identity(), inner)
    other = copy.deepcopy(net)
    other[1].scale.data.mul_(2)
    with pytest.raises(NotEquivalentError, match=r"differs is '1' \(Net\)"):
        check_equivalence(net, other, draw(5, 3))


def test_permuted_outputs_are_recognised():
    torch.manual_seed(0)
    net = MLP(3, (5,), 4)
    other = copy.deepcopy(net)
    other.linears[1].load_state_dict({k: t[[1, 2, 3, 0]] for k, t in net.linears[1].state_dict().items()})
    with pytest.raises(NotEquivalentError, match="the output itself is permuted"):
        check_equivalence(net, other)


def test_other_layers_and_more_layers_are_told():
    torch.manual_seed(0)
    linear, head = nn.Linear(3, 4), nn.Linear(4, 2)
    net = nn.Sequential(linear, nn.Tanh(), head)
    longer = nn.Sequential(linear, nn.Tanh(), head, nn.ReLU())
    with pytest.raises(
        NotEquivalentError, match="Up to '2' they agree; then one runs 'the network itself' and the other '3'"
    ):
        check_equivalence(net, longer, draw(5, 3))
    with pytest.raises(NotEquivalentError, match=r"one returns shapes .*5, 2.* and the other .*5, 4"):
        check_equivalence(net, nn.Sequential(linear, nn.Tanh()), draw(5, 3))
    calls_less = Net(lambda net, x: net.a(x) * 2, a=linear)
    calls_more = Net(lambda net, x: net.a(x) + net.a(x) * 2, a=linear)
    with pytest.raises(NotEquivalentError, match="one runs 'the network itself' and the other 'a'"):
        check_equivalence(calls_less, calls_more, draw(5, 3))


def test_zeros_are_replaced_by_inputs_that_show_more():
    torch.manual_seed(0)
    net = MLP(3, (5,), 2)
    assert not net.example_input_array.any()
    other = copy.deepcopy(net)
    other.linears[0].weight.data.mul_(-1)
    assert torch.equal(net(net.example_input_array), other(net.example_input_array))
    with pytest.raises(NotEquivalentError, match=r"'linears\.0'"):
        check_equivalence(net, other)
    with pytest.raises(NotEquivalentError, match=r"'linears\.0'"):
        check_equivalence(net, other, torch.ones(4, 3))


def test_inputs_stay_where_the_network_does_not_take_others():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            if bool((x < 0).any()):
                raise RuntimeError("negative")
            return self.layer(x)

    torch.manual_seed(0)
    roots = Net(lambda net, x: net.layer(x.sqrt()), layer=nn.Linear(3, 2))
    for net in (Picky(), roots):
        other = copy.deepcopy(net)
        assert check_equivalence(net, other, torch.ones(4, 3)) == 0
        other.layer.weight.data.add_(1)
        with pytest.raises(NotEquivalentError, match="'layer'"):
            check_equivalence(net, other, torch.ones(4, 3))


def two_inputs(net, x, scale, tokens=None):
    hidden = net.layer(x) * scale
    return {"first": hidden, "rest": [hidden.sum(1), (hidden.argmax(1), net.embed(tokens))]}


def make_two_inputs():
    torch.manual_seed(0)
    return Net(two_inputs, layer=nn.Linear(3, 4), embed=nn.Embedding(5, 2))


INPUTS = {
    "tuple": (torch.zeros(2, 3), torch.full((4,), 2.0), torch.tensor([0, 4])),
    "list": [torch.zeros(2, 3), torch.full((4,), 2.0), torch.tensor([0, 4])],
    "dictionary": {"x": torch.zeros(2, 3), "scale": torch.full((4,), 2.0), "tokens": torch.tensor([0, 4])},
}


@pytest.mark.parametrize("name", ["tuple", "list"])
def test_several_inputs_and_outputs(name):
    net, inputs = make_two_inputs(), INPUTS[name]
    kept = copy.deepcopy(inputs)
    assert check_equivalence(net, copy.deepcopy(net), inputs) == 0
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
    for part in ("layer", "embed"):
        other = copy.deepcopy(net)
        other.get_submodule(part).weight.data[0, 0] += 1
        with pytest.raises(NotEquivalentError, match=f"'{part}'"):
            check_equivalence(net, other, inputs)


def test_inputs_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = nn.Embedding(5, 3), nn.Linear(3, 4)

        def forward(self, *, tokens, scale):
            return self.layer(self.embed(tokens)) * scale

    torch.manual_seed(0)
    net = Named()
    inputs = {"tokens": torch.tensor([[0, 4]]), "scale": torch.ones(4)}
    assert check_equivalence(net, copy.deepcopy(net), inputs) == 0
    other = copy.deepcopy(net)
    other.embed.weight.data[4] += 1
    with pytest.raises(NotEquivalentError, match="'embed'"):
        check_equivalence(net, other, inputs)


def test_numbers_that_are_not_finite():
    torch.manual_seed(0)
    net = MLP(3, (5,), 2)
    for value in (float("nan"), float("inf")):
        broken = copy.deepcopy(net)
        broken.linears[1].bias.data[0] = value
        for pair in ((net, broken), (broken, net)):
            with pytest.raises(NotEquivalentError, match=r"deviate by inf .*'linears\.1'"):
                check_equivalence(*pair)
        assert check_equivalence(broken, copy.deepcopy(broken)) == 0


def test_deviation_by_hand():
    a = torch.tensor([1.0, -4.0, 2.0])
    nan, inf = float("nan"), float("inf")
    assert deviation(a, torch.tensor([1.0, -4.0, 2.5])) == 0.125
    assert deviation(torch.zeros(3), torch.zeros(3)) == 0
    assert deviation(torch.zeros(3), a) == inf
    assert deviation(torch.empty(0), torch.empty(0)) == 0
    assert deviation(torch.tensor([nan, inf, 2.0]), torch.tensor([nan, inf, 1.0])) == 0.5
    assert deviation(torch.tensor([nan, inf, 2.0]), torch.tensor([nan, -inf, 2.0])) == inf
    assert deviation(torch.tensor([nan, 1.0]), torch.tensor([1.0, nan])) == inf
    assert deviation(torch.tensor([1, 2]), torch.tensor([1, 3])) == inf
    assert deviation(torch.tensor([True]), torch.tensor([True])) == 0
    assert deviation(torch.tensor([3 + 4j, 0]), torch.tensor([3 + 4.4j, 0])) == pytest.approx(0.1)
    assert deviation(torch.tensor([1 + 0j]), torch.tensor([1.0])) == inf


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tolerance_follows_from_the_type(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8, bias=False), nn.Linear(8, 2)).double()
    inputs = draw(6, 3).double()

    def scaled(by):
        other = copy.deepcopy(net)
        with torch.no_grad():
            other[0].weight.mul_(1 + by)
            other[1].bias.mul_(1 + by)
        return other

    a, b, c = copy.deepcopy(net).to(dtype), scaled(0.3 * TOLERANCES[dtype]), scaled(3 * TOLERANCES[dtype])
    assert check_equivalence(a, b.to(dtype), inputs.to(dtype)) <= TOLERANCES[dtype]
    with pytest.raises(NotEquivalentError, match="more than rounding"):
        check_equivalence(a, c.to(dtype), inputs.to(dtype))
    assert check_equivalence(a, c.to(dtype), inputs.to(dtype), tolerance=10 * TOLERANCES[dtype]) > TOLERANCES[dtype]


def test_the_coarsest_type_of_both_networks_counts():
    torch.manual_seed(0)
    net = Net(lambda net, x: net.layer(x.to(net.layer.weight.dtype)), layer=nn.Linear(3, 2))
    rounded = copy.deepcopy(net).bfloat16()
    for pair in ((net, rounded), (rounded, net)):
        assert 1e-4 < check_equivalence(*pair, draw(4, 3)) < 0.1


def test_tf32_is_recognised():
    cudnn, before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        assert not rounds_to_tf32()
        torch.set_float32_matmul_precision("high")
        assert rounds_to_tf32()
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        assert rounds_to_tf32()
    finally:
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.set_float32_matmul_precision(before)


class Counting(nn.Module):
    """Draws random numbers in both modes, and counts its calls with a hook."""

    def __init__(self, fails=False):
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.fails, self.calls = fails, []
        self.layer.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, x):
        out = F.dropout(self.dropout(self.norm(self.layer(x))), 0.3, training=True)
        if self.fails:
            raise RuntimeError("no")
        return out


def snapshot(net):
    return {
        "modes": [module.training for module in net.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()],
        "state": {name: tensor.clone() for name, tensor in net.state_dict().items()},
        "gradients": [parameter.grad for parameter in net.parameters()],
        "attributes": sorted(net.__dict__),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "grad": torch.is_grad_enabled(),
        "attention": torch.backends.mha.get_fastpath_enabled(),
    }


def assert_as_before(before, net):
    after = snapshot(net)
    state = before["state"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in after.pop("state").items())
    assert {key: value for key, value in before.items() if key != "state"} == after


@pytest.mark.parametrize("case", ["equal", "different", "failing"])
def test_networks_and_random_state_are_as_before(case):
    torch.manual_seed(0)
    net = Counting().train()
    net.dropout.eval()
    other = copy.deepcopy(net)
    if case == "different":
        other.layer.weight.data.add_(1)
    other.fails = case == "failing"
    before = snapshot(net), snapshot(other)
    if case == "equal":
        assert check_equivalence(net, other, draw(5, 3)) == 0  # the same random numbers in both
    else:
        error = {"different": NotEquivalentError, "failing": ValueError}[case]
        with pytest.raises(
            error, match={"different": "'layer'", "failing": "cannot be called with the example input"}[case]
        ):
            check_equivalence(net, other, draw(5, 3))
    assert_as_before(before[0], net)
    assert_as_before(before[1], other)
    assert net.calls


def test_no_example_input():
    with pytest.raises(ValueError, match="has no `example_input_array`"):
        check_equivalence(nn.Linear(2, 2), nn.Linear(2, 2))
