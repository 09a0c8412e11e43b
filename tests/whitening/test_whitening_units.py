"""PRONG+: the gradients are those of P' = U D^2 U with a dense D from the moving average of all rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from units_reference import EPS, EYE, MOMENTUM, Mixture, random, scaled, shown, train
from whitening_reference import CONVOLUTIONS, rows_of, zca

from lightning_symmetry import asymmetrize
from lightning_symmetry.whitening import collect_statistics, reparametrize, rescale_units, whiten


@pytest.mark.parametrize("rows", [3, 40], ids=["activation side", "gradient side"])
@pytest.mark.parametrize(
    ("count", "mode", "form"), [(4, "full", "rank 3"), (60, "full", "dense"), (9, "diagonal", "diagonal")]
)
def test_gradients_of_every_form_and_side(count, mode, form, rows):
    plain = nn.Linear(12, 10).double()
    net = whiten(nn.Sequential(plain), mode)
    inputs = shown(12, count=count)
    train(net, inputs)
    mean, covariance = inputs[0].mean(0), Mixture(inputs[0]).covariance()
    U = zca(covariance.diag().diag() if mode == "diagonal" else covariance, EPS)
    mixture = Mixture(inputs[0])
    for input in inputs[1:]:
        mixture.add(input)
    v, P = scaled(U, mixture)
    assert v.log().abs().max() > 1
    assert net[0].form == f"{form}, scaled units"
    torch.testing.assert_close(net[0].units.variance[0], v, rtol=1e-10, atol=0)
    input = random(rows, 12, seed=9).requires_grad_()
    output = net(input)
    delta = torch.randn_like(output)
    output.backward(delta)
    expected = delta.T @ ((input.detach() - mean) @ P)
    torch.testing.assert_close(plain.weight.grad, expected)
    torch.testing.assert_close(plain.bias.grad, delta.sum(0) - expected @ mean)
    torch.testing.assert_close(input.grad, delta @ plain.weight)
    root, center = net[0].whitening_matrix()
    torch.testing.assert_close(root[0], torch.diag(v.rsqrt()) @ U)
    torch.testing.assert_close(center[0], mean)
    torch.testing.assert_close(net[0].precondition_rows(EYE[None])[0], P)
    assert torch.linalg.eigvalsh(P).sum() < 12 / EPS


@pytest.mark.parametrize("case", ["padding", "stride", "groups", "depthwise", "1d"])
def test_convolutions(case):
    layer = CONVOLUTIONS[case]().double()
    shape = (4, 7) if case == "1d" else (4, 6, 7)
    net = whiten(nn.Sequential(layer))
    inputs = shown(*shape)
    train(net, inputs)
    input = random(5, *shape, seed=9)
    output = net(input)
    delta = torch.randn_like(output)
    output.backward(delta)
    plain = copy.deepcopy(net[0].to_layer())
    plain.zero_grad()
    plain(input).backward(delta)
    rows = [rows_of(layer, each) for each in inputs]
    taps = plain.weight.grad.unflatten(0, (layer.groups, -1))  # (G, M / G, N, *kernel)
    bias = plain.bias.grad.unflatten(0, (layer.groups, -1))
    for group in range(layer.groups):
        mixture = Mixture(rows[0][group])
        U = zca(mixture.covariance(), EPS)
        for each in rows[1:]:
            mixture.add(each[group])
        v, P = scaled(U, mixture)
        torch.testing.assert_close(net[0].units.variance[group], v, rtol=1e-10, atol=0)
        mean = rows[0][group].mean(0)
        outer = (bias[group][:, None] * mean).view(*taps[group].shape[:2], *[1] * (layer.weight.ndim - 2))
        expected = torch.einsum("mi...,ij->mj...", taps[group] - outer, P)
        ours = net[0].weight.grad.unflatten(0, (layer.groups, -1))[group]
        torch.testing.assert_close(ours, expected)
        shift = torch.einsum("mi...,i->m...", expected, mean).reshape(len(expected), -1).sum(1)
        torch.testing.assert_close(net[0].bias.grad.unflatten(0, (layer.groups, -1))[group], bias[group] - shift)


@pytest.mark.parametrize("norm", [False, True], ids=["about zero", "batch norm"])
def test_without_bias(norm):
    """Variances are about zero as the covariance is, or about the mean where a batch norm follows; c = 0."""
    net = nn.Sequential(nn.Linear(12, 10, bias=False), *([nn.BatchNorm1d(10)] if norm else [])).double()
    whiten(net)
    inputs = shown(12)
    train(net, inputs)
    mixture = Mixture(inputs[0], centred=norm)
    U = zca(mixture.covariance(), EPS)
    for input in inputs[1:]:
        mixture.add(input)
    torch.testing.assert_close(net[0].units.variance[0], scaled(U, mixture)[0], rtol=1e-10, atol=0)
    assert net[0].whitening_matrix()[1].abs().max() == 0


def test_fixed_entries_see_the_scaled_metric():
    net = whiten(asymmetrize(nn.Sequential(nn.Linear(12, 6)).double(), n_fix=4))
    train(net, shown(12))
    layer = net[0]
    (P,) = layer.precondition_rows(EYE[None])
    assert (P - torch.diag(P.diagonal())).abs().max() > 0.01
    input, delta = random(30, 12, seed=8), random(30, 6, seed=9)
    mean = layer.whitening_matrix()[1][0]
    net(input).backward(delta)
    kept = layer.trainable_entries()
    expected = (kept * (delta.T @ input) - delta.sum(0)[:, None] * mean) @ P
    torch.testing.assert_close(layer.bias.grad, delta.sum(0) - expected @ mean)
    torch.testing.assert_close(layer.weight.grad, kept * expected)


@pytest.mark.parametrize("rows", [3, 40], ids=["activation side", "gradient side"])
@pytest.mark.parametrize("count", [4, 60])
@pytest.mark.parametrize("mode", ["full", "diagonal"])
def test_it_begins_as_plain_whitening_and_stays_so_on_the_same_statistics(mode, count, rows):
    samples, input = random(count, 12) + 1, random(rows, 12, seed=1)
    gradients = []
    for unit_rows, again in ((None, False), (1000, False), (1000, True)):
        torch.manual_seed(0)
        net = whiten(nn.Sequential(nn.Linear(12, 10).double()), mode)
        reparametrize(net, collect_statistics(net, lambda net=net: net(samples)), EPS, unit_rows=unit_rows)
        if unit_rows:
            assert torch.equal(net[0].units.variance, torch.ones(1, 12).double())
        if again:
            net(samples)
            rescale_units(net, MOMENTUM)
            torch.testing.assert_close(net[0].units.variance, torch.ones(1, 12).double(), rtol=1e-12, atol=0)
            assert net[0].units.mean.any()
        net(input).square().sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    for ours in gradients[1:]:
        torch.testing.assert_close(ours, gradients[0], rtol=1e-11, atol=1e-11)


def test_what_counts():
    """Training passes with gradients alone; a batch with a value that is not finite is none; without any v stays."""
    net = whiten(nn.Sequential(nn.Linear(12, 10).double(), nn.Tanh(), nn.Linear(10, 3).double()))
    inputs = shown(12)
    train(net, inputs)
    before = [copy.deepcopy(net[i].units) for i in (0, 2)]
    broken = inputs[0].clone()
    broken[3, 5] = torch.nan
    with torch.no_grad():
        net(inputs[1])
    net.eval()(inputs[1])
    net.train()(broken)
    torch.func.vmap(net)(inputs[1])
    rescale_units(net, MOMENTUM)
    net[2].weight.requires_grad_(False)
    net[2](random(4, 10))
    rescale_units(net, MOMENTUM)
    for layer, units in zip((net[0], net[2]), before, strict=True):
        assert torch.equal(layer.units.variance, units.variance)
        assert torch.equal(layer.units.mean, units.mean)
    net(inputs[1])
    rescale_units(net, MOMENTUM)
    assert not torch.equal(net[0].units.variance, before[0].variance)
    assert torch.equal(net[2].units.variance, before[1].variance)


def test_calls_until_the_next_step_are_pooled():
    inputs, variances = shown(12), []
    for parts in (inputs[1:2], inputs[1].split([1, 2, len(inputs[1]) - 3])):
        net = whiten(nn.Sequential(nn.Linear(12, 10).double()))
        train(net, inputs[:1])
        for part in parts:
            net(part)
        rescale_units(net, MOMENTUM)
        variances.append(net[0].units.variance)
    torch.testing.assert_close(*variances, rtol=1e-13, atol=0)


def test_one_sum_over_processes_serves_all_layers():
    """As if two processes had seen the same rows."""
    variances = []
    for processes in (1, 2):
        torch.manual_seed(0)
        net = whiten(nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)).double())
        train(net, shown(12)[:1])
        net(shown(12)[1])
        calls = []
        rescale_units(net, MOMENTUM, lambda sums, calls=calls, count=processes: calls.append(sums) or count * sums)
        assert [len(sums) for sums in calls] == [2 + 2 * 22]
        variances.append([net[i].units.variance for i in (0, 2)])
    for one, two in zip(*variances, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-14, atol=0)
        assert (one != 1).all()
