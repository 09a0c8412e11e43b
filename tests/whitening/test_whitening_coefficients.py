"""Whitening coefficients against a dense float64 eigendecomposition."""

from __future__ import annotations

import pytest
import torch
from whitening_reference import covariance_of, zca

from lightning_symmetry.whitening import Whitening, WhiteningError, zca_whitening, zca_whitening_from_samples


def samples(count, size, *lead, seed=0):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=g, dtype=torch.float64)
    return torch.randn(*lead, count, size, generator=g, dtype=torch.float64) @ mix + 3


def reference(rows, eps, mode="full"):
    _, covariance = covariance_of(rows)
    if mode == "center":
        return torch.eye(rows.shape[-1], dtype=torch.float64)
    return zca(torch.diag(covariance.diagonal()) if mode == "diagonal" else covariance, eps)


@pytest.mark.parametrize("mode", ["full", "diagonal", "center"])
@pytest.mark.parametrize("eps", [1e-6, 0.1, 1e6])
@pytest.mark.parametrize("count", [2, 5, 8, 9, 40])
def test_samples_fewer_than_as_many_as_and_more_than_entries(count, eps, mode):
    rows = samples(count, 8)
    expected = reference(rows, eps, mode)
    whitening = zca_whitening_from_samples(rows, eps, mode=mode)
    # The reference inverts eigenvalues that are 0 up to rounding (1e-13) with eps.
    torch.testing.assert_close(whitening.dense(), expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max()))
    torch.testing.assert_close(whitening.center, sum(rows) / count)
    inverse = whitening.inverse_root(whitening.dense())
    torch.testing.assert_close(inverse, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(whitening.dense_precondition(), whitening.dense() @ whitening.dense())
    assert torch.equal(whitening.dense(), whitening.dense().mT)


def test_rank_is_that_of_the_samples():
    whitening = zca_whitening_from_samples(samples(5, 300), 0.1)
    assert whitening.basis.shape == (300, 5)
    assert zca_whitening_from_samples(samples(40, 8), 0.1).basis.shape == (8, 8)


@pytest.mark.parametrize("count", [4, 30])
def test_whitened_covariance(count):
    rows = samples(count, 8)
    whitening = zca_whitening_from_samples(rows, 1e-8)
    _, covariance = covariance_of(whitening.root(rows - whitening.center))
    values = torch.linalg.eigvalsh(covariance)
    seen = values[-min(count - 1, 8) :]
    torch.testing.assert_close(seen, torch.ones_like(seen), rtol=0, atol=1e-5)  # lambda / (lambda + eps)


@pytest.mark.parametrize("count", [4, 30])
def test_relative_damping_is_in_units_of_the_mean_variance(count):
    rows = samples(count, 8)
    _, covariance = covariance_of(rows)
    mean_variance = float(covariance.diagonal().mean())
    relative = zca_whitening_from_samples(rows, 0.3, relative=True)
    torch.testing.assert_close(relative.dense(), zca_whitening_from_samples(rows, 0.3 * mean_variance).dense())
    scaled = zca_whitening_from_samples(rows * 100, 0.3, relative=True)
    torch.testing.assert_close(scaled.dense() * 100, relative.dense())


@pytest.mark.parametrize("mode", ["full", "diagonal", "center"])
@pytest.mark.parametrize("count", [4, 30])
def test_groups_are_whitened_each_by_itself(count, mode):
    rows = samples(count, 8, 3) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
    whitening = zca_whitening_from_samples(rows, 0.1, mode=mode, relative=True)
    for group in range(3):
        alone = zca_whitening_from_samples(rows[group], 0.1, mode=mode, relative=True)
        torch.testing.assert_close(whitening.dense()[group], alone.dense())
        torch.testing.assert_close(whitening.center[group], alone.center)


@pytest.mark.parametrize("mode", ["full", "diagonal"])
@pytest.mark.parametrize("count", [4, 30])
def test_dead_units_get_the_bound(count, mode):
    rows = samples(count, 8)
    rows[:, [2, 5]] = torch.tensor([0.0, 7.0], dtype=torch.float64)
    matrix = zca_whitening_from_samples(rows, 0.01, mode=mode).dense_precondition()
    for unit in (2, 5):
        expected = torch.zeros(8, dtype=torch.float64)
        expected[unit] = 100
        torch.testing.assert_close(matrix[unit], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("count", [4, 30])
def test_constant_inputs(count, relative):
    whitening = zca_whitening_from_samples(torch.full((count, 8), 3.0), 0.25, relative=relative)
    # Without variance there is no unit for a relative eps: nothing is scaled.
    torch.testing.assert_close(whitening.dense(), torch.eye(8, dtype=torch.float64) * (1 if relative else 2))
    torch.testing.assert_close(whitening.center, torch.full((8,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("count", [5, 20])
def test_uncentred_and_weighted(count):
    rows = samples(count, 8)
    raw = zca_whitening_from_samples(rows, 0.1, centred=False)
    assert not raw.center.any()
    torch.testing.assert_close(raw.dense(), zca(covariance_of(rows, centred=False)[1], 0.1))
    weights = torch.ones(count)
    weights[0] = 3
    weighted = zca_whitening_from_samples(rows, 0.1, weights=weights)
    repeated = zca_whitening_from_samples(torch.cat([rows, rows[:1], rows[:1]]), 0.1)
    torch.testing.assert_close(weighted.dense(), repeated.dense())
    torch.testing.assert_close(weighted.center, repeated.center)


def test_float32_covariances_that_are_not_positive():
    rows = samples(4, 40).float()
    _, covariance = covariance_of(rows)
    whitening = zca_whitening(rows.mean(0), covariance.float(), 0.1)
    assert whitening.dense().dtype == torch.float64
    assert torch.linalg.eigvalsh(whitening.dense_precondition())[-1] <= 10 * (1 + 1e-9)


REFUSED = {
    "eps zero": (lambda: zca_whitening_from_samples(torch.randn(4, 3), 0.0), ValueError, "`eps` .* but got 0.0"),
    "eps nan": (lambda: zca_whitening_from_samples(torch.randn(4, 3), float("nan")), ValueError, "`eps` .* got nan"),
    "eps infinite": (lambda: zca_whitening(torch.zeros(3), torch.eye(3), float("inf")), ValueError, "`eps` .* got inf"),
    "mode": (lambda: zca_whitening_from_samples(torch.randn(4, 3), 1.0, mode="pca"), ValueError, "but got 'pca'"),
    "one sample": (lambda: zca_whitening_from_samples(torch.randn(1, 3), 1.0), WhiteningError, "2 samples but got 1"),
    "nan": (lambda: zca_whitening_from_samples(torch.full((4, 3), torch.nan), 1.0), WhiteningError, "not finite"),
    "infinite covariance": (
        lambda: zca_whitening(torch.zeros(3), torch.full((3, 3), torch.inf), 1.0),
        WhiteningError,
        "not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_uncentred_keeps_the_matrix():
    whitening = zca_whitening_from_samples(samples(20, 4), 0.1)
    assert isinstance(whitening, Whitening)
    assert not whitening.uncentred().center.any()
    assert torch.equal(whitening.uncentred().dense(), whitening.dense())
