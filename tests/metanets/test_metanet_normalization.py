"""Standardisation by statistics of the training networks, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_symmetry.metanets import DMC, FlatMLP, StatNN, WeightDeepSets, normalization, weight_statistics

SHAPES = {"a": (3, 4), "b": (3,), "c": (5,)}


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0] * 12 + [100.0] * 3 + [1e-3] * 5)
    return torch.randn(50, 20, generator=generator) * scale + 10 * scale


@pytest.mark.parametrize("chunk", [1, 70, 2**24])
def test_statistics_of_each_tensor(rows, chunk, monkeypatch):
    monkeypatch.setattr(normalization, "_CHUNK", chunk)
    found = WeightDeepSets(SHAPES, 4).fit_normalization(rows).normalization
    parts = np.split(rows.double().numpy(), [12, 15], axis=1)
    np.testing.assert_allclose(found.mean.numpy(), [part.mean() for part in parts], rtol=1e-6)
    np.testing.assert_allclose(found.std.numpy(), [part.std() for part in parts], rtol=1e-6)


def test_statistics_of_each_entry(rows):
    found = FlatMLP(SHAPES, (4,)).fit_normalization(rows).normalization
    np.testing.assert_allclose(found.mean.numpy(), rows.double().numpy().mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.std.numpy(), rows.double().numpy().std(0), rtol=1e-6)
    columns = found(rows)
    torch.testing.assert_close(columns.mean(0), torch.zeros(20), atol=1e-4, rtol=0)
    torch.testing.assert_close(columns.std(0, correction=0), torch.ones(20), atol=1e-4, rtol=0)


def test_statistics_of_statistics_with_and_without_a_cache(rows):
    whole = StatNN(SHAPES, (4,)).fit_normalization(rows)
    cached = StatNN(SHAPES, (4,), precomputed=True)
    features = weight_statistics(rows, SHAPES)
    cached.fit_normalization(features)
    torch.testing.assert_close(cached.normalization.mean, whole.normalization.mean)
    cached.load_state_dict(whole.state_dict())
    torch.testing.assert_close(cached(features), whole(rows))
    with pytest.raises(ValueError, match="Expected precomputed statistics"):
        cached(rows)


def test_what_does_not_vary_is_only_shifted(rows):
    rows[:, 3] = 0.1  # whose mean is rounded
    rows[:, 4] = 0.0
    found = FlatMLP(SHAPES, (4,)).fit_normalization(rows).normalization
    assert found.std[3:5].tolist() == [1.0, 1.0]
    assert found(rows)[:, 3:5].abs().max() < 1e-6


def test_what_hardly_varies_is_not_blown_up(rows):
    """Weights that decay has all but taken away, below the smallest number by which can be divided."""
    rows[:, 3] = torch.linspace(0, 1e-42, len(rows))
    found = FlatMLP(SHAPES, (4,)).fit_normalization(rows).normalization
    assert found(rows).isfinite().all() and found(rows)[:, 3].abs().max() < 1e-6


def test_it_is_saved_and_does_nothing_before_it_is_fitted(rows):
    metanet = DMC({"a": (40,)}, (2,), hidden=4)
    assert torch.equal(metanet.normalization(torch.ones(2, 40)), torch.ones(2, 40))
    fitted = DMC({"a": (40,)}, (2,), hidden=4).fit_normalization(torch.randn(9, 40))
    metanet.load_state_dict(fitted.state_dict())
    assert torch.equal(metanet.normalization.std, fitted.normalization.std)
    assert fitted.normalization.std.item() != 1


def test_global_randomness_and_gradients_stay(rows):
    state = torch.get_rng_state()
    metanet = FlatMLP(SHAPES, (4,))
    after = torch.get_rng_state()
    assert not torch.equal(state, after)
    metanet.fit_normalization(rows.requires_grad_())
    assert torch.equal(torch.get_rng_state(), after)
    assert not metanet.normalization.mean.requires_grad


def test_diverged_networks_are_refused(rows):
    rows[7, 3] = float("nan")
    with pytest.raises(ValueError, match="leave out the networks that diverged"):
        FlatMLP(SHAPES).fit_normalization(rows)
    with pytest.raises(ValueError, match="at least one network"):
        FlatMLP(SHAPES).fit_normalization(rows[:0])
    with pytest.raises(ValueError, match="Expected rows of 20 weights"):
        FlatMLP(SHAPES).fit_normalization(rows[:, 1:])
