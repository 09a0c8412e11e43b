"""Calibration errors, likelihood and Brier score are those of the definitions, and torchmetrics'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calibrated import assert_agrees, by_hand, measured
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError

from lightning_symmetry.callbacks.calibration_bins import score


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_bins=st.integers(1, 20), classes=st.integers(2, 5), parts=st.integers(1, 3))
def test_measures_are_those_of_the_definition(data, num_bins, classes, parts):
    edges = torch.linspace(0, 1, num_bins + 1).tolist()
    confidence = st.one_of(st.sampled_from(edges), st.just(1.0), st.floats(0, 1, width=32))
    count = data.draw(st.integers(1, 12))
    peaks = torch.tensor([data.draw(confidence) for _ in range(count)])
    target = torch.tensor([data.draw(st.integers(0, classes - 1)) for _ in range(count)])
    where = torch.tensor([data.draw(st.integers(0, classes - 1)) for _ in range(count)])
    rows = ((1 - peaks) / (classes - 1))[:, None].repeat(1, classes).scatter(1, where[:, None], peaks[:, None])
    result = measured(rows, target, num_bins, parts, outputs="probabilities")
    assert_agrees(result, by_hand(rows, target, num_bins))
    assert sum(result.count) == count
    if rows.max() < 1:
        for norm, value in (("l1", result.ece), ("max", result.mce)):
            metric = MulticlassCalibrationError(num_classes=classes, n_bins=num_bins, norm=norm)
            assert value == pytest.approx(float(metric(rows, target)), abs=2e-6)


def test_a_confidence_of_one_lies_in_the_last_bin():
    rows, target = torch.tensor([[1.0, 0.0], [0.96, 0.04], [0.5, 0.5]]), torch.tensor([0, 1, 0])
    result = measured(rows, target, num_bins=10, outputs="probabilities")
    assert result.count == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert (result.confidence[9], result.hits[9]) == pytest.approx((0.98, 0.5))
    assert result.ece == pytest.approx((2 * 0.48 + 0.5) / 3)


def test_logits_between_0_and_1_are_logits():
    logits = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
    target = logits.argmax(1)
    result = measured(logits, target)
    assert_agrees(result, by_hand(logits.softmax(1), target))
    taken_for_probabilities = MulticlassCalibrationError(num_classes=4, n_bins=15)(logits, target)
    assert abs(result.ece - float(taken_for_probabilities)) > 0.3


@pytest.mark.parametrize("shape", [(300,), (300, 1)])
@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_one_output_is_binary(shape, outputs):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(shape, generator=generator).mul(2)
    target = torch.rand(shape, generator=generator).round()  # a float, as binary cross entropy wants it
    given = logits if outputs == "logits" else logits.sigmoid()
    p, y = logits.sigmoid().double().flatten(), target.double().flatten()
    result = measured(given, target, parts=3, outputs=outputs)
    metric = BinaryCalibrationError(n_bins=15)
    assert result.ece == pytest.approx(float(metric(p.float(), y.long())), abs=1e-6)
    assert result.nll == pytest.approx(float(F.binary_cross_entropy(p, y)), rel=1e-5)
    assert result.brier == pytest.approx(float((p - y).square().mean()), rel=1e-5)
    assert result.accuracy == pytest.approx(float(((p > 0.5) == y.bool()).double().mean()))
    assert result.binary
    assert result.num_classes == 2
    member = (p >= 1 / 15 * 4) & (p < 1 / 3)
    assert result.count[4] == int(member.sum())
    assert result.hits[4] == pytest.approx(float(y[member].mean()))


@pytest.mark.parametrize(
    ("arrange", "class_dim"),
    [(lambda x: x, -1), (lambda x: x.movedim(-1, 1), 1), (lambda x: x.flatten(0, 1), -1)],
    ids=["last", "second", "flattened"],
)
def test_sequences_and_ignored_targets(arrange, class_dim):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 5, 4, generator=generator)
    target = torch.randint(4, (6, 5), generator=generator)
    target[2:, 3:] = -100
    known = target >= 0
    expected = by_hand(logits[known].softmax(1), target[known])
    assert_agrees(measured(arrange(logits), target, class_dim=class_dim), expected)
    without_last = by_hand(logits[:5][known[:5]].softmax(1), target[:5][known[:5]])
    repeats = 1 if arrange(logits).shape[0] == 6 else 5
    assert_agrees(measured(arrange(logits), target, class_dim=class_dim, repeats=repeats), without_last)


def test_doubles_stay_doubles():
    logits = torch.randn(50, 3, dtype=torch.float64)
    target = logits.argmax(1)
    assert_agrees(measured(logits, target), by_hand(logits.softmax(1), target), tolerance=1e-14)


def test_outputs_that_are_not_finite_give_nan():
    result = measured(torch.full((4, 3), torch.nan), torch.tensor([0, 1, 2, 0]))
    assert np.isnan([result.ece, result.nll, result.brier]).all()
    assert result.figure().axes


@pytest.mark.parametrize(
    ("output", "target", "kwargs", "message"),
    [
        ((8, 3), torch.zeros(7), {}, r"targets of shape \(8,\) for outputs of shape \(8, 3\).*got \(7,\)"),
        ((8, 3, 4), torch.zeros(8, 4), {}, r"classes in dimension -1 but got \(8, 4\)"),
        ((8, 3), torch.full((8,), 0.5), {}, "classes but got fractions"),
        ((8, 3), torch.full((8,), 3), {}, "below the number of classes, 3, but got 3"),
        ((8, 3), torch.zeros(8), {"outputs": "probabilities"}, "Use outputs='logits'"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(output, target, kwargs, message):
    with pytest.raises(MisconfigurationException, match=message):
        score(torch.randn(output), target, **kwargs)


def test_the_figure_shows_the_bins():
    result = measured(torch.randn(99, 4).mul(3), torch.randint(4, (99,)), num_bins=10)
    upper, lower = result.figure("val").axes
    filled = [b for b in range(10) if result.count[b]]
    bars = upper.containers[0].patches
    assert [bar.get_height() for bar in bars] == pytest.approx([result.hits[b] for b in filled])
    tops = [bar.get_y() + bar.get_height() for bar in upper.containers[1].patches]
    assert tops == pytest.approx([result.confidence[b] for b in filled])
    assert [bar.get_height() * 99 for bar in lower.patches] == pytest.approx([result.count[b] for b in filled])
    assert upper.get_title() == f"val: ECE {100 * result.ece:.2f} %"
