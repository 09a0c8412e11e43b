"""Whitened layers with fixed entries: constants stay to the bit, steps are those of the restricted metric."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from whitening_reference import covariance_of

from lightning_symmetry import AsymmetricConv2d, AsymmetricLinear, asymmetrize, fixed_fraction
from lightning_symmetry.surgery import constants_of, plain_copy
from lightning_symmetry.whitening import collect_statistics, reparametrize, unwhiten, whiten, whitened_layers

EPS = 0.1


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(4, 6, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular"),
    ]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(80, 12), nn.Tanh(), nn.Linear(12, 7)).to(dtype)
    return asymmetrize(net, n_fix=3, kappa=0.5)


def images(count):
    return torch.rand(count, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def whitened(count=30):
    net = whiten(network())
    samples = images(count)
    assert reparametrize(net, collect_statistics(net, lambda: net(samples)), EPS) == {}
    return net


def test_layers_keep_their_kind_and_names():
    net, plain = whitened(), network()
    assert len(whitened_layers(net)) == 4
    assert isinstance(net[0], AsymmetricConv2d)
    assert isinstance(net[4], AsymmetricLinear)
    assert fixed_fraction(net) == fixed_fraction(plain)
    assert list(constants_of(net)) == list(constants_of(plain))
    assert list(net.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value)
    assert torch.equal(net(images(3)), plain(images(3)))
    assert "form='dense'" in repr(net[6])
    parameters = dict(net.named_parameters())
    unwhiten(net)
    assert [type(m) for m in net] == [type(m) for m in plain]
    assert all(p is parameters[name] for name, p in net.named_parameters())
    assert torch.equal(net(images(3)), plain(images(3)))


@pytest.mark.parametrize("rows", [2, 40])
def test_the_gradient_is_that_of_the_restricted_metric(rows):
    torch.manual_seed(0)
    net = whiten(asymmetrize(nn.Sequential(nn.Linear(9, 6)).double(), n_fix=4))
    layer = net[0]
    samples, x = torch.randn(30, 9, dtype=torch.float64) + 1, torch.randn(rows, 9, dtype=torch.float64)
    reparametrize(net, collect_statistics(net, lambda: net(samples)), EPS)
    delta = torch.randn(rows, 6, dtype=torch.float64)
    net(x).backward(delta)
    mean, covariance = covariance_of(samples)
    P = torch.linalg.inv(covariance + EPS * torch.eye(9, dtype=torch.float64))
    # The metric of (W, b) of a row, J J^T for theta = J Omega, on the entries that are trained.
    metric = torch.zeros(10, 10, dtype=torch.float64)
    metric[:9, :9], metric[9, 9] = P, 1 + mean @ P @ mean
    metric[:9, 9] = metric[9, :9] = -P @ mean
    plain = torch.cat([delta.T @ x, delta.sum(0)[:, None]], 1)
    for row in range(6):
        kept = torch.cat([layer.trainable_entries()[row], torch.tensor([True])])
        expected = torch.zeros(10, dtype=torch.float64)
        expected[kept] = metric[kept][:, kept] @ plain[row, kept]
        torch.testing.assert_close(layer.weight.grad[row], expected[:9])
        torch.testing.assert_close(layer.bias.grad[row], expected[9])


COPIES = {"itself": lambda net: net, "deepcopy": copy.deepcopy, "pickle": lambda net: pickle.loads(pickle.dumps(net))}


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("count", [6, 60])
def test_constants_stay_to_the_bit_while_the_rest_is_trained(case, count):
    net = COPIES[case](whitened(count))
    constants = {name: value.clone() for name, value in constants_of(net).items()}
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    losses = []
    for step in range(20):
        if step % 5 == 0:
            reparametrize(net, collect_statistics(net, lambda: net(images(count + 1))), EPS)
        optimizer.zero_grad()
        loss = net(images(8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = net.state_dict()
    for name, layer in whitened_layers(net).items():
        trainable = layer.trainable_entries()
        old, new = before[f"{name}.weight"], after[f"{name}.weight"]
        assert torch.equal(old[~trainable], new[~trainable])
        assert not (old[trainable] == new[trainable]).any()
        assert not layer.weight.grad[~trainable].any()
    for name, value in constants.items():
        assert torch.equal(constants_of(net)[name], value)
    copied = plain_copy(net)
    assert type(copied[4]) is nn.Linear
    torch.testing.assert_close(copied(images(3)), net(images(3)))


def test_there_is_no_explicit_form():
    with pytest.raises(ValueError, match=r"nothing to convert(?s:.)*it has no explicit form"):
        whiten(network(), explicit=True)


def test_compiled_and_moved():
    net = whitened().float()
    assert all(
        t.dtype == torch.float32
        for layer in whitened_layers(net).values()
        for t in layer.whitening_state().values()
        if t is not None
    )
    x = images(5).float()
    net(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    torch.compiler.reset()
    torch.compile(net, backend="eager")(x).square().sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-4)
