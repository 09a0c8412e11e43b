"""Statistics over loss curves of known answer, by hand, against closed forms of the t-tests and a permutation test."""

from __future__ import annotations

import json
import math
import warnings
from itertools import combinations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from matplotlib.figure import Figure
from scipy import stats

from lightning_symmetry.landscape import PathResult, PathStatistics, path_statistics

MEASURES = ("max_increase", "percent_monotonic", "local_convexity", "global_convexity")

# Five positions. Curve, then by hand: Delta, monotonic in percent, local and global convexity.
CURVES = {
    # Slopes -1, -3, -5, -7 fall: nowhere convex. Chord 16, 12, 8, 4, 0: above it at all three inner positions.
    "concave": ([16, 15, 12, 7, 0], -1, 100, 0, 0),
    # Slopes -7, -5, -3, -1 rise. Below the chord 16, 12, 8, 4, 0.
    "convex": ([16, 9, 4, 1, 0], -1, 100, 1, 1),
    # Slopes -4, -1, 1, 4 rise, the largest step up is the last. Chord 4, 3.5, 3, 2.5, 2 until it ends above.
    "convex, past its minimum": ([6, 2, 1, 2, 6], 4, 0, 1, 1),
    # Second differences 0, 0, -4: flat, then a drop. Chord 4, 3, 2, 1, 0: above it everywhere inside.
    "plateau": ([4, 4, 4, 4, 0], 0, 100, 2 / 3, 0),
    # Second differences 4, 0, 0: a drop, then flat. Below the chord.
    "drop and plateau": ([4, 0, 0, 0, 0], 0, 100, 1, 1),
    # Slopes -4, 3, -4, 1: second differences 7, -7, 5. Chord 8, 7, 6, 5, 4: 4, 7, 3 against 7, 6, 5.
    "zigzag": ([8, 4, 7, 3, 4], 3, 0, 2 / 3, 2 / 3),
    # A barrier: slopes 3, 0, -2, -6. Chord 5, 3.75, 2.5, 1.25, 0.
    "barrier": ([5, 8, 8, 6, 0], 3, 0, 0, 0),
    # The chord itself: second differences 0, on the chord.
    "straight": ([4, 3, 2, 1, 0], -1, 100, 1, 1),
}


def curve(values, alphas=None) -> PathResult:
    loss = torch.tensor(values, dtype=torch.float64)
    return PathResult(torch.linspace(0, 1, len(loss), dtype=torch.float64) if alphas is None else alphas, loss)


def named(*names: str) -> list[PathResult]:
    return [curve(CURVES[name][0]) for name in names]


def noisy(count: int, seed: int, bend: float = 0.0, points: int = 9) -> list[PathResult]:
    generator = np.random.default_rng(seed)
    x = np.linspace(0, 1, points)
    return [curve((1 - x) ** (1 + bend) + 0.1 * generator.standard_normal(points)) for _ in range(count)]


def welch(x: torch.Tensor, y: torch.Tensor) -> float:
    """Welch (1947), written out."""
    a, b = x.var().item() / len(x), y.var().item() / len(y)
    t = (x.mean() - y.mean()).item() / math.sqrt(a + b)
    degrees = (a + b) ** 2 / (a**2 / (len(x) - 1) + b**2 / (len(y) - 1))
    return 2 * stats.t.sf(abs(t), degrees)


def student(x: torch.Tensor, y: torch.Tensor) -> float:
    degrees = len(x) + len(y) - 2
    pooled = ((len(x) - 1) * x.var().item() + (len(y) - 1) * y.var().item()) / degrees
    t = (x.mean() - y.mean()).item() / math.sqrt(pooled * (1 / len(x) + 1 / len(y)))
    return 2 * stats.t.sf(abs(t), degrees)


