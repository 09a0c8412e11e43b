"""Decompositions, ranks and initial factors against full singular value decompositions in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_rank_reference import best_error
from torch import nn

from lightning_symmetry import LowRankLinear
from lightning_symmetry.low_rank import (
    Decomposition,
    DecompositionError,
    break_even,
    choose_rank,
    initial_factors,
    saving,
)


def matrix(rows, columns, seed=0, decay=0.0, dtype=torch.float64):
    """Return a Gaussian matrix, with columns that fall off by ``decay`` decades."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (values * 10 ** (-decay * torch.arange(columns) / columns)).to(dtype)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(1, 3),
    st.floats(0, 20),
    st.sampled_from([torch.float64, torch.float32]),
    st.data(),
)
def test_truncations_are_optimal(rows, columns, groups, decay, dtype, data):
    weights = torch.stack([matrix(rows, columns, seed, decay, dtype) for seed in range(groups)])
    decomposition = Decomposition(weights)
    rank = data.draw(st.integers(1, min(rows, columns)))
    left, values, right = decomposition.truncate(rank)
    assert (left.shape, values.shape, right.shape) == (
        (groups, rows, rank),
        (groups, rank),
        (groups, columns, rank),
    )
    eye = torch.eye(rank, dtype=torch.float64).expand(groups, -1, -1)
    torch.testing.assert_close(left.mT @ left, eye, rtol=0, atol=1e-10)
    torch.testing.assert_close(right.mT @ right, eye, rtol=0, atol=1e-5)
    for group, weight in enumerate(weights.double()):
        product = (left[group] * values[group]) @ right[group].T
        scale = float(torch.linalg.matrix_norm(weight, 2))
        error = float((weight - product).norm())
        assert error <= best_error(weight, rank) * (1 + 1e-4) + 1e-13 * scale
        expected = torch.linalg.svdvals(weight)
        torch.testing.assert_close(values[group], expected[:rank], rtol=1e-5, atol=1e-12 * scale)
        torch.testing.assert_close(decomposition.values[group], expected, rtol=0, atol=1e-7 * scale)


@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (24, 300), (300, 24)])
@pytest.mark.parametrize("init", ["spectral", "spectral_ones"])
def test_spectral_factors(rows, columns, init):
    weight = matrix(rows, columns)
    left, right = (t[0] for t in initial_factors(Decomposition(weight[None]), 6, init))
    u, s, vh = np.linalg.svd(weight.numpy(), full_matrices=False)
    middle = np.diag(s[:6]) if init == "spectral" else np.eye(6)
    np.testing.assert_allclose(left @ right.T, u[:, :6] @ middle @ vh[:6], atol=1e-10)
    np.testing.assert_allclose(left.T @ left, middle, atol=1e-10)
    np.testing.assert_allclose(right.T @ right, middle, atol=1e-10)


def test_an_ill_conditioned_matrix_keeps_the_digits_that_squaring_loses():
    weight = matrix(30, 30, decay=12)
    for rank in (3, 12, 29):
        left, right = (t[0] for t in initial_factors(Decomposition(weight[None]), rank, precision=0))
        error = float((weight - left @ right.T).norm())
        assert error == pytest.approx(best_error(weight, rank), rel=1e-4, abs=1e-15 * float(weight.norm()))
        _, _, vectors = Decomposition(weight[None]).truncate(rank)
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank, dtype=torch.float64)[None], rtol=0, atol=1e-5)


def test_directions_of_singular_value_zero_are_trained():
    weight = matrix(12, 3) @ matrix(3, 9, seed=1)
    layer = nn.Linear(9, 12)
    with torch.no_grad():
        layer.weight.copy_(weight)
    low = LowRankLinear.from_layer(layer, 5)
    torch.testing.assert_close(low.canonical_weight(), layer.weight, rtol=1e-5, atol=1e-5)
    x = torch.randn(20, 9)
    for _ in range(2):
        low.zero_grad()
        (low(x) - torch.randn(20, 12)).square().sum().backward()
        with torch.no_grad():
            for p in low.parameters():
                p.sub_(1e-3 * p.grad)
    assert int(torch.linalg.matrix_rank(low.canonical_weight().double(), rtol=1e-5)) == 5


