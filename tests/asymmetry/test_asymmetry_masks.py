"""Random subsets: distinct, of the right size, uniform, and the same wherever and whenever they are drawn."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from lightning_symmetry import AsymmetricConv2d, AsymmetricLinear, FiGLU
from lightning_symmetry.asymmetry.masks import check_counts, distinct_subsets, layer_generator


@st.composite
def sizes(draw):
    units = draw(st.integers(2, 12))
    n_fix = draw(st.integers(1, units - 1))
    rows = draw(st.integers(1, min(60, math.comb(units, n_fix))))
    return rows, units, n_fix


@settings(deadline=None, max_examples=150, derandomize=True)
@given(sizes(), st.integers(0, 2**31))
def test_rows_are_distinct_ascending_subsets(size, seed):
    rows, units, n_fix = size
    subsets = distinct_subsets(rows, units, n_fix, layer_generator(seed))
    assert subsets.shape == (rows, n_fix)
    assert len({tuple(row) for row in subsets.tolist()}) == rows
    for row in subsets.tolist():
        assert row == sorted(set(row))
        assert set(row) <= set(range(units))


@pytest.mark.parametrize(("units", "n_fix"), [(5, 2), (6, 1), (6, 5), (8, 4), (2, 1)])
def test_all_subsets_are_used_when_there_are_only_as_many_as_rows(units, n_fix):
    rows = math.comb(units, n_fix)
    subsets = distinct_subsets(rows, units, n_fix, layer_generator(0))
    assert sorted(map(tuple, subsets.tolist())) == list(combinations(range(units), n_fix))
    check_counts(rows, units, n_fix, "layer", "")
    with pytest.raises(ValueError, match=f"{rows + 1} rows need pairwise distinct masks, but only {rows} subsets"):
        check_counts(rows + 1, units, n_fix, "layer", "")


@pytest.mark.parametrize(
    ("rows", "units", "n_fix"),
    [
        (1, 6, 3),  # drawn
        (1, 6, 4),  # drawn as the complement
        (2, 7, 3),  # drawn, with repeated rows to draw again
        (2, 5, 2),  # listed
    ],
)
def test_draws_are_uniform_over_all_sets_of_distinct_subsets(rows, units, n_fix):
    generator = layer_generator(7, "uniform")
    draws = Counter(
        frozenset(map(tuple, distinct_subsets(rows, units, n_fix, generator).tolist())) for _ in range(4000)
    )
    outcomes = math.comb(math.comb(units, n_fix), rows)
    counts = [*draws.values(), *[0] * (outcomes - len(draws))]
    assert len(counts) == outcomes
    assert chisquare(counts).pvalue > 1e-3


def test_each_row_of_many_is_uniform():
    generator = layer_generator(3)
    counts = torch.zeros(40, 9)
    for _ in range(500):
        counts.scatter_add_(1, distinct_subsets(40, 9, 4, generator), torch.ones(40, 4))
    # Variance of a hypergeometric count over 500 independent draws; five standard deviations.
    bound = 5 * math.sqrt(500 * 4 / 9 * 5 / 9)
    assert (counts - 500 * 4 / 9).abs().max() < bound


def test_constants_are_normal_with_standard_deviation_kappa():
    fixed = AsymmetricLinear(400, 200, n_fix=100, kappa=0.25, seed=5).fixed.flatten() / 0.25
    # 20,000 draws: five standard errors of mean, variance and fourth moment of N(0, 1).
    for moment, expected, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        assert abs(fixed.double().pow(moment).mean() - expected) < 5 * math.sqrt(variance / fixed.numel())


@pytest.mark.parametrize(("rows", "units", "n_fix"), [(10, 8, 3), (60, 8, 3)])
def test_generator_depends_on_seed_and_name_only(rows, units, n_fix):
    first = distinct_subsets(rows, units, n_fix, layer_generator(1, "a"))
    torch.manual_seed(123)
    assert torch.equal(first, distinct_subsets(rows, units, n_fix, layer_generator(1, "a")))
    for seed, name in ((2, "a"), (1, "b"), (1, ""), (11, "")):
        assert not torch.equal(first, distinct_subsets(rows, units, n_fix, layer_generator(seed, name)))


def test_seed_and_name_are_not_confused():
    draws = [torch.rand(4, generator=layer_generator(seed, name)) for seed, name in ((1, "2"), (12, ""), (1, "/2"))]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_global_random_state_is_neither_read_nor_moved():
    torch.manual_seed(4)
    layer, figlu = AsymmetricLinear(8, 6, 2, 1.0), FiGLU(5)
    state = torch.get_rng_state()
    layer = type(layer).from_layer(layer.to_layer(), 2, 1.0)
    again = FiGLU(5)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(figlu.fixed, again.fixed)
    assert torch.equal(layer.fixed, AsymmetricLinear(8, 6, 2, 1.0).fixed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_type_does_not_change_what_is_drawn(dtype):
    make = {
        "linear": lambda: AsymmetricLinear(8, 6, 2, 1.0, seed=2),
        "conv": lambda: AsymmetricConv2d(4, 6, 3, 2, 1.0, layout="filters", seed=2),
        "figlu": lambda: FiGLU(5, seed=2),
    }
    expected = {name: build() for name, build in make.items()}
    torch.set_default_dtype(dtype)
    try:
        found = {name: build() for name, build in make.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    for name, module in found.items():
        for buffer, value in module.constants().items():
            wanted = expected[name].constants()[buffer]
            assert torch.equal(value, wanted if buffer == "mask" else wanted.to(dtype))


def test_layers_can_be_built_on_the_meta_device_and_filled_from_a_checkpoint():
    with torch.device("meta"):
        layers = AsymmetricLinear(8, 6, 2, 1.0), AsymmetricConv2d(4, 6, 3, 2, 1.0), FiGLU(5)
    x = torch.randn(2, 8), torch.randn(2, 4, 5, 5), torch.randn(2, 5)
    for layer, real, at in zip(
        layers,
        (AsymmetricLinear(8, 6, 2, 1.0, seed=3), AsymmetricConv2d(4, 6, 3, 2, 1.0, seed=3), FiGLU(5)),
        x,
        strict=True,
    ):
        assert all(tensor.is_meta for tensor in layer.state_dict().values())
        assert layer(at.to("meta")).shape == real(at).shape
        layer.load_state_dict(real.state_dict(), assign=True)
        torch.testing.assert_close(layer(at), real(at))
    assert AsymmetricLinear(8, 6, 2, 1.0, device="meta").to_empty(device="cpu").weight.device.type == "cpu"


SCRIPT = """
import hashlib, torch
from lightning_symmetry import MLP, ResNet20, asymmetrize
nets = [asymmetrize(MLP(), preset="mlp", seed=3), asymmetrize(ResNet20(), preset="resnet20"),
        asymmetrize(ResNet20(), n_fix=2, layout="filters", skip=["stem", "*.0"]), asymmetrize(MLP(), "sigma")]
digest = hashlib.sha256()
for net in nets:
    for name, value in net.state_dict().items():
        if name.endswith((".mask", ".fixed")):
            digest.update(name.encode() + value.numpy().tobytes())
value = digest.hexdigest()
"""


def test_two_processes_draw_the_same_constants():
    command = [sys.executable, "-c", f"{SCRIPT}\nprint(value)"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    torch.manual_seed(17)
    here: dict[str, str] = {}
    exec(SCRIPT, here)
    assert len(other) == 64
    assert here["value"] == other
