"""Decay of the product and of the factors, and the paper's equation 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_rank_reference import random_factors
from torch import nn

from lightning_symmetry import LowRankConv2d, LowRankEmbedding, LowRankLinear, asymmetrize, factorize, frobenius_decay
from lightning_symmetry.low_rank import (
    LowRankMultiheadAttention,
    add_frobenius_decay_,
    decay_factors_,
    l2_decay,
    low_rank_maps,
)
from lightning_symmetry.low_rank.projections import DenseProjection
from lightning_symmetry.whitening import whiten


def network():
    """Return factorised layers of every kind, in float64 and with factors of no structure."""
    torch.manual_seed(0)
    layers = {
        "linear": LowRankLinear(7, 5, 3),
        "embedding": LowRankEmbedding(9, 6, 2),
        "convolution": LowRankConv2d(4, 6, 3, 2, groups=2),
        "separable": LowRankConv2d(4, 6, (3, 2), 2, "1xk-kx1", groups=2),
        "attention": LowRankMultiheadAttention.from_layer(nn.MultiheadAttention(8, 2), 3),
        "plain": nn.Linear(4, 4),
    }
    return random_factors(nn.ModuleDict(layers).double())


def mixed():
    """Return the same with plain layers of every kind, tied ones, one with fixed entries, and others with weights."""
    net = network()
    layers = {
        "tied": nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)),
        "convolutions": nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Conv2d(4, 6, (3, 2))),
        "fused": nn.MultiheadAttention(8, 2, add_bias_kv=True),
        "apart": nn.MultiheadAttention(8, 2, kdim=6, vdim=5),
        "projection": LowRankMultiheadAttention.from_layer(
            nn.MultiheadAttention(8, 2, kdim=32, vdim=32), 4, min_saving=0
        ),
        "fixed": asymmetrize(nn.Sequential(nn.Linear(6, 5)), n_fix=2, kappa=0.5),
        "parametrised": nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        "bilinear": nn.Bilinear(2, 3, 4),
        "norm": nn.LayerNorm(5),
    }
    layers["tied"][1].weight = layers["tied"][0].weight
    net.update(layers)
    return net.double()


def dense_weights(net):
    """Return the matrices that only ``dense`` decays, differentiable."""
    assert [type(part) for part in net["projection"].children()].count(DenseProjection) == 2
    return [
        net["plain"].weight,
        net["tied"][0].weight,
        *(layer.weight for layer in net["convolutions"]),
        net["fused"].in_proj_weight,
        net["fused"].out_proj.weight,
        *(getattr(net["apart"], f"{key}_proj_weight") for key in "qkv"),
        net["apart"].out_proj.weight,
        *(part.weight for part in net["projection"].children() if isinstance(part, DenseProjection)),
        net["fixed"][0].canonical_weight(),
    ]


def gradients(net):
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def test_frobenius_decay_is_that_of_the_products():
    net = network()
    weights = [m.canonical_weight() for name, m in low_rank_maps(net).items()]
    expected = 0.05 * sum(w.square().sum() for w in weights)
    penalty = frobenius_decay(net, 0.1)
    torch.testing.assert_close(penalty, expected)
    penalty.backward()
    got = gradients(net)
    net.zero_grad()
    expected.backward()
    for name, value in gradients(net).items():
        assert (value is None) == (got[name] is None), name
        assert (value is None) == ("left" not in name and "right" not in name), name
        if value is not None:
            torch.testing.assert_close(got[name], value)


def test_the_gradient_is_added_in_place():
    net = network()
    penalty = frobenius_decay(net, 0.3)
    factors = [p for m in low_rank_maps(net).values() for p in (m.left, m.right)]
    expected = torch.autograd.grad(penalty, factors)
    start = [torch.randn_like(p) for p in factors]
    for p, g in zip(factors, start, strict=True):
        p.grad = g.clone()
    add_frobenius_decay_(net, 0.3)
    for p, g, more in zip(factors, start, expected, strict=True):
        torch.testing.assert_close(p.grad, g + more)
    assert net["plain"].weight.grad is None
    net.zero_grad()
    add_frobenius_decay_(net, 0.3)
    assert all(p.grad is None for p in net.parameters())


def test_dense_weights_are_penalised_too():
    net = mixed()
    products = [part.canonical_weight() for part in low_rank_maps(net).values()]
    expected = 0.05 * sum(weight.square().sum() for weight in products + dense_weights(net))
    penalty = frobenius_decay(net, 0.1, dense=True)
    torch.testing.assert_close(penalty, expected)
    parameters = dict(net.named_parameters())
    ours, wanted = (torch.autograd.grad(value, parameters.values(), allow_unused=True) for value in (penalty, expected))
    for name, mine, theirs in zip(parameters, ours, wanted, strict=True):
        assert (mine is None) == (theirs is None), name
        torch.testing.assert_close(mine, theirs)
    assert not any(mine is not None for name, mine in zip(parameters, ours, strict=True) if "bias" in name)
    torch.testing.assert_close(frobenius_decay(net, 0.1), 0.05 * sum(weight.square().sum() for weight in products))


def test_dense_gradients_and_decay_are_those_of_the_penalty():
    net = mixed()
    parameters = dict(net.named_parameters())
    wanted = torch.autograd.grad(frobenius_decay(net, 0.3, dense=True), parameters.values(), allow_unused=True)
    start = [torch.randn_like(parameter) for parameter in parameters.values()]
    for parameter, gradient in zip(parameters.values(), start, strict=True):
        parameter.grad = gradient.clone()
    add_frobenius_decay_(net, 0.3, dense=True)
    for (name, parameter), gradient, more in zip(parameters.items(), start, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient if more is None else gradient + more, msg=name)
    before = [parameter.detach().clone() for parameter in parameters.values()]
    net["plain"].weight.requires_grad_(False)
    decay_factors_(net, 0.3, dense=True)
    for (name, parameter), value, more in zip(parameters.items(), before, wanted, strict=True):
        moves = more is not None and name != "plain.weight"
        torch.testing.assert_close(parameter.detach(), value - more if moves else value, msg=name)


def test_the_penalty_of_a_whitened_layer_is_that_of_its_weight():
    layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    expected = frobenius_decay(layers, 0.1, dense=True)
    torch.testing.assert_close(frobenius_decay(whiten(layers), 0.1, dense=True), expected)


def test_the_penalty_does_not_change_with_factors_of_full_rank():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Linear(6, 8), nn.MultiheadAttention(8, 2), nn.Embedding(9, 6)).double()
    before = frobenius_decay(net, 0.1, dense=True)
    factorize(net, 1.0, min_saving=-1, skip=["3"])
    assert len(low_rank_maps(net)) == 6
    torch.testing.assert_close(frobenius_decay(net, 0.1, dense=True), before, rtol=1e-12, atol=0)


def test_sparse_gradients_take_no_coupled_decay():
    net = nn.Sequential(nn.Embedding(9, 6, sparse=True))
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="A sparse gradient takes no coupled decay"):
        add_frobenius_decay_(net, 0.1, dense=True)
    expected = 0.9 * net[0].weight.detach()
    decay_factors_(net, 0.1, dense=True)
    torch.testing.assert_close(net[0].weight.detach(), expected)


def test_decay_of_the_factors_themselves():
    net = network()
    net["linear"].left.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    maps = low_rank_maps(net)
    expected = {}
    for name, layer in maps.items():
        grads = (
            torch.autograd.grad(
                0.5 * layer.canonical_weight().square().sum(), [layer.left, layer.right], allow_unused=True
            )
            if name != "linear"
            else (
                torch.zeros(()),
                layer.right.detach() @ (layer.left.T @ layer.left),
            )
        )
        for key, grad in zip(("left", "right"), grads, strict=True):
            expected[f"{name}.{key}"] = before[f"{name}.{key}"] - 0.01 * grad
    decay_factors_(net, 0.01)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), expected.get(name, before[name]))


def test_l2_decay_is_that_of_the_factors():
    net = network()
    factors = [p for m in low_rank_maps(net).values() for p in (m.left, m.right)]
    torch.testing.assert_close(l2_decay(net, 0.2), 0.1 * sum(p.square().sum() for p in factors))
    balanced = LowRankLinear.from_layer(nn.Linear(9, 7, dtype=torch.float64), 4)
    nuclear = torch.linalg.matrix_norm(balanced.canonical_weight(), "nuc")
    torch.testing.assert_close(l2_decay(balanced, 0.2), 0.2 * nuclear)  # the least of all factors of the product


def test_tied_factors_decay_once():
    net = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20, bias=False))
    net[1].weight = net[0].weight
    factorize(net, 3)
    assert net[0].left is net[1].left
    expected = 0.5 * net[0].canonical_weight().square().sum()
    torch.testing.assert_close(frobenius_decay(net, 1.0), expected)
    assert list(low_rank_maps(net)) == ["0"]


@pytest.mark.parametrize("function", [frobenius_decay, l2_decay, add_frobenius_decay_, decay_factors_])
def test_a_network_without_factors(function):
    with pytest.raises(ValueError, match=r"Sequential has no factorised layers to decay: call factorize\(net\) first"):
        function(nn.Sequential(nn.Linear(3, 3)), 0.1)


@pytest.mark.parametrize("function", [frobenius_decay, add_frobenius_decay_, decay_factors_])
def test_a_network_without_matrices(function):
    with pytest.raises(ValueError, match="LayerNorm has no weights to decay"):
        function(nn.LayerNorm(3), 0.1, dense=True)


def test_autocast_does_not_touch_the_penalty():
    net = network().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        penalty = frobenius_decay(net, 1.0)
    assert penalty.dtype == torch.float32
    torch.testing.assert_close(penalty, frobenius_decay(net, 1.0), rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.integers(2, 9), st.floats(0.001, 1.0), st.data())
def test_a_step_of_sgd_is_equation_1(outputs, inputs, rate, data):
    r"""Check :math:`W' = W - a (G V V^T + U U^T G) + a^2 G V U^T G`, G being the gradient of W = U V^T."""
    rank = data.draw(st.integers(1, min(outputs, inputs)))
    layer = random_factors(LowRankLinear(inputs, outputs, rank, bias=False, dtype=torch.float64))
    x, y = torch.randn(12, inputs, dtype=torch.float64), torch.randn(12, outputs, dtype=torch.float64)
    u, v = layer.left.detach().clone(), layer.right.detach().clone()
    w = (u @ v.T).requires_grad_()
    g = torch.autograd.grad((x @ w.T - y).square().mean(), w)[0]
    expected = w - rate * (g @ v @ v.T + u @ u.T @ g) + rate**2 * g @ v @ u.T @ g
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    (layer(x) - y).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(layer.canonical_weight(), expected, rtol=1e-12, atol=1e-12)