@pytest.mark.parametrize("name", CURVES)
def test_measures_of_a_curve_by_hand(name):
    values, *expected = CURVES[name]
    found = path_statistics({"standard": [curve(values)] * 2})["standard"]
    for measure, value in zip(MEASURES, expected, strict=True):
        assert found.mean[measure] == pytest.approx(value, abs=1e-15), measure
        assert found.deviation[measure] == 0


def test_means_and_deviations_by_hand():
    found = path_statistics({"standard": named("concave", "convex", "zigzag", "barrier")})["standard"]
    assert found.number == 4 and found.left_out == 0
    assert found.values["max_increase"].tolist() == [-1, -1, 3, 3]
    assert found.mean == pytest.approx(
        {"max_increase": 1, "percent_monotonic": 50, "local_convexity": 5 / 12, "global_convexity": 5 / 12}
    )
    # Squared deviations over n - 1 = 3: 16 / 3; 10,000 / 3; and (25 + 49 + 9 + 25) / 144 / 3 = 1 / 4.
    assert found.deviation == pytest.approx(
        {
            "max_increase": math.sqrt(16 / 3),
            "percent_monotonic": 100 / math.sqrt(3),
            "local_convexity": 0.5,
            "global_convexity": 0.5,
        }
    )
    assert found.p_value == {}


def test_p_values_by_hand():
    """Delta: -1, -1, 3, 3 of mean 1 and variance 16/3, against -1, -1, 0 of mean -2/3 and variance 1/3."""
    found = path_statistics(
        {"standard": named("concave", "convex", "zigzag", "barrier"), "w": named("convex", "straight", "plateau")}
    )
    t = (1 + 2 / 3) / math.sqrt(4 / 3 + 1 / 9)
    degrees = (4 / 3 + 1 / 9) ** 2 / ((4 / 3) ** 2 / 3 + (1 / 9) ** 2 / 2)
    assert found["w"].p_value["max_increase"] == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-12)


@pytest.mark.parametrize(("equal_var", "formula"), [(False, welch), (True, student)])
def test_p_values_against_the_formula(equal_var, formula):
    kinds = {"standard": noisy(17, 0), "sigma": noisy(12, 1, 0.4), "w": noisy(30, 2, 1.0)}
    found = path_statistics(kinds, equal_var=equal_var)
    assert found.equal_var is equal_var
    tested = 0
    for kind in ("sigma", "w"):
        assert set(found[kind].p_value) == set(MEASURES)
        for measure, p in found[kind].p_value.items():
            x, y = found[kind].values[measure], found["standard"].values[measure]
            if x.std() + y.std() > 0:
                assert p == pytest.approx(formula(x, y), rel=1e-9)
                tested += 1
    assert tested >= 6


def test_percent_monotonic_is_tested_over_zeros_and_ones():
    kinds = {"standard": named(*["zigzag"] * 5, *["convex"] * 3), "w": named("barrier", *["convex"] * 7)}
    found = path_statistics(kinds)
    assert found["standard"].mean["percent_monotonic"] == 37.5
    assert found["w"].mean["percent_monotonic"] == 87.5
    # Variances n p (1 - p) / (n - 1): 8 * 15 / 64 / 7 and 8 * 7 / 64 / 7; seven of eight are not five.
    a, b = 15 / 56 / 8, 7 / 56 / 8
    degrees = (a + b) ** 2 / (a**2 / 7 + b**2 / 7)
    expected = 2 * stats.t.sf(0.5 / math.sqrt(a + b), degrees)
    assert found["w"].p_value["percent_monotonic"] == pytest.approx(expected, rel=1e-12)


def test_p_values_are_close_to_those_of_a_permutation_test():
    """All 12,870 ways of dealing 16 curves into two kinds: the share with a difference at least as large."""
    kinds = {"standard": noisy(8, 3), "w": noisy(8, 4, 0.8)}
    found = path_statistics(kinds)
    values = torch.cat([found["standard"].values["max_increase"], found["w"].values["max_increase"]]).numpy()
    first = np.array([values[list(chosen)].sum() for chosen in combinations(range(16), 8)]) / 8
    differences = np.abs(2 * first - values.sum() / 8)
    share = (differences >= differences[0] - 1e-12).mean()
    assert 0.001 < share < 0.5
    assert found["w"].p_value["max_increase"] == pytest.approx(share, rel=0.35)


