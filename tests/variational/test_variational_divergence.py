"""The divergence against PyTorch's distributions, and mistakes that implementations make in it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, kl_divergence
from variational_cases import joint, randomize

from lightning_symmetry import AsymmetricConv2d, AsymmetricLinear
from lightning_symmetry.variational import (
    VariationalConv1d,
    VariationalConv2d,
    VariationalEmbedding,
    VariationalLinear,
    gaussian_kl,
)
from lightning_symmetry.variational import kl_divergence as network_kl
from lightning_symmetry.variational.gaussian import Gaussian, divergence
from lightning_symmetry.variational.sums import DiagonalSums, Grams, SquaredNorms

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
PLAIN = {
    "linear": lambda **factory: nn.Linear(11, 7, **factory),
    "linear without bias": lambda **factory: nn.Linear(11, 7, bias=False, **factory),
    "conv1d": lambda **factory: nn.Conv1d(3, 5, 3, **factory),
    "conv2d with groups": lambda **factory: nn.Conv2d(4, 6, 3, groups=2, **factory),
    "embedding": lambda **factory: nn.Embedding(9, 5, **factory),
    "embedding with padding": lambda **factory: nn.Embedding(9, 5, padding_idx=2, **factory),
    "fixed entries": lambda **factory: AsymmetricLinear(11, 7, 3, 0.5, **factory),
    "fixed filters": lambda **factory: AsymmetricConv2d(6, 6, 3, 1, 0.5, groups=2, layout="filters", **factory),
}
KINDS = {
    "linear": VariationalLinear,
    "fixed entries": VariationalLinear,
    "conv1d": VariationalConv1d,
    "conv2d": VariationalConv2d,
    "fixed filters": VariationalConv2d,
    "embedding": VariationalEmbedding,
}


def layer_of(case, dtype=torch.float64, **settings):
    kind = next(kind for name, kind in KINDS.items() if case.startswith(name))
    return randomize(kind.from_layer(PLAIN[case](dtype=dtype), variance=0.2, **settings))


def reference(layer, prior):
    mean, d, factors = joint(layer)
    q = LowRankMultivariateNormal(mean, factors.T / math.sqrt(len(factors)), d)
    zero = torch.zeros_like(mean)
    return kl_divergence(q, LowRankMultivariateNormal(zero, zero.unsqueeze(1), torch.full_like(mean, prior)))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("case", PLAIN)
def test_layers(case, rank, diagonal, dtype):
    layer = layer_of(case, dtype, rank=rank, diagonal=diagonal, prior=0.7)
    value = layer.kl_divergence()
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, reference(layer, 0.7), rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_function(dtype):
    generator = torch.Generator().manual_seed(0)
    mean, d = (torch.randn(70000, generator=generator, dtype=dtype) for _ in range(2))
    d, factors = d.exp(), torch.randn(3, 70000, generator=generator, dtype=dtype)
    value = gaussian_kl(mean, d, factors, 2.0)
    mean, d, factors = mean.double(), d.double(), factors.double()
    q = LowRankMultivariateNormal(mean, factors.T / math.sqrt(3), d)
    zero = torch.zeros_like(mean)
    p = LowRankMultivariateNormal(zero, zero.unsqueeze(1), zero + 2)
    torch.testing.assert_close(value, kl_divergence(q, p), rtol=TOLERANCES[dtype], atol=0)
    assert float(gaussian_kl(zero, 2.0, prior_variance=2.0)) == pytest.approx(0, abs=1e-9)


def test_at_the_paper_s_scale_against_a_dense_gaussian():
    layer = VariationalLinear(40, 20, dtype=torch.float64, prior="fan_in:100")
    mean, d, factors = joint(layer)
    q = MultivariateNormal(mean, torch.diag(d) + factors.T @ factors / 4)
    p = MultivariateNormal(torch.zeros_like(mean), torch.eye(len(mean), dtype=mean.dtype) * 100 / 40)
    torch.testing.assert_close(layer.kl_divergence(), kl_divergence(q, p), rtol=1e-10, atol=0)
    assert layer.prior_variance == 100 / 40
    assert layer.posterior.variance == math.exp(-10)


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("case", ["linear", "fixed filters", "embedding with padding"])
def test_gradients(case, diagonal):
    layer = layer_of(case, rank=3, diagonal=diagonal, prior=0.7)
    layer.kl_divergence().backward()
    found = {name: p.grad for name, p in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        entries = parameter.detach().view(-1)
        for index in (0, len(entries) // 3, len(entries) - 1):
            values = []
            for step in (1e-5, -2e-5):
                entries[index] += step
                values.append(layer.kl_divergence().item())
            entries[index] += 1e-5
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(found[name].view(-1)[index]), abs=1e-6)


def test_second_derivatives():
    layer = layer_of("linear", rank=2, diagonal="learned", prior=0.7)

    def value(mean, log_variance, factors):
        return gaussian_kl(mean, log_variance.exp(), factors, 0.7)

    inputs = layer.weight, layer.weight_log_variance, layer.weight_factors
    assert torch.autograd.gradcheck(value, inputs)
    assert torch.autograd.gradgradcheck(value, inputs)


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
def test_the_optimal_prior(diagonal):
    layer = layer_of("fixed entries", rank=3, diagonal=diagonal, prior="optimal")
    best = layer.optimal_prior_variance()
    mean, d, factors = joint(layer)
    assert best == pytest.approx(float((d.sum() + factors.square().sum() / 3 + mean.square().sum()) / len(mean)))
    torch.testing.assert_close(layer.kl_divergence(), reference(layer, best), rtol=1e-12, atol=0)
    for other in (0.9 * best, 1.1 * best):
        assert reference(layer, other) > layer.kl_divergence()
    layer.kl_divergence().backward()
    free = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer.prior_variance = best
    layer.kl_divergence().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, free[name])


def test_the_sum_over_entries_and_not_their_mean():
    net = nn.Sequential(layer_of("linear", prior=0.7), layer_of("conv1d", prior=0.7))
    one, two = (reference(layer, 0.7) for layer in net)
    torch.testing.assert_close(network_kl(net), one + two, rtol=1e-12, atol=0)
    assert network_kl(net) > 80  # nats, of 84 + 50 entries
    shared = nn.Sequential(net[0], nn.Linear(7, 11), net[0])
    torch.testing.assert_close(network_kl(shared), one, rtol=1e-12, atol=0)


def test_fixed_entries_do_not_count():
    layer = layer_of("fixed entries", rank=3, diagonal="learned", prior=0.7)
    before = layer.kl_divergence()
    fixed = ~layer.mask
    with torch.no_grad():
        layer.weight[fixed] += 10
        layer.weight_factors[:, fixed] += 10
        layer.weight_log_variance[fixed] += 10
    torch.testing.assert_close(layer.kl_divergence(), before, rtol=1e-14, atol=0)
    layer.kl_divergence().backward()
    for parameter in (layer.weight, layer.weight_factors, layer.weight_log_variance):
        assert not parameter.grad[..., fixed].any()
        assert parameter.grad[..., ~fixed].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_determinants_of_half_precision_are_those_of_its_values(dtype):
    torch.manual_seed(0)
    layer = VariationalLinear(60, 50, rank=4, prior=0.05, dtype=dtype)
    with torch.no_grad():
        layer.weight_factors.copy_(layer.weight_factors[:1] + 1e-3 * torch.randn(4, 50, 60))
    value = layer.kl_divergence()
    torch.testing.assert_close(value, reference(layer, 0.05), rtol=1e-5, atol=0)
    value.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in layer.parameters())
    single = VariationalLinear(60, 50, rank=4, prior=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = single.kl_divergence()
    assert torch.equal(inside, single.kl_divergence())


def test_almost_parallel_factors_of_float32():
    """In float32 the Gram matrix of these rows has eigenvalues far below zero once it is divided by d."""
    torch.manual_seed(0)
    direction = torch.randn(1, 5000)
    factors = 30 * (direction + 1e-5 * torch.randn(4, 5000))
    value = gaussian_kl(torch.zeros(5000), math.exp(-12), factors, 1.0)
    wide = factors.double()
    inner = wide @ wide.T / 4 * math.exp(12)
    expected = wide.square().sum() / 4 + 5000 * (math.exp(-12) - 1 + 12)
    expected = 0.5 * (expected - torch.linalg.slogdet(torch.eye(4, dtype=torch.float64) + inner)[1])
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("spread", [0.3, 0.05])
def test_close_to_the_prior_in_float32(spread, rank):
    """Sums that are a thousand times the divergence cancel in it; so does rounding only if they are in float64."""
    prior, size = 1 / 4608, 300_000
    generator = torch.Generator().manual_seed(0)
    mean, log_variance, *rows = (torch.randn(size, generator=generator) * spread for _ in range(2 + rank))
    mean, log_variance = mean * math.sqrt(prior), log_variance + math.log(prior)
    factors = torch.stack(rows) * math.sqrt(prior) if rank else None
    q = Gaussian((mean,), (log_variance,), (factors,) if rank else (), (None,), size)
    value = divergence([q], [prior])
    wide = factors.double().T / math.sqrt(rank) if rank else torch.zeros(size, 1, dtype=torch.float64)
    q = LowRankMultivariateNormal(mean.double(), wide, log_variance.double().exp())
    zero = torch.zeros(size, dtype=torch.float64)
    p = LowRankMultivariateNormal(zero, zero.unsqueeze(1), zero + prior)
    torch.testing.assert_close(value, kl_divergence(q, p), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learned_diagonals_of_half_precision(dtype):
    """Rows that are divided by the root of d are no longer parallel if they are rounded to half precision."""
    torch.manual_seed(0)
    layer = VariationalLinear(60, 50, variance=math.exp(-12), prior=0.05, diagonal="learned", dtype=dtype)
    with torch.no_grad():
        layer.weight_factors.copy_(10 * (layer.weight_factors[:1] + 1e-3 * torch.randn(4, 50, 60)))
        layer.weight_log_variance.add_(torch.randn(50, 60))
    value = layer.kl_divergence()
    torch.testing.assert_close(value, reference(layer.double(), 0.05), rtol=1e-8, atol=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_derivatives_of_the_parts(rows):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    trainable = torch.rand(rows, 7, generator=generator) > 0.4
    for function in (
        lambda a: Grams.apply((1,), a),
        lambda a: Grams.apply((2, 1), a, 3 * a.unsqueeze(1)[..., :2], a[..., :3]),
        lambda a: SquaredNorms.apply((1,), a),
        lambda a: SquaredNorms.apply((1, 2), a[..., :3], a, 2 * a[..., 1:]),
        lambda a: DiagonalSums.apply(a, None),
        lambda a: DiagonalSums.apply(a, trainable),
    ):
        assert torch.autograd.gradcheck(function, values)
        assert torch.autograd.gradgradcheck(function, values)


def test_gradients_are_no_views():
    """Autograd adds to them in place: a sum of two views would be a third tensor of their size."""
    shapes = [(2, 3, 5), (2, 3)]
    tensors = [torch.ones(shape, requires_grad=True) for shape in shapes]
    for function in (Grams.apply, SquaredNorms.apply):
        grads = torch.autograd.grad(function((2,), *tensors).sum(), tensors)
        assert [tuple(grad.shape) for grad in grads] == shapes
        assert not any(grad._is_view() for grad in grads)


def test_a_network_of_all_kinds_of_layers():
    """Divergences that are computed together are those of the layers one by one, and so are their gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList(
        VariationalLinear(5, 4, rank, diagonal=diagonal, variance=variance, prior=prior, dtype=torch.float64)
        for rank in (0, 2, 3)
        for diagonal in ("constant", "learned")
        for variance, prior in ((0.1, 0.3), (0.2, "fan_in"), (0.05, "optimal"), (0.3, "optimal"))
    )
    for layer in layers:
        randomize(layer)
    values = [reference(layer, layer.prior_variance or layer.optimal_prior_variance()) for layer in layers]
    torch.testing.assert_close(network_kl(layers), sum(values), rtol=1e-12, atol=0)
    together = torch.autograd.grad(network_kl(layers), list(layers.parameters()))
    alone = torch.autograd.grad(sum(layer.kl_divergence() for layer in layers), list(layers.parameters()))
    for here, there in zip(together, alone, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)
    layers[3:].requires_grad_(False)
    network_kl(layers).backward()
    trained = [parameter.grad for parameter in layers.parameters() if parameter.requires_grad]
    assert 0 < len(trained) < len(alone) and all(parameter.grad is None for parameter in layers[3:].parameters())
    for here, there in zip(trained, alone[: len(trained)], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)


