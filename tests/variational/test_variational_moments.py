"""Mean and covariance of sampled outputs against the posterior's, by Monte Carlo, in each mode.

A limit on the largest z-score of all means and covariances holds with a probability of 0.9999 in each test; seeds are
fixed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from variational_cases import covariance, joint, limit, output_moments, randomize, z_scores

from lightning_symmetry import AsymmetricConv1d, AsymmetricConv2d, AsymmetricLinear
from lightning_symmetry.variational import (
    VariationalConv1d,
    VariationalConv2d,
    VariationalEmbedding,
    VariationalLinear,
    sample_network,
)

COUNT = 40000
LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "fixed entries": (lambda: AsymmetricLinear(5, 4, 2, 0.5), (5,)),
    "tokens": (lambda: nn.Linear(4, 2), (3, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 2, 3, stride=2, padding=1, padding_mode="circular"), (2, 6)),
    "conv1d, fixed filters": (lambda: AsymmetricConv1d(3, 3, 2, 1, 0.5, layout="filters"), (3, 3)),
    "stride and padding": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 4, 3)),
    "groups": (lambda: nn.Conv2d(4, 6, (2, 1), groups=2), (4, 2, 2)),
    "groups without bias": (lambda: nn.Conv2d(4, 4, 2, groups=4, bias=False, padding="same"), (4, 2, 2)),
    "dilation and reflection": (lambda: nn.Conv2d(1, 2, 2, dilation=2, padding=1, padding_mode="reflect"), (1, 3, 3)),
    "fixed entries, groups": (lambda: AsymmetricConv2d(4, 4, 2, 3, 0.5, groups=2, padding=1), (4, 1, 2)),
}
KINDS = {"Linear": VariationalLinear, "Conv1d": VariationalConv1d, "Conv2d": VariationalConv2d}


def layer_of(case, **settings):
    torch.manual_seed(0)
    make, shape = LAYERS[case]
    plain = make().double()
    kind = next(kind for name, kind in KINDS.items() if type(plain).__name__.endswith(name))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return randomize(kind.from_layer(plain, variance=0.2, **settings)), x


def one_by_one(layer, x, count):
    """Draw many outputs, each with noise of its own for the whole batch."""
    with torch.no_grad():
        return torch.func.vmap(lambda _: layer(x).flatten(), randomness="different")(torch.empty(count))


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
@pytest.mark.parametrize("case", LAYERS)
def test_an_example(case, mode, diagonal):
    layer, x = layer_of(case, rank=2, diagonal=diagonal, mode=mode)
    mean, diagonal_part, low_rank = output_moments(layer, x)
    if mode != "weight":  # pixels and tokens have diagonal noise of their own
        diagonal_part = torch.diag(diagonal_part.diagonal())
    exact = diagonal_part + low_rank
    torch.manual_seed(2)

    def draw(count):
        if mode == "local":
            with torch.no_grad():
                return layer(x.expand(count, *x.shape)).flatten(1)
        return one_by_one(layer, x.unsqueeze(0), count)

    assert max(z_scores(draw, COUNT, mean, exact)) < limit(len(mean))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("case", ["linear", "groups"])
def test_a_batch(case, rank):
    """Examples are independent in the mode ``local`` and have the noise of one weight in the two others."""
    layer, x = layer_of(case, rank=rank)
    batch = torch.stack([x, torch.flip(x, (0,)), 2 * x])[: 3 if case == "linear" else 2]
    mean, diagonal_part, low_rank = output_moments(layer, batch)
    size = len(mean) // len(batch)
    blocks = torch.block_diag(*[torch.ones(size, size, dtype=torch.float64)] * len(batch))
    own = torch.diag(diagonal_part.diagonal())
    exact = {"local": own + low_rank * blocks, "shared": own + low_rank, "weight": diagonal_part + low_rank}
    for mode, expected in exact.items():
        layer.mode = mode
        torch.manual_seed(3)
        assert max(z_scores(lambda n: one_by_one(layer, batch, n), COUNT, mean, expected)) < limit(len(mean))


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
def test_embeddings(mode, diagonal):
    torch.manual_seed(0)
    table = nn.Embedding(5, 2, padding_idx=3, dtype=torch.float64)
    layer = randomize(VariationalEmbedding.from_layer(table, rank=2, diagonal=diagonal, variance=0.2, mode=mode))
    x = torch.tensor([[0, 4, 3, 2]])
    _, d, factors = joint(layer)
    rows = torch.stack([d.view(4, 2)[i] for i in (0, 3, 2)])  # without the padding
    looked = torch.stack([factors.view(2, 4, 2)[:, i] for i in (0, 3, 2)], 1).flatten(1)
    exact = torch.diag(rows.flatten()) + looked.T @ looked / 2
    torch.manual_seed(2)
    samples = one_by_one(layer, x, COUNT)
    assert torch.equal(samples[:, 4:6], layer.weight[3].detach().expand(COUNT, 2))
    keep = [0, 1, 2, 3, 6, 7]
    mean = layer.weight[[0, 4, 2]].detach().flatten()
    assert max(z_scores(lambda _: samples[:, keep], COUNT, mean, exact)) < limit(6)


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("case", ["linear", "fixed entries", "groups", "fixed entries, groups"])
def test_sampled_weights(case, diagonal):
    layer, _ = layer_of(case, rank=2, diagonal=diagonal)
    keep = torch.ones_like(layer.weight, dtype=torch.bool)
    if hasattr(layer, "mask"):
        keep = layer.mask.view_as(layer.weight)
    torch.manual_seed(4)

    def draw(count):
        with torch.no_grad():
            weight, bias = torch.func.vmap(lambda _: layer.sample(), randomness="different")(torch.empty(count))
        assert torch.equal(weight[:, ~keep], layer.canonical_weight()[~keep].detach().expand(count, -1))
        return torch.cat([weight[:, keep], bias], 1)

    mean, _, _ = joint(layer)
    assert max(z_scores(draw, COUNT, mean, covariance(layer))) < limit(len(mean))


def test_sampled_networks():
    layer, _ = layer_of("linear", rank=2)
    net, generator = nn.Sequential(layer), torch.Generator().manual_seed(0)
    mean, _, _ = joint(layer)

    def draw(count):
        samples = [sample_network(net, generator)[0] for _ in range(count)]
        return torch.stack([torch.cat([s.weight.flatten(), s.bias]).detach() for s in samples])

    assert max(z_scores(draw, 400, mean, covariance(layer))) < limit(len(mean))


def test_fixed_entries_have_no_noise():
    """An output that reads nothing but fixed entries is certain, whatever stands in the parameters there."""
    layer, _ = layer_of("fixed entries", rank=2, diagonal="learned")
    layer.bias = layer.bias_factors = layer.bias_log_variance = None
    with torch.no_grad():
        layer.weight_factors[:, ~layer.mask] = 9
        layer.weight_log_variance[~layer.mask] = 9
        layer.weight[~layer.mask] += 1
    row = 1
    x = torch.where(layer.mask[row], 0, torch.randn(5, dtype=torch.float64)).unsqueeze(0)
    expected = x @ layer._source[0].fixed.new_tensor(layer.canonical_weight()[row].tolist())
    for mode in ("local", "shared", "weight"):
        layer.mode = mode
        torch.testing.assert_close(layer(x)[:, row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
def test_inputs_of_zero_have_finite_gradients(mode):
    for case in LAYERS:
        layer, x = layer_of(case, rank=2, diagonal="learned", mode=mode)
        x = torch.zeros_like(x).unsqueeze(0).requires_grad_()
        layer(x).square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("case", LAYERS)
def test_shapes_without_a_batch_and_the_mean(case):
    layer, x = layer_of(case, rank=2)
    plain = layer.to_layer()
    for mode in ("local", "shared", "weight", "mean"):
        layer.mode = mode
        assert layer(x).shape == plain(x).shape
        assert layer(x[None][:0]).shape == plain(x[None][:0]).shape
    assert torch.equal(layer(x), plain(x))
