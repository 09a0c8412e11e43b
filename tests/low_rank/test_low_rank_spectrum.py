"""Effective and stable ranks, and the spectra of random matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_rank_reference import kernel_matrices, random_factors
from scipy.integrate import quad
from torch import nn

from lightning_symmetry import (
    LowRankConv2d,
    LowRankEmbedding,
    LowRankLinear,
    effective_rank,
    marchenko_pastur_quantiles,
    stable_rank,
)
from lightning_symmetry.low_rank import LowRankMultiheadAttention, marchenko_pastur_cdf, singular_values


def reference(matrices):
    """Return all singular values, largest first."""
    values = [np.linalg.svd(m.detach().double().numpy(), compute_uv=False) for m in matrices]
    return np.sort(np.concatenate(values))[::-1]


LAYERS = {
    "linear": (lambda: LowRankLinear(9, 7, 3), lambda w: [w]),
    "wide": (lambda: LowRankLinear(9, 7, 7), lambda w: [w]),
    "embedding": (lambda: LowRankEmbedding(30, 6, 4), lambda w: [w]),
    "convolution": (lambda: LowRankConv2d(4, 6, 3, 2, groups=2), lambda w: kernel_matrices(w, 2, "kxk-1x1")),
    "separable": (
        lambda: LowRankConv2d(4, 6, 3, 2, "1xk-kx1", groups=2),
        lambda w: kernel_matrices(w, 2, "1xk-kx1"),
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_ranks_of_layers(case):
    make, matrices = LAYERS[case]
    low = random_factors(make().double())
    expected = reference(matrices(low.canonical_weight()))
    got = singular_values(low)
    np.testing.assert_allclose(got, expected[: len(got)], atol=1e-12)
    np.testing.assert_allclose(expected[len(got) :], 0, atol=1e-12)
    assert effective_rank(low) == pytest.approx(expected.sum() / expected[0])
    assert stable_rank(low) == pytest.approx((expected**2).sum() / expected[0] ** 2)
    scheme = getattr(low, "scheme", "kxk-1x1")
    assert effective_rank(low.to_layer(), scheme) == pytest.approx(effective_rank(low))
    assert effective_rank(low.factors()) == pytest.approx(effective_rank(low))
    assert low.left.grad is None


def test_known_ranks():
    matrix = torch.diag(torch.tensor([4.0, 2.0, 2.0, 0.0]))
    assert effective_rank(matrix) == 2
    assert stable_rank(matrix) == pytest.approx(1.5)
    assert effective_rank(torch.eye(6)) == pytest.approx(6)
    assert effective_rank(torch.zeros(3, 3)) == stable_rank(torch.zeros(3, 3)) == 0
    half = nn.Linear(5, 5).to(torch.bfloat16)
    assert 1 <= effective_rank(half) <= 5


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.LayerNorm(4), nn.MultiheadAttention(4, 2)])
def test_layers_without_a_matrix(layer):
    with pytest.raises(ValueError, match=f"{type(layer).__name__} has no weight that is a matrix"):
        effective_rank(layer)
    with pytest.raises(ValueError, match=r"Expected a matrix but got a tensor of shape \(4,\)"):
        effective_rank(torch.ones(4))


def test_projections_of_attention_have_ranks_of_their_own():
    low = LowRankMultiheadAttention.from_layer(nn.MultiheadAttention(8, 2), 2)
    with pytest.raises(ValueError, match="LowRankMultiheadAttention has no weight"):
        effective_rank(low)
    assert all(1 <= effective_rank(part) <= 2 for part in low.projections().values())


@settings(deadline=None, max_examples=40)
@given(st.one_of(st.floats(0.01, 0.98), st.just(1.0)), st.floats(0.001, 0.999))  # between, quad misses the edge at 0
def test_the_distribution_is_the_integral_of_the_density(ratio, share):
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    x = low + share * (high - low)

    def density(angle):
        y = low + (high - low) * math.sin(angle) ** 2  # without the square roots at the ends
        return (high - low) ** 2 * math.sin(angle) ** 2 * math.cos(angle) ** 2 / (math.pi * ratio * y)

    expected, _ = quad(density, 0, math.asin(math.sqrt(share)), epsabs=1e-11, limit=400)
    assert marchenko_pastur_cdf(x, ratio) == pytest.approx(expected, abs=1e-8)
    assert (marchenko_pastur_cdf(low - 1, ratio), marchenko_pastur_cdf(high + 1, ratio)) == (0, 1)


@pytest.mark.parametrize("shape", [(300, 1200), (1200, 300), (600, 600)])
def test_quantiles_are_those_of_random_matrices(shape):
    torch.manual_seed(0)
    probabilities = [0.05, 0.25, 0.5, 0.75, 0.95]
    spectrum = torch.linalg.svdvals(0.3 * torch.randn(shape, dtype=torch.float64))
    quantiles = marchenko_pastur_quantiles(shape, probabilities, 0.3)
    assert quantiles.dtype == torch.float64
    scale = 0.3 * (math.sqrt(shape[0]) + math.sqrt(shape[1]))
    torch.testing.assert_close(
        torch.quantile(spectrum, torch.tensor(probabilities, dtype=torch.float64)), quantiles, rtol=0, atol=0.01 * scale
    )
    ends = marchenko_pastur_quantiles(shape, torch.tensor([0.0, 1.0]), 0.3)
    assert float(ends[1]) == pytest.approx(scale)
    assert float(ends[0]) == pytest.approx(0.3 * abs(math.sqrt(shape[0]) - math.sqrt(shape[1])), abs=1e-12)


@given(st.integers(1, 500), st.integers(1, 500), st.floats(0.001, 0.999))
@settings(deadline=None, max_examples=40)
def test_quantiles_invert_the_distribution(rows, columns, probability):
    value = float(marchenko_pastur_quantiles((rows, columns), [probability], 1.0)) / math.sqrt(max(rows, columns))
    ratio = min(rows, columns) / max(rows, columns)
    assert marchenko_pastur_cdf(value**2, ratio) == pytest.approx(probability, abs=1e-7)


def test_errors():
    with pytest.raises(ValueError, match=r"`probabilities` to be in \[0, 1\] but got 1.5"):
        marchenko_pastur_quantiles((3, 4), [1.5], 1.0)
    with pytest.raises(ValueError, match=r"positive sides and a standard deviation but got shape \(0, 4\)"):
        marchenko_pastur_quantiles((0, 4), [0.5], 1.0)
    with pytest.raises(ValueError, match=r"`ratio` to be in \(0, 1\] but got 2"):
        marchenko_pastur_cdf(1.0, 2)
