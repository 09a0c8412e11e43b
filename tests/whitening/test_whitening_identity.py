"""SGD on the canonical parameters of whitened layers is SGD on the paper's (V, d), iterate by iterate."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from whitening_reference import CONVOLUTIONS, ReferenceLayer, covariance_of, rows_of, zca

from lightning_symmetry.whitening import InputStatistics, collect_statistics, reparametrize, whiten, whitened_layers

EPS, STEPS, EVERY = 0.1, 50, 10
OPTIMIZERS = {
    "sgd": {"lr": 0.02},
    "momentum": {"lr": 0.005, "momentum": 0.9},
    "nesterov": {"lr": 0.005, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "decay": {"lr": 0.02, "weight_decay": 0.1},
}


def linear(*sizes):
    def build():
        layers = [nn.Linear(n, m) for n, m in pairwise(sizes)]
        return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])

    return build, (sizes[0],)


def convolutional(case):
    shape = (4, 7) if case == "1d" else (4, 6, 7)
    return lambda: nn.Sequential(CONVOLUTIONS[case](), nn.Tanh()), shape


NETWORKS = {"linear": linear(6, 7, 5), **{case: convolutional(case) for case in CONVOLUTIONS}}


def build(case):
    torch.manual_seed(3)
    make, shape = NETWORKS[case]
    return make().double(), shape


def whiten_reference(reference, input, optimizer):
    """Reparametrise every reference layer with statistics of its own input, the dense way."""
    h = input
    with torch.no_grad():
        for layer in reference:
            if isinstance(layer, ReferenceLayer):
                moments = [covariance_of(rows) for rows in rows_of(layer.plain[0], h)]
                after = layer(h)
                U = torch.stack([zca(covariance, EPS) for _, covariance in moments])
                layer.reparametrize(U, torch.stack([mean for mean, _ in moments]), optimizer)
                h = layer(h)
                torch.testing.assert_close(h, after)
            else:
                h = layer(h)


def loss_of(output, target):
    return 6 * (output.flatten(1) - target[:, : output[0].numel()]).square().mean()  # a sum over pixels is chaotic


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("case", NETWORKS)
def test_iterates_agree(case, settings):
    net, shape = build(case)
    reference = nn.Sequential(*[ReferenceLayer(m) if hasattr(m, "weight") else m for m in net])
    whiten(net)
    layers = [m for m in reference if isinstance(m, ReferenceLayer)]
    ours = torch.optim.SGD(net.parameters(), **OPTIMIZERS[settings])
    theirs = torch.optim.SGD(reference.parameters(), **OPTIMIZERS[settings])
    moved = [w.weight.detach().clone() for w in whitened_layers(net).values()]
    for step in range(STEPS):
        input = torch.randn(4 + 4 * (step % 2), *shape, dtype=torch.float64) + 0.5  # both sides of a linear layer
        target = torch.randn(len(input), 1000, dtype=torch.float64)
        if step % EVERY == 0:
            samples = torch.randn(3 if step % 20 else 30, *shape, dtype=torch.float64) * (1 + step / 50)
            assert reparametrize(net, collect_statistics(net, lambda s=samples: net(s)), EPS) == {}
            whiten_reference(reference, samples, theirs)
        for model, optimizer in ((net, ours), (reference, theirs)):
            optimizer.zero_grad()
            loss_of(model(input), target).backward()
            optimizer.step()
    for old, whitened, layer in zip(moved, whitened_layers(net).values(), layers, strict=True):
        W, b = layer.canonical(layer.V, layer.d)
        torch.testing.assert_close(whitened.weight, W, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(whitened.bias, b, rtol=1e-10, atol=1e-10)
        assert (whitened.weight - old).abs().max() > 0.01
        if "momentum" in OPTIMIZERS[settings]:  # the buffers are each other's transport
            buffers = [theirs.state[p]["momentum_buffer"] for p in (layer.V, layer.d)]
            for buffer, parameter in zip(layer.canonical(*buffers), (whitened.weight, whitened.bias), strict=True):
                torch.testing.assert_close(ours.state[parameter]["momentum_buffer"], buffer, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("case", ["linear", "padding", "groups", "reflect same", "1d"])
def test_the_explicit_form_makes_the_same_steps(case, settings):
    nets = [whiten(build(case)[0], explicit=explicit) for explicit in (False, True)]
    shape = build(case)[1]
    optimizers = [torch.optim.SGD(net.parameters(), **OPTIMIZERS[settings]) for net in nets]
    for step in range(STEPS):
        input = torch.randn(4 + 4 * (step % 2), *shape, dtype=torch.float64) + 0.5
        target = torch.randn(len(input), 1000, dtype=torch.float64)
        if step % EVERY == 0:
            samples = torch.randn(3 if step % 20 else 30, *shape, dtype=torch.float64)
            buffers = momentum_of(nets[1], optimizers[1], lambda layer, *pair: layer.to_canonical(*pair))
            for net in nets:
                assert reparametrize(net, collect_statistics(net, lambda n=net, s=samples: n(s)), EPS) == {}
            for layer, pair in buffers.items():
                for p, value in zip((layer.weight, layer.bias), layer.to_whitened(*pair), strict=True):
                    optimizers[1].state[p]["momentum_buffer"].copy_(value)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(net(input), target).backward()
            optimizer.step()
    for name, value in nets[0].state_dict().items():
        torch.testing.assert_close(nets[1].state_dict()[name], value, rtol=1e-10, atol=1e-10)


def momentum_of(net, optimizer, function):
    layers = [m for m in whitened_layers(net).values() if "momentum_buffer" in optimizer.state.get(m.weight, {})]
    return {m: function(m, *(optimizer.state[p]["momentum_buffer"] for p in (m.weight, m.bias))) for m in layers}


@pytest.mark.parametrize("rows", [3, 40], ids=["activation side", "gradient side"])
@pytest.mark.parametrize("mode", ["full", "diagonal", "center"])
@pytest.mark.parametrize(("count", "form"), [(4, "rank 3"), (9, "dense"), (60, "dense")])
def test_gradients_of_every_form_and_side(count, form, mode, rows):
    torch.manual_seed(0)
    plain = nn.Linear(12, 10).double()
    net = whiten(nn.Sequential(plain), mode)
    samples, input = torch.randn(count, 12, dtype=torch.float64) + 1, torch.randn(rows, 12, dtype=torch.float64)
    reparametrize(net, collect_statistics(net, lambda: net(samples)), EPS)
    assert net[0].form == {"full": form, "diagonal": "diagonal", "center": "centred"}[mode]
    mean, covariance = covariance_of(samples)
    P = torch.linalg.inv(covariance + EPS * torch.eye(12, dtype=torch.float64))
    P = {"full": P, "diagonal": torch.diag(1 / (covariance.diagonal() + EPS)), "center": torch.eye(12).double()}[mode]
    input.requires_grad_()
    output = net(input)
    delta = torch.randn_like(output)
    output.backward(delta)
    expected = delta.T @ ((input.detach() - mean) @ P)
    torch.testing.assert_close(plain.weight.grad, expected)
    torch.testing.assert_close(plain.bias.grad, delta.sum(0) - expected @ mean)
    torch.testing.assert_close(input.grad, delta @ plain.weight)
    U, c = net[0].whitening_matrix()
    torch.testing.assert_close(U[0] @ U[0], P)
    torch.testing.assert_close(c[0], mean)


@pytest.mark.parametrize("count", [8, 200])
def test_variances_far_below_the_damping_count_as_none(count):
    torch.manual_seed(0)
    spread = torch.tensor([1.0] * 3 + [1e-3] * 9, dtype=torch.float64)
    samples = torch.randn(count, 12, dtype=torch.float64) * spread
    P = torch.linalg.inv(covariance_of(samples)[1] + EPS * torch.eye(12, dtype=torch.float64))
    roots = []
    for explicit in (False, True):
        net = whiten(nn.Sequential(nn.Linear(12, 10).double()), explicit=explicit)
        reparametrize(net, collect_statistics(net, lambda net=net: net(samples)), EPS)
        assert net[0].form == "rank 3"
        roots.append(net[0].whitening_matrix()[0][0])
    torch.testing.assert_close(roots[0], roots[1])  # both forms leave out the same ones
    assert torch.linalg.matrix_norm(roots[0] @ roots[0] - P, 2) < 1e-3 / EPS


FROZEN = {"weight": (False, True), "bias": (True, False), "none": (True, None), "both": (False, False)}


@pytest.mark.parametrize("rows", [3, 40], ids=["activation side", "gradient side"])
@pytest.mark.parametrize("case", FROZEN)
def test_without_bias_and_frozen_parameters(case, rows):
    trains, shifts = FROZEN[case]
    plain = nn.Linear(12, 10, bias=shifts is not None).double()
    net = whiten(nn.Sequential(plain))
    samples = torch.randn(9, 12, dtype=torch.float64) + 1
    centred = InputStatistics(12, offset=shifts is not None)  # frozen only after c was set
    centred.add(samples)
    reparametrize(net, {"0": centred}, EPS)
    plain.weight.requires_grad_(trains)
    if shifts is not None:
        plain.bias.requires_grad_(shifts)
    input = torch.randn(rows, 12, dtype=torch.float64, requires_grad=True)
    output = net(input)
    delta = torch.randn_like(output)
    output.backward(delta)
    P = torch.linalg.inv(covariance_of(samples)[1] + EPS * torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(input.grad, delta @ plain.weight)
    if trains:
        torch.testing.assert_close(plain.weight.grad, delta.T @ input.detach() @ P)
    else:
        assert plain.weight.grad is None
    if shifts:
        torch.testing.assert_close(plain.bias.grad, delta.sum(0))
    elif shifts is False:
        assert plain.bias.grad is None
