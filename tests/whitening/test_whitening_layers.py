"""Whitened layers as modules: copies, transforms, compilation, precision, memory formats."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_contract import COPIES, assert_same, gradients
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from lightning_symmetry.surgery import plain_copy
from lightning_symmetry.whitening import collect_statistics, reparametrize, unwhiten, whiten, whitened_layers

FORMS = pytest.mark.parametrize("explicit", [False, True], ids=["canonical", "explicit"])
COUNTS = pytest.mark.parametrize("count", [6, 100], ids=["low rank", "dense"])


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 24), nn.Tanh(), nn.Linear(24, 5)).to(dtype)


def images(count=4, dtype=torch.float32):
    return torch.rand(count, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def whitened(explicit, count=6, dtype=torch.float32):
    net = whiten(network(dtype), explicit=explicit).eval()
    samples = images(count, dtype)
    assert reparametrize(net, collect_statistics(net, lambda: net(samples)), 0.1) == {}
    return net


@FORMS
@COUNTS
@pytest.mark.parametrize("case", COPIES)
def test_copies_have_the_function_and_the_gradients(case, count, explicit):
    net = whitened(explicit, count)
    again = COPIES[case](net)
    assert {id(p) for p in again.parameters()}.isdisjoint(id(p) for p in net.parameters())
    assert_same(gradients(again, images()), gradients(net, images()), rtol=1e-4, atol=1e-4)
    x = images().to(memory_format=torch.channels_last)
    assert_same(gradients(again, x), gradients(net, images()), rtol=1e-4, atol=1e-4)


@FORMS
@COUNTS
def test_functional_transforms(count, explicit):
    net, x = whitened(explicit, count, torch.float64), images(dtype=torch.float64)
    output, expected = gradients(net, x)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    buffers = dict(net.named_buffers())
    torch.testing.assert_close(functional_call(net, parameters, (x,)), output)

    def loss(parameters):
        return functional_call(net, (parameters, buffers), (x,)).square().sum()

    for name, value in grad(loss)(parameters).items():
        torch.testing.assert_close(value, expected[name])

    nets = [net, copy.deepcopy(net)]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.mul_(1.1)
    stacked, _ = stack_module_state(nets)
    stacked = {name: p.detach() for name, p in stacked.items()}
    outputs = vmap(lambda p: functional_call(net, (p, buffers), (x,)))(stacked)
    values = vmap(grad(loss))(stacked)
    summed = grad(lambda p: vmap(loss)(p).sum())(stacked)
    for index, one in enumerate(nets):
        output, expected = gradients(one, x)
        torch.testing.assert_close(outputs[index], output)
        for name, value in expected.items():
            torch.testing.assert_close(values[name][index], value)
            torch.testing.assert_close(summed[name][index], value)


@COUNTS
def test_gradients_of_single_samples(count):
    net, x = whitened(False, count, torch.float64), images(dtype=torch.float64)
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    parameters = {name: p.detach() for name, p in parameters.items()}

    def loss(p, sample):
        return functional_call(net, (p, buffers), (sample[None],)).square().sum()

    singles = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    _, expected = gradients(net, x)
    for name, value in expected.items():
        torch.testing.assert_close(singles[name].sum(0), value)


@FORMS
@COUNTS
def test_compiled(count, explicit):
    net = whitened(explicit, count)
    expected = gradients(net, images())
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert_same(gradients(net, images(), compiled), expected, rtol=1e-4, atol=1e-4)
    samples = images(40 if count == 6 else 6) * 2
    reparametrize(net, collect_statistics(net, lambda: net(samples)), 0.5)
    after = gradients(net, images())
    assert not torch.allclose(after[1]["7.weight"], expected[1]["7.weight"], rtol=0.01)
    assert_same(gradients(net, images(), compiled), after, rtol=1e-4, atol=1e-4)


@FORMS
@COUNTS
def test_autocast(count, explicit):
    net = whitened(explicit, count)
    expected = gradients(net, images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(images())
        assert output.dtype == torch.bfloat16
        for inside in (False, True):
            net.zero_grad()
            loss = net(images()).float().square().sum()
            if inside:
                loss.backward()
            else:
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
            assert all(p.grad.dtype == torch.float32 for p in net.parameters())
            for name, p in net.named_parameters():  # 8 bits of mantissa, through four layers
                assert (p.grad - expected[1][name]).norm() < 0.1 * expected[1][name].norm(), name
    torch.testing.assert_close(output.float(), expected[0], rtol=0.05, atol=0.05)


@FORMS
@COUNTS
def test_bfloat16_parameters(count, explicit):
    net = whitened(explicit, count)
    expected = gradients(net, images())
    half = copy.deepcopy(net).bfloat16()
    output, grads = gradients(half, images(dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert all(g.dtype == torch.bfloat16 for g in grads.values())
    torch.testing.assert_close(output.float(), expected[0], rtol=0.1, atol=0.1)
    for name, value in grads.items():
        assert (value.float() - expected[1][name]).norm() < 0.2 * expected[1][name].norm(), name
    before = half(images(dtype=torch.bfloat16)).float()
    samples = images(30, torch.bfloat16)
    assert reparametrize(half, collect_statistics(half, lambda: half(samples)), 0.5) == {}
    torch.testing.assert_close(half(images(dtype=torch.bfloat16)).float(), before, rtol=0.1, atol=0.1)


@COUNTS
@pytest.mark.parametrize("half", ["autocast", "parameters"])
def test_small_multipliers_survive_half_precision(count, half):
    torch.manual_seed(0)
    plain, spread = nn.Linear(24, 10), torch.logspace(2, -2, 24)  # multipliers 1 / (lambda + eps) from 1e-4 to 10
    x = (torch.randn(40, 24) * spread).requires_grad_()
    plain = plain.bfloat16() if half == "parameters" else plain
    for explicit in (False, True):
        net = whiten(nn.Sequential(copy.deepcopy(plain)), explicit=explicit)
        samples = (torch.randn(count, 24) * spread).to(plain.weight.dtype)
        reparametrize(net, collect_statistics(net, lambda net=net, samples=samples: net(samples)), 0.1)
        U, c = (t[0] for t in net[0].whitening_matrix())
        for model in (net, plain):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half == "autocast"):
                loss = model(x.to(plain.weight.dtype)).float().sum()
                if not explicit:  # whose own backward pass switches autocast off
                    loss.backward()
            if explicit:
                loss.backward()
        G, g = plain.weight.grad.double(), plain.bias.grad.double()
        whitened = (G - g[:, None] * c) @ U
        expected = whitened if explicit else whitened @ U
        tolerance = 1e-2 if half == "parameters" else 1e-3  # the result is rounded to 8 bits
        # Each direction of the input counts in its own units.
        scale = expected.abs().amax(0)
        error = (net[0].weight.grad.double() - expected).abs().amax(0)
        assert (error <= tolerance * scale.clamp_min(tolerance * float(scale.max()))).all(), (explicit, error / scale)


def test_second_derivatives_are_refused():
    net = whitened(False)
    for x in (images(2), images(40)):
        loss = net(x).square().sum()
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            sum(g.square().sum() for g in grads).backward()


def test_nothing_is_done_where_no_gradient_is_wanted():
    net = whitened(False)
    with torch.no_grad():
        assert torch.equal(net(images()), network().eval()(images()))
    for p in net.parameters():
        p.requires_grad_(False)
    assert not net(images()).requires_grad


def test_inputs_that_require_gradients_and_those_of_many_axes():
    net, plain = whiten(nn.Sequential(nn.Linear(8, 16))), nn.Sequential(nn.Linear(8, 16))
    plain.load_state_dict(net.state_dict())
    samples = torch.randn(5, 8)
    reparametrize(net, collect_statistics(net, lambda: net(samples)), 0.1)
    for shape in [(8,), (2, 3, 8), (5, 8, 8), (0, 8), (2, 8, 3)]:
        x = torch.randn(shape).requires_grad_()
        y = x.transpose(1, 2) if shape[-1] == 3 else x
        output = net(y)
        torch.testing.assert_close(output, plain(y))
        output.square().sum().backward()
        got, x.grad = x.grad, None
        plain(y).square().sum().backward()
        torch.testing.assert_close(got, x.grad)


def test_the_state_dict_is_the_plain_networks():
    net, plain = whitened(False), network()
    assert list(net.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value)
    assert list(dict(net.named_buffers())) == list(dict(plain.named_buffers()))
    plain.load_state_dict(net.state_dict())
    net.load_state_dict(plain.state_dict())


def test_plain_layers_come_back():
    net = whitened(False)
    net[3].weight.requires_grad_(False)
    net.train()[5].eval()
    copied = plain_copy(net)
    assert [type(m) for m in copied] == [type(m) for m in network()]
    assert (copied[3].weight.requires_grad, copied[3].bias.requires_grad, copied[5].training) == (False, True, False)
    assert copied[3].training
    for p, q in zip(copied.parameters(), net.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p is not q
    assert len(whitened_layers(net)) == 4
    unwhiten(net)
    assert [type(m) for m in net] == [type(m) for m in network()]
    assert [m.training for m in net] == [m.training for m in copied]


def test_layers_describe_themselves():
    text = repr(whitened(True))
    assert (
        "ExplicitWhitenedConv2d(4, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=2, bias=False" in text
    )
    assert "ExplicitWhitenedLinear(in_features=128, out_features=24, bias=True, mode='full', form='rank 5')" in text