def test_errors():
    with pytest.raises(ValueError, match=r"`factors` of shape \(K, 3\) but got \(3,\)"):
        gaussian_kl(torch.zeros(3), 1.0, torch.zeros(3))
    with pytest.raises(ValueError, match="`variance` to be positive and finite but got 0"):
        gaussian_kl(torch.zeros(3), 0.0)
    with pytest.raises(ValueError, match="`prior_variance` to be positive"):
        gaussian_kl(torch.zeros(3), 1.0, prior_variance=-1.0)


@pytest.mark.parametrize("angle", [1.0, 0.3, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("columns", [50_000, 262_144])
def test_products_of_many_columns(columns, angle):
    """Divergences of rows at any angle, by whichever product, are those of float64."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, columns, generator=generator)
    factors = 0.1 * (direction + angle * torch.randn(4, columns, generator=generator))
    mean = torch.randn(columns, generator=generator)
    value = gaussian_kl(mean, math.exp(-12), factors, 0.05)
    expected = gaussian_kl(mean.double(), math.exp(-12), factors.double(), 0.05)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=0)
    unrelated = torch.randn(4, columns, generator=generator)
    wide = unrelated.double()
    torch.testing.assert_close(gram(unrelated), wide @ wide.T, rtol=0, atol=1e-8 * columns)
    both = torch.stack([unrelated, factors])
    torch.testing.assert_close(torch.func.vmap(gram)(both), both.double() @ both.double().mT, rtol=1e-12, atol=0)


def gram(rows):
    return Grams.apply((1,), rows)[0]