def test_p_values_of_equal_populations_are_uniform():
    """Of 400 tests of two kinds that do not differ, 5 % fall below 0.05: between 1.8 and 8.2 % at 3 deviations."""
    found = [
        path_statistics({"standard": noisy(10, 2 * k), "w": noisy(10, 2 * k + 1)})["w"].p_value["max_increase"]
        for k in range(400)
    ]
    assert 0.018 < np.mean(np.array(found) < 0.05) < 0.082


def test_a_test_without_any_spread_has_no_p_value():
    kinds = {"standard": named("zigzag", "zigzag"), "sigma": named(*["zigzag"] * 3), "w": named("convex", "convex")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = path_statistics(kinds)
    for kind in ("sigma", "w"):  # neither where the values are the same, nor where they differ
        assert all(math.isnan(p) for p in found[kind].p_value.values())
    assert "(p undefined)" in found.table()


def test_spread_in_one_kind_alone_is_enough():
    kinds = {"standard": named("zigzag", "convex", "zigzag"), "w": named("convex", "convex", "convex")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = path_statistics(kinds)["w"].p_value["percent_monotonic"]
    # Only the reference's variance counts, so 2 degrees of freedom: t = 2/3 / sqrt(1/3 / 3) = 2.
    assert p == pytest.approx(2 * stats.t.sf(2, 2), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_curves_that_are_not_finite_are_left_out_and_counted(bad):
    broken = curve([3, bad, 1, 1, 0])
    gone = curve([bad] * 5)
    whole = {"standard": named("zigzag", "convex", "plateau"), "w": named("convex", "concave")}
    found = path_statistics(
        {"standard": [broken, *whole["standard"], gone, gone], "w": [*whole["w"][:1], broken, *whole["w"][1:]]}
    )
    expected = path_statistics(whole)
    assert [found[kind].left_out for kind in whole] == [3, 1]
    for kind, results in whole.items():
        assert found[kind].number == len(results)
        assert [r.loss.tolist() for r in found[kind].results] == [r.loss.tolist() for r in results]
        assert found[kind].mean == expected[kind].mean
        assert found[kind].p_value == pytest.approx(expected[kind].p_value, nan_ok=True)


def statistics() -> PathStatistics:
    kinds = {"standard": noisy(6, 0), "sigma": [*noisy(5, 1, 0.4), curve([math.nan] * 9)], "w": noisy(7, 2, 1.0)}
    return path_statistics(kinds)


def test_table_has_a_row_for_each_kind():
    found = statistics()
    header, line, *rows = found.table().splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "kind",
        "curves",
        "left out",
        "Delta",
        "monotonic %",
        "local convexity",
        "global convexity",
    ]
    assert set(line) == {"|", "-"} and len({len(text) for text in (header, line, *rows)}) == 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["standard", "6", "0"], ["sigma", "5", "1"], ["w", "7", "0"]]
    reference = found["standard"]
    assert cells[0][3] == f"{reference.mean['max_increase']:.3f} ± {reference.deviation['max_increase']:.3f}"
    assert cells[2][3].startswith(f"{found['w'].mean['max_increase']:.3f} ± ") and "(p = " in cells[2][3]
    assert cells[0][4] == f"{reference.mean['percent_monotonic']:.1f}"
    assert f"{reference.mean['max_increase']:.5f} ±" in found.table(digits=5)


def test_small_p_values_are_shown_as_powers():
    kinds = {"standard": noisy(20, 0), "w": [curve(np.linspace(1, 0, 9) + 1e-3 * k * np.arange(9)) for k in range(20)]}
    found = path_statistics(kinds)
    p = found["w"].p_value["max_increase"]
    assert 0 < p < 1e-3
    assert f"(p = {p:.0e})" in found.table()


def test_to_dict_is_json():
    found = statistics()
    content = json.loads(json.dumps(found.to_dict()))
    assert content["reference"] == "standard" and content["equal_var"] is False
    assert list(content["kinds"]) == ["standard", "sigma", "w"]
    assert content["kinds"]["sigma"]["number"] == 5 and content["kinds"]["sigma"]["left_out"] == 1
    assert content["kinds"]["w"]["mean"] == found["w"].mean
    assert content["kinds"]["w"]["p_value"] == pytest.approx(found["w"].p_value, nan_ok=True)
    assert content["kinds"]["standard"]["p_value"] == {}


def test_plot_shows_the_curves_of_lowest_final_loss():
    generator = np.random.default_rng(0)
    ends = {"standard": generator.permutation(30) / 10, "w": generator.permutation(4) / 10}
    kinds = {kind: [curve([5.0, 4.0, end]) for end in values] for kind, values in ends.items()}
    figure = path_statistics(kinds).plot()
    assert isinstance(figure, Figure)
    left, right = figure.axes
    shown = [[line.get_ydata()[-1] for line in ax.get_lines()] for ax in (left, right)]
    assert shown[0] == pytest.approx([k / 10 for k in range(20)])  # 20 of 30
    assert shown[1] == pytest.approx([0, 0.1, 0.2, 0.3])  # all there are
    assert list(left.get_lines()[0].get_xdata()) == [0, 0.5, 1]
    assert list(left.get_lines()[0].get_ydata()[:2]) == [5, 4]
    assert "standard" in left.get_title() and "20 of 30" in left.get_title() and "w" in right.get_title()
    assert left.get_ylabel() == "loss" and left.get_ylim() == right.get_ylim()
    assert len(path_statistics(kinds).plot(3).axes[0].get_lines()) == 3


def test_plot_of_one_kind(tmp_path):
    figure = path_statistics({"standard": named("convex", "zigzag")}).plot()
    figure.savefig(tmp_path / "figure.png")
    assert len(figure.axes) == 1 and (tmp_path / "figure.png").stat().st_size > 1000


def test_another_reference():
    kinds = {"plain": noisy(6, 0), "w": noisy(7, 2, 1.0)}
    forth, back = path_statistics(kinds, "plain"), path_statistics(kinds, reference="w")
    assert forth["plain"].p_value == back["w"].p_value == {}
    assert forth["w"].p_value == pytest.approx(back["plain"].p_value, nan_ok=True)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"plain": noisy(3, 0), "w": noisy(3, 1)}, r"one of the kinds \['plain', 'w'\] but got 'standard'"),
        ({}, r"one of the kinds \[\] but got 'standard'"),
        ({"standard": noisy(3, 0), "w": noisy(1, 1)}, r"at least 2 finite .* but got 1 of 'w' \(0 not finite\)"),
        ({"standard": []}, r"at least 2 finite .* but got 0 of 'standard' \(0 not finite\)"),
        (
            {"standard": [*noisy(1, 0), *[curve([math.nan] * 9)] * 3]},
            r"at least 2 finite .* but got 1 of 'standard' \(3 not finite\)",
        ),
        (
            {"standard": noisy(3, 0), "w": noisy(3, 1, points=5)},
            r"same positions, but 'standard' has 9 from 0 to 1 and 'w' 5 from 0 to 1",
        ),
        (
            {"standard": [*noisy(2, 0, points=3), curve([1, 2, 3], torch.tensor([0, 0.3, 1]).double())]},
            r"'standard' has 3 from 0 to 1 and 'standard' 3 from 0 to 1",
        ),
        ({"standard": [curve([2, 1])] * 2}, "at least 3 positions, .* 'standard' has 2"),
    ],
)
def test_what_cannot_be_compared(kinds, message):
    with pytest.raises(ValueError, match=message):
        path_statistics(kinds)


