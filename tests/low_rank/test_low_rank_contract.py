"""Factorised networks as modules: copies, transforms, compilation, precision, round trips."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_contract import COPIES, assert_same, gradients
from low_rank_networks import EveryKind
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from lightning_symmetry import LowRankEmbedding, LowRankLinear, factorize, recompose
from lightning_symmetry.low_rank import LowRankMultiheadAttention
from lightning_symmetry.surgery import plain_copy


def network(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    net = EveryKind().to(dtype)
    overrides = {"image": {"scheme": "1xk-kx1", "rank": 2}, "along": {"rank": 2}, "attention": {"min_saving": 0.3}}
    return factorize(net, 0.25, overrides=overrides, **settings).eval()


def tokens(count=3):
    return torch.randint(0, 30, (count, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", COPIES)
def test_copies_have_the_function_and_the_gradients(case):
    net = network()
    assert len(net.factorization_report.changed) == 5
    again = COPIES[case](net)
    assert {id(p) for p in again.parameters()}.isdisjoint(id(p) for p in net.parameters())
    assert_same(gradients(again, tokens()), gradients(net, tokens()), rtol=1e-4, atol=1e-4)
    again.load_state_dict(net.state_dict())
    assert list(again.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize("count", [3, 9], ids=["looked up", "multiplied first"])
def test_functional_transforms(count):
    net, x = network(torch.float64), tokens(count)
    output, expected = gradients(net, x)
    parameters, buffers = {n: p.detach() for n, p in net.named_parameters()}, dict(net.named_buffers())
    torch.testing.assert_close(functional_call(net, parameters, (x,)), output)

    def loss(parameters, x=x):
        return functional_call(net, (parameters, buffers), (x,)).square().sum()

    for name, value in grad(loss)(parameters).items():
        torch.testing.assert_close(value, expected[name])
    singles = vmap(lambda p, sample: grad(loss)(p, sample[None]), in_dims=(None, 0))(parameters, x)
    for name, value in expected.items():
        torch.testing.assert_close(singles[name].sum(0), value)

    nets = [net, copy.deepcopy(net)]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.mul_(1.1)
    stacked = {name: p.detach() for name, p in stack_module_state(nets)[0].items()}
    values = vmap(grad(loss))(stacked)
    for index, one in enumerate(nets):
        for name, value in gradients(one, x)[1].items():
            torch.testing.assert_close(values[name][index], value)


def test_traced_whole_by_the_compiler():
    net = network()
    expected = gradients(net, tokens())
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert_same(gradients(net, tokens(), compiled), expected, rtol=1e-4, atol=1e-4)
    assert_same(gradients(net, tokens(9), compiled), gradients(net, tokens(9)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled():
    net = network()
    expected = gradients(net, tokens())
    torch.compiler.reset()
    assert_same(gradients(net, tokens(), torch.compile(net)), expected, rtol=1e-3, atol=1e-4)


def test_autocast():
    net = network()
    expected = gradients(net, tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(tokens())
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
    torch.testing.assert_close(output.float(), expected[0], rtol=0.1, atol=0.1)
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def layers_of(net):
    return {name: type(m) for name, m in net.named_modules()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recompose_gives_the_plain_network_with_the_product(dtype):
    torch.manual_seed(0)
    plain = EveryKind().to(dtype)
    net = network(dtype)
    bias = net.head.bias
    net.head.left.requires_grad_(False)
    net.along.train()
    expected = net(tokens())
    copied = plain_copy(net)
    assert recompose(net) is net
    for one in (net, copied):
        assert layers_of(one) == layers_of(plain)
        assert list(one.state_dict()) == list(plain.state_dict())
        torch.testing.assert_close(one(tokens()), expected)
        assert (one.head.weight.requires_grad, one.head.bias.requires_grad) == (False, True)
        assert (one.along.training, one.head.training) == (True, False)
        assert one.head.weight.dtype == dtype
    assert net.head.bias is bias
    assert copied.head.bias is not bias
    assert not hasattr(net, "factorization_report")
    assert recompose(net) is net


@pytest.mark.parametrize("frozen", [True, False])
def test_new_factors_have_what_the_weight_had(frozen):
    layer = nn.Linear(20, 16, dtype=torch.float64).eval()
    layer.weight.requires_grad_(not frozen)
    low = LowRankLinear.from_layer(layer, 4)
    assert [p.requires_grad for p in (low.left, low.right, low.bias)] == [not frozen, not frozen, True]
    assert low.bias is layer.bias
    assert not low.training
    assert [name for name, _ in low.named_parameters()] == ["left", "right", "bias"]
    assert low.to_layer().weight.requires_grad != frozen


def test_a_round_trip_at_full_rank_keeps_the_function():
    torch.manual_seed(0)
    net = EveryKind().eval()
    expected = net(tokens())
    factorize(net, 1.0, min_saving=-1)
    assert isinstance(net.table, LowRankEmbedding)
    assert isinstance(net.attention, LowRankMultiheadAttention)
    torch.testing.assert_close(net(tokens()), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recompose(net)(tokens()), expected, rtol=1e-5, atol=1e-5)
    factorize(net, 1.0, min_saving=-1)
    torch.testing.assert_close(net(tokens()), expected, rtol=1e-5, atol=1e-5)
