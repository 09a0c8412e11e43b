"""What the result of a path holds, says and draws; the positions it is built from."""

from __future__ import annotations

import json
import math

import pytest
import torch
from matplotlib.figure import Figure

from lightning_symmetry import PathResult
from lightning_symmetry.landscape.result import as_positions

ALPHAS = torch.tensor([0, 0.5, 1], dtype=torch.float64)


@pytest.fixture
def result() -> PathResult:
    loss = torch.tensor([1, 2, 0.5], dtype=torch.float64)
    return PathResult(ALPHAS, loss, {"accuracy": torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)}, 40)


def test_summary_names_every_measure(result):
    assert result.summary() == {
        "midpoint_barrier": 1.25,
        "max_barrier": 1.25,
        "max_increase": 1.0,
        "is_monotonic": 0.0,
        "local_convexity": 0.0,
        "global_convexity": 0.0,
    }


def test_to_dict_is_json(result):
    content = json.loads(json.dumps(result.to_dict()))
    assert content["alphas"] == [0, 0.5, 1]
    assert content["loss"] == [1, 2, 0.5]
    assert content["metrics"] == {"accuracy": [0.5, 0.25, 0.75]}
    assert content["num_samples"] == 40
    assert content["midpoint_barrier"] == 1.25


def test_midpoint_barrier_is_nan_where_the_middle_is_no_position():
    positions = as_positions(4)
    result = PathResult(positions, positions.square())
    assert math.isnan(result.midpoint_barrier)
    assert result.max_barrier == 0.0


@pytest.mark.parametrize(("quantity", "values"), [("loss", [1, 2, 0.5]), ("accuracy", [0.5, 0.25, 0.75])])
def test_plot_draws_curve_and_chord(result, quantity, values):
    figure = result.plot(quantity)
    assert isinstance(figure, Figure)
    (ax,) = figure.axes
    curve, line = ax.get_lines()
    assert list(curve.get_xdata()) == [0, 0.5, 1]
    assert list(curve.get_ydata()) == values
    assert list(line.get_ydata()) == [values[0], (values[0] + values[2]) / 2, values[2]]
    assert ax.get_ylabel() == quantity


def test_plot_draws_into_axes(result):
    ax = Figure().subplots()
    assert result.plot("loss", ax, "standard") is ax.get_figure()
    result.plot("accuracy", ax)
    assert len(ax.get_lines()) == 4
    assert ax.get_lines()[0].get_label() == "standard"


def test_plot_of_an_unknown_quantity(result):
    with pytest.raises(ValueError, match=r"one of \['accuracy', 'loss'\] but got 'error'"):
        result.plot("error")


def test_positions():
    assert as_positions(25).tolist() == pytest.approx([i / 24 for i in range(25)], abs=1e-15)
    assert as_positions(25)[12] == 0.5
    assert as_positions([1, 0, 0.5, 0.5]).tolist() == [0, 0.5, 1]
    assert as_positions(torch.tensor([1.5, -0.5])).tolist() == [-0.5, 1.5]


@pytest.mark.parametrize("alphas", [1, 0, -3])
def test_too_few_points(alphas):
    with pytest.raises(ValueError, match=f"at least 2 points but got {alphas}"):
        as_positions(alphas)


@pytest.mark.parametrize("alphas", [[0.5], [0.5, 0.5], [], [0, math.nan], [0, math.inf]])
def test_bad_positions(alphas):
    with pytest.raises(ValueError, match="at least two distinct finite positions"):
        as_positions(alphas)
