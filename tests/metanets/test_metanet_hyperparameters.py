"""Hyper-parameters of Table 8."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lightning_symmetry.metanets import sample_hyperparameters

N = 20_000


@pytest.fixture(scope="module")
def drawn():
    return sample_hyperparameters(N, seed=0)


@pytest.mark.parametrize(
    ("name", "uniform", "low", "width"),
    [
        ("learning_rate", lambda value: -np.log10(value / 0.5), 0, 2),
        ("weight_decay", lambda value: -np.log10(value), 1, 4),
        ("label_smoothing", lambda value: value, 0, 0.2),
    ],
)
def test_continuous_distributions(drawn, name, uniform, low, width):
    values = uniform(drawn[name])
    assert low - 1e-12 <= values.min() <= values.max() <= low + width + 1e-12
    assert stats.kstest(values, "uniform", args=(low, width)).pvalue > 0.01


def test_epochs_include_both_ends(drawn):
    values, counts = np.unique(drawn["epochs"], return_counts=True)
    assert values.tolist() == list(range(10, 41))
    assert stats.chisquare(counts).pvalue > 0.01


def test_they_are_independent(drawn):
    assert np.abs(np.corrcoef(np.stack(list(drawn.values()))) - np.eye(4)).max() < 5 / np.sqrt(N)


def test_a_seed_gives_the_same_for_any_number():
    few, many = sample_hyperparameters(7, 3), sample_hyperparameters(100, 3)
    other = sample_hyperparameters(7, 4)
    for name, values in few.items():
        assert np.array_equal(values, many[name][:7])
        assert not np.array_equal(values, other[name])
        assert values.shape == (7,)
    assert sample_hyperparameters(0, 3)["epochs"].shape == (0,)


def test_other_ranges():
    drawn = sample_hyperparameters(500, 0, learning_rate=(1e-3, 1e-2), epochs=(2, 4), label_smoothing=(0.1, 0.1))
    assert 1e-3 <= drawn["learning_rate"].min() <= drawn["learning_rate"].max() <= 1e-2
    assert set(drawn["epochs"].tolist()) == {2, 3, 4}
    assert set(drawn["label_smoothing"].tolist()) == {0.1}


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": -1},
        {"epochs": (5, 4)},
        {"epochs": (0, 4)},
        {"learning_rate": (0.0, 1.0)},
        {"learning_rate": (0.1, float("inf"))},
        {"weight_decay": (float("nan"), 1.0)},
        {"label_smoothing": (0.2, 0.1)},
        {"label_smoothing": (-0.1, 0.1)},
        {"label_smoothing": (0.1, 1.1)},
    ],
)
def test_errors(arguments):
    with pytest.raises(ValueError, match=r"Expected `\w+` to be"):
        sample_hyperparameters(**{"n": 3, "seed": 0, **arguments})