def test_unknown_kinds_and_counts():
    found = statistics()
    with pytest.raises(KeyError, match=r"one of the kinds \['standard', 'sigma', 'w'\] but got 'conv'"):
        found["conv"]
    with pytest.raises(ValueError, match="at least 1 but got 0"):
        found.plot(0)


# Whole numbers, scales that are powers of two and at most 9 positions: nothing below is rounded, or only evenly.
curves = st.integers(4, 9).flatmap(
    lambda points: st.lists(st.lists(st.integers(-50, 50), min_size=points, max_size=points), min_size=4, max_size=10)
)


@given(curves, st.integers(-4, 4), st.integers(-100, 100))
@settings(deadline=None, max_examples=60)
def test_only_delta_knows_the_unit_of_the_loss(values, exponent, offset):
    scale, half = 2.0**exponent, len(values) // 2
    plain = {"standard": [curve(v) for v in values[:half]], "w": [curve(v) for v in values[half:]]}
    moved = {kind: [curve((scale * r.loss + offset).tolist()) for r in results] for kind, results in plain.items()}
    before, after = path_statistics(plain), path_statistics(moved)
    for kind in plain:
        for statistic in ("mean", "deviation"):
            ours, theirs = dict(getattr(after[kind], statistic)), dict(getattr(before[kind], statistic))
            assert ours.pop("max_increase") == pytest.approx(scale * theirs.pop("max_increase"), rel=1e-9, abs=1e-9)
            assert ours == theirs
        assert after[kind].p_value == pytest.approx(before[kind].p_value, rel=1e-6, nan_ok=True)