def test_random_factors_have_the_variance_and_equal_norms():
    generator = torch.Generator().manual_seed(0)
    decomposition = Decomposition(torch.empty(2, 300, 900, device="meta"))
    left, right = initial_factors(decomposition, 50, "random", 0.04, generator)
    product = left @ right.mT
    assert float(product.var()) == pytest.approx(0.04, rel=0.02)
    assert float(left.norm()) == pytest.approx(float(right.norm()), rel=0.02)
    again = initial_factors(decomposition, 50, "random", 0.04, torch.Generator().manual_seed(0))
    assert torch.equal(left, again[0])
    assert torch.equal(right, again[1])


RANKS = {"int": (3, 3), "share": (0.25, 5), "least": (0.01, 1), "all": (1.0, 20), "energy": ("energy:0.9", None)}


@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize("shape", [(20, 50), (50, 20)])
def test_ranks(case, shape):
    rank, expected = RANKS[case]
    weight = matrix(*shape, decay=1.0)
    if expected is None:
        squares = np.linalg.svd(weight.numpy(), compute_uv=False) ** 2
        expected = next(r for r in range(1, 21) if squares[:r].sum() >= 0.9 * squares.sum())
        assert 1 < expected < 20
    assert choose_rank(rank, Decomposition(weight[None])) == expected


def test_ranks_of_groups_and_of_plain_spectra():
    values = torch.tensor([[4.0, 2.0, 1.0, 0.0], [3.0, 3.0, 3.0, 0.0]], dtype=torch.float64)
    decomposition = Decomposition(torch.diag_embed(values))
    assert choose_rank("stable", decomposition) == 3  # 21 / 16 and 27 / 9
    assert choose_rank("energy:1.0", decomposition) == 3
    assert choose_rank("energy:0.5", decomposition) == 1  # 25 of 48
    assert choose_rank("energy:0.53", decomposition) == 2
    assert choose_rank("stable", Decomposition(torch.zeros(1, 3, 3))) == 1


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.5, True, "energy", "energy:0", "energy:2", "energy:x", "best", None])
def test_what_is_no_rank(rank):
    with pytest.raises(ValueError, match=r"Expected `rank` to be a number of at least 1, a share"):
        choose_rank(rank, Decomposition(torch.randn(1, 4, 4)))


def test_errors():
    decomposition = Decomposition(torch.randn(1, 4, 6))
    with pytest.raises(ValueError, match="rank 5 is beyond the full rank 4 of a 4 x 6 matrix"):
        choose_rank(5, decomposition)
    with pytest.raises(ValueError, match="between 1 and the full rank 4 but got 5"):
        decomposition.truncate(5)
    with pytest.raises(ValueError, match="`init` to be 'spectral', 'spectral_ones' or 'random' but got 'he'"):
        initial_factors(decomposition, 2, "he")
    for bad in (math.nan, math.inf):
        with pytest.raises(DecompositionError, match="its weight is not finite"):
            Decomposition(torch.full((1, 3, 3), bad)).truncate(1)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_break_even(rows, columns, rank):
    factors, entries = rank * (rows + columns), rows * columns
    assert (rank < break_even(rows, columns)) == (factors < entries) or factors == entries
    assert saving(rank, rows, columns) == pytest.approx(1 - factors / entries)


def test_the_papers_ratio_costs_parameters():
    assert saving(round(0.62 * 1000), 1000, 1000) == pytest.approx(-0.24)
    assert break_even(512, 512) == 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_full_rank_keeps_the_function_in_every_precision(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(200, 96).to(dtype)
    low = LowRankLinear.from_layer(layer, 1.0)
    assert low.left.dtype == dtype
    x = torch.randn(50, 200, dtype=dtype)
    tolerance = {torch.bfloat16: 0.05, torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(low(x), layer(x), rtol=tolerance, atol=tolerance)
