"""Barriers, monotonicity and convexity against curves of known answer and brute force."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lightning_symmetry.landscape import (
    PathResult,
    chord,
    global_convexity,
    local_convexity,
    max_barrier,
    max_increase,
    midpoint_barrier,
)

GRIDS = {
    "uniform": torch.linspace(0, 1, 25, dtype=torch.float64),
    "uneven": torch.tensor([0.0, 0.03, 0.1, 0.35, 0.5, 0.52, 0.8, 0.99, 1.0], dtype=torch.float64),
}
# curve, local convexity, global convexity, whether it never increases
CURVES = {
    "convex": (lambda x: (x - 1.2) ** 2, 1.0, 1.0, True),
    "convex with a minimum inside": (lambda x: (x - 0.4) ** 2, 1.0, 1.0, False),
    "concave": (lambda x: 2 - x**2, 0.0, 0.0, True),
    "concave bump": (lambda x: x * (1 - x), 0.0, 0.0, False),
    "straight down": (lambda x: 3 - 2.7 * x, 1.0, 1.0, True),
    "straight up": (lambda x: 0.1 + 0.3 * x, 1.0, 1.0, False),
    "constant": (lambda x: torch.full_like(x, 0.7), 1.0, 1.0, True),
    "constant zero": (torch.zeros_like, 1.0, 1.0, True),
}

losses = st.lists(st.floats(0, 100, width=32), min_size=3, max_size=31).filter(lambda values: len(values) % 2 == 1)


def uniform(values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(0, 1, len(values), dtype=torch.float64), torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("case", CURVES.values(), ids=CURVES)
def test_curves_of_known_shape(case, grid):
    curve, local, overall, monotonic = case
    loss = curve(grid)
    assert local_convexity(grid, loss) == local
    assert global_convexity(grid, loss) == overall
    assert PathResult(grid, loss).is_monotonic is monotonic


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_barriers_of_a_parabola(grid):
    loss = 1 + 0.5 * grid + 4 * grid * (1 - grid)  # 1 above the chord in the middle, its highest point
    assert midpoint_barrier(grid, loss) == pytest.approx(1, abs=1e-14)
    assert max_barrier(grid, loss) == pytest.approx(1, abs=1e-14)


def test_barriers_by_hand():
    alphas = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    loss = torch.tensor([1, 3, 2, 0.5, 2], dtype=torch.float64)
    assert midpoint_barrier(alphas, loss) == 0.5  # 2 - (1 + 2) / 2
    assert max_barrier(alphas, loss) == 1.75  # 3 - 1.25
    assert max_increase(loss) == 2.0
    assert chord(alphas, loss).tolist() == [1, 1.25, 1.5, 1.75, 2]
    assert global_convexity(alphas, loss) == pytest.approx(1 / 3)  # only 0.5 <= 1.75
    assert local_convexity(alphas, loss) == pytest.approx(1 / 3)  # slopes 8, -4, -6, 6


def test_zigzag():
    alphas, loss = uniform([1, 0, 1, 0, 1])
    assert local_convexity(alphas, loss) == pytest.approx(2 / 3)
    assert global_convexity(alphas, loss) == 1.0
    assert max_increase(loss) == 1.0
    assert max_barrier(alphas, loss) == 0.0


def test_plateau_then_drop_is_monotonic_but_not_globally_convex():
    alphas, loss = uniform([2, 2, 2, 2, 0])
    assert max_increase(loss) == 0.0
    assert local_convexity(alphas, loss) == pytest.approx(2 / 3)
    assert global_convexity(alphas, loss) == 0.0
    assert max_barrier(alphas, loss) == 1.5


def test_uneven_positions_use_divided_differences():
    alphas = torch.tensor([0, 0.1, 1], dtype=torch.float64)
    loss = torch.tensor([1, 0.8, 0], dtype=torch.float64)  # slopes -2 and -0.89, yet the plain differences curve down
    assert loss.diff().diff().item() < 0
    assert local_convexity(alphas, loss) == 1.0


def test_tolerance_is_rounding_only():
    alphas = torch.linspace(0, 1, 3, dtype=torch.float64)
    bent = torch.tensor([1.0, 0.5 + 1e-12, 0.0], dtype=torch.float64)
    assert local_convexity(alphas, bent) == 0.0
    assert global_convexity(alphas, bent) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_curves_that_are_not_finite_have_no_convexity_and_are_not_monotonic(bad):
    alphas, loss = uniform([1, bad, 0.5, 0.2, 0.1])
    result = PathResult(alphas, loss)
    assert math.isnan(result.local_convexity)
    assert math.isnan(result.global_convexity)
    assert not result.is_monotonic
    assert not math.isfinite(result.max_barrier)
    assert result.midpoint_barrier == pytest.approx(-0.05)


def test_two_positions_have_no_inner_ones():
    alphas, loss = uniform([1, 2])
    assert math.isnan(local_convexity(alphas, loss))
    assert math.isnan(global_convexity(alphas, loss))
    assert max_barrier(alphas, loss) == 0.0


@pytest.mark.parametrize(
    ("alphas", "missing"), [([0, 1 / 3, 2 / 3, 1], "0.5"), ([0.1, 0.5, 1], "0"), ([0, 0.5, 0.9], "1")]
)
def test_midpoint_barrier_needs_its_three_positions(alphas, missing):
    positions = torch.tensor(alphas, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"alpha = {missing},"):
        midpoint_barrier(positions, torch.ones_like(positions))


@given(losses)
@settings(deadline=None, max_examples=60)
def test_max_barrier_is_at_least_the_midpoint_barrier_and_zero(values):
    alphas, loss = uniform(values)
    assert max_barrier(alphas, loss) >= 0
    assert max_barrier(alphas, loss) >= midpoint_barrier(alphas, loss) - 1e-12


@given(losses, st.floats(-50, 50), st.floats(-50, 50), st.floats(0.01, 10))
@settings(deadline=None, max_examples=60)
def test_barriers_ignore_a_straight_line_and_scale_with_the_loss(values, offset, slope, scale):
    alphas, loss = uniform(values)
    moved = scale * loss + offset + slope * alphas
    for measure in (midpoint_barrier, max_barrier):
        assert measure(alphas, moved) == pytest.approx(scale * measure(alphas, loss), abs=1e-9)


@given(losses)
@settings(deadline=None, max_examples=60)
def test_convexities_and_barriers_do_not_depend_on_the_direction(values):
    alphas, loss = uniform(values)
    back = loss.flip(0)
    assert global_convexity(alphas, loss) == global_convexity(alphas, back)
    assert local_convexity(alphas, loss) == local_convexity(alphas, back)
    assert max_barrier(alphas, loss) == pytest.approx(max_barrier(alphas, back), abs=1e-12)


@given(losses)
@settings(deadline=None, max_examples=60)
def test_monotonic_is_sorted_descending(values):
    result = PathResult(*uniform(values))
    assert result.is_monotonic == (values == sorted(values, reverse=True))
    assert result.max_increase == max(b - a for a, b in pairwise(values))


@given(st.lists(st.integers(-20, 20), min_size=3, max_size=20))
@settings(deadline=None, max_examples=60)
def test_convexities_count_as_by_hand(values):
    n = len(values)
    alphas, loss = uniform([float(value) for value in values])
    local = sum(values[i - 1] - 2 * values[i] + values[i + 1] >= 0 for i in range(1, n - 1))
    below = sum(values[i] * (n - 1) <= values[0] * (n - 1 - i) + values[-1] * i for i in range(1, n - 1))
    assert local_convexity(alphas, loss) == pytest.approx(local / (n - 2))
    assert global_convexity(alphas, loss) == pytest.approx(below / (n - 2))
