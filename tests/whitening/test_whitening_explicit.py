"""The explicit form (V, d): its function through changes of coefficients, its state_dict, and drift."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from whitening_reference import CONVOLUTIONS

from lightning_symmetry.surgery import plain_copy
from lightning_symmetry.whitening import (
    ExplicitWhitenedLinear,
    Whitening,
    WhiteningError,
    collect_statistics,
    load_whitening_state,
    reparametrize,
    unwhiten,
    whiten,
    whitened_layers,
    whitening_state,
)

MODES = ["full", "diagonal", "center"]


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=2, groups=2, stride=2), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(200, 30), nn.Tanh(), nn.Linear(30, 40)).to(dtype)


def images(count, dtype=torch.float32):
    return torch.rand(count, 3, 8, 8, dtype=dtype)


def change(net, count=40, eps=0.1):
    samples = images(count, next(net.parameters()).dtype)
    assert reparametrize(net, collect_statistics(net, lambda: net(samples)), eps) == {}


def deviation(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("eps", [0.01, 1.0])
def test_a_hundred_changes_keep_the_function(mode, explicit, eps):
    plain, x = network(), images(64)
    net = whiten(copy.deepcopy(plain), mode, explicit=explicit)
    expected = plain.double()(x.double())
    for step in range(100):
        change(net, count=10 + step, eps=eps)  # low rank and dense
    assert deviation(net(x).double(), expected) < (1e-5 if explicit else 1e-6)
    assert deviation(net(x[:2]).double(), expected[:2]) < (1e-5 if explicit else 1e-6)
    assert deviation(unwhiten(net)(x).double(), expected) < (1e-5 if explicit else 1e-6)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_padded_borders_are_exact(case):
    plain = CONVOLUTIONS[case]().double()
    x = torch.rand(5, 4, 7, 6, dtype=torch.float64)[..., : None if plain.weight.ndim == 4 else 1].squeeze(-1) + 1
    for explicit in (False, True):
        net = whiten(nn.Sequential(copy.deepcopy(plain)), explicit=explicit)
        reparametrize(net, collect_statistics(net, lambda net=net: net(x)), 1e-3)
        assert whitened_layers(net)["0"].form not in ("identity", "centred")
        torch.testing.assert_close(net(x), plain(x), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(net(x[0]), plain(x[0]), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(net[0].weight, plain.weight, rtol=0.1)


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_those_of_algorithm_1(mode, count):
    plain = nn.Linear(8, 6).double()
    W, b = plain.weight.detach().clone(), plain.bias.detach().clone()
    net = whiten(nn.Sequential(plain), mode, explicit=True)
    x = torch.randn(count, 8, dtype=torch.float64) + 2
    reparametrize(net, collect_statistics(net, lambda: net(x)), 0.1)
    U, c = (t[0] for t in net[0].whitening_matrix())
    torch.testing.assert_close(net[0].weight @ U, W)
    torch.testing.assert_close(net[0].bias, b + W @ c)
    torch.testing.assert_close(net[0].canonical_weight(), W)
    assert c.any()
    torch.testing.assert_close(net(x[:2]), (x[:2] - c) @ U.T @ net[0].weight.T + net[0].bias)
    back = net[0].to_whitened(*net[0].to_canonical(net[0].weight, net[0].bias))
    torch.testing.assert_close(back[0], net[0].weight.detach())
    torch.testing.assert_close(back[1], net[0].bias.detach())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [3, 40])
def test_gradients_on_both_sides_agree(count, bias):
    plain = nn.Linear(8, 6, bias=bias).double()
    net = whiten(nn.Sequential(plain), explicit=True)
    x = torch.randn(count, 8, dtype=torch.float64) + 2
    reparametrize(net, collect_statistics(net, lambda: net(x)), 0.1)
    rows = torch.randn(2, 8, dtype=torch.float64)  # fewer than outputs: the input is transformed
    few = torch.autograd.grad(net(rows).square().sum(), list(net.parameters()))
    weight, b = net[0].canonical_parameters()
    folded = torch.autograd.grad(nn.functional.linear(rows, weight, b).square().sum(), list(net.parameters()))
    for one, other in zip(few, folded, strict=True):
        torch.testing.assert_close(one, other)


def test_the_state_dict_is_the_plain_networks():
    plain = network(torch.float64)
    net = whiten(copy.deepcopy(plain), explicit=True)
    change(net)
    assert not torch.allclose(net[0].weight, plain[0].weight)
    state = net.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
    other = network(torch.float64)
    other.load_state_dict(state)
    x = images(3, torch.float64)
    torch.testing.assert_close(other(x), plain(x))
    torch.manual_seed(1)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.1)
    parameters = dict(net.named_parameters())
    net.load_state_dict(plain.state_dict())
    torch.testing.assert_close(net(x), plain(x))
    assert all(parameters[name] is p for name, p in net.named_parameters())
    net.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(net(x), plain(x))


def test_bad_state_dicts_are_named():
    net = whiten(network(), explicit=True)
    change(net)
    state = net.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"7.weight\""):
        net.load_state_dict({name: value for name, value in state.items() if name != "7.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for 7.weight"):
        net.load_state_dict({**state, "7.weight": torch.zeros(2, 3)})


@pytest.mark.parametrize("explicit", [False, True])
def test_the_whitening_state_continues_to_the_bit(explicit, tmp_path):
    net = whiten(network(), explicit=explicit)
    change(net, count=12)
    again = whiten(network(), explicit=explicit)
    torch.save([net.state_dict(), whitening_state(net)], tmp_path / "state.pt")
    state, coefficients = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state)
    load_whitening_state(again, coefficients)
    x = images(5)
    for model in (net, again):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for name, p in net.named_parameters():
        assert torch.equal(p, dict(again.named_parameters())[name])
    with pytest.raises(ValueError, match="no whitened layer called 'x'"):
        load_whitening_state(net, {"x": {}})


def test_plain_layers_come_back():
    plain = network(torch.float64)
    net = whiten(copy.deepcopy(plain), explicit=True)
    net[2].weight.requires_grad_(False)
    net[5].eval()
    change(net)
    copied = plain_copy(net, keep_affine=True)  # (V, d) of two networks are not on one scale
    assert [type(m) for m in copied] == [type(m) for m in plain]
    x = images(3, torch.float64)
    torch.testing.assert_close(copied(x), plain(x))
    assert (copied[2].weight.requires_grad, copied[2].bias.requires_grad, copied[5].training) == (False, True, False)


def test_coefficients_that_overflow_change_nothing():
    net = whiten(nn.Sequential(nn.Linear(4, 3)), explicit=True)
    before = net[0].weight.detach().clone()
    center = torch.zeros(1, 4, dtype=torch.float64)
    with pytest.raises(WhiteningError, match=r"overflow in torch.float32: choose a larger eps"):
        net[0].set_whitening(Whitening(center, center + 1e60, mode="diagonal"))
    with torch.no_grad():
        net[0].weight[0, 0] = torch.inf
    with pytest.raises(WhiteningError, match="in whitened coordinates are not finite"):
        net[0].set_whitening(Whitening(center, center + 1, mode="diagonal"))
    assert net[0].form == "identity"
    assert torch.equal(net[0].weight[1:], before[1:])


REFUSED = {
    "size": (lambda: Whitening(torch.zeros(1, 3), torch.ones(1, 1)), "1 group.s. of 4 inputs but got a center"),
    "groups": (lambda: Whitening(torch.zeros(2, 4), torch.ones(2, 1)), "1 group.s. of 4 inputs but got a center"),
    "centre": (lambda: Whitening(torch.ones(1, 4), torch.ones(1, 1)), "must have center 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_coefficients(case):
    whitening, message = REFUSED[case]
    layer = ExplicitWhitenedLinear.from_layer(nn.Linear(4, 3, bias=False))
    with pytest.raises(ValueError, match=message):
        layer.set_whitening(whitening())


def test_the_plain_layers_have_the_values_of_the_state_dict():
    net = whiten(network(), explicit=True)
    change(net)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for plain in (plain_copy(net), unwhiten(net)):
        assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