@given(curves, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_order_of_the_curves_does_not_matter(values, random):
    half = len(values) // 2
    shuffled = [random.sample(part, len(part)) for part in (values[:half], values[half:])]
    first = path_statistics({"standard": [curve(v) for v in values[:half]], "w": [curve(v) for v in values[half:]]})
    second = path_statistics({"w": [curve(v) for v in shuffled[1]], "standard": [curve(v) for v in shuffled[0]]})
    for kind in ("standard", "w"):
        assert second[kind].mean == pytest.approx(first[kind].mean, rel=1e-12, abs=1e-12)
        assert second[kind].deviation == pytest.approx(first[kind].deviation, rel=1e-12, abs=1e-12)
        assert second[kind].p_value == pytest.approx(first[kind].p_value, rel=1e-6, nan_ok=True)


@given(curves)
@settings(deadline=None, max_examples=40)
def test_statistics_stay_within_their_ranges(values):
    half = len(values) // 2
    found = path_statistics({"standard": [curve(v) for v in values[:half]], "w": [curve(v) for v in values[half:]]})
    for kind in ("standard", "w"):
        mean, deviation = found[kind].mean, found[kind].deviation
        assert 0 <= mean["percent_monotonic"] <= 100
        assert 0 <= mean["local_convexity"] <= 1 and 0 <= mean["global_convexity"] <= 1
        assert all(value >= 0 for value in deviation.values())
        # Of zeros and ones the deviation follows from the mean: sqrt(n / (n - 1) p (1 - p)).
        share, n = mean["percent_monotonic"] / 100, found[kind].number
        expected = 100 * math.sqrt(max(n / (n - 1) * share * (1 - share), 0))
        assert deviation["percent_monotonic"] == pytest.approx(expected, abs=1e-9)
    p = [value for value in found["w"].p_value.values() if not math.isnan(value)]
    assert all(0 <= value <= 1 for value in p)


@given(curves)
@settings(deadline=None, max_examples=30)
def test_a_kind_does_not_differ_from_itself(values):
    results = [curve(v) for v in values]
    found = path_statistics({"standard": results, "copy": results})
    varied = {m: p for m, p in found["copy"].p_value.items() if found["copy"].deviation[m] > 0}
    assume(varied)
    assert varied == pytest.approx(dict.fromkeys(varied, 1.0))
