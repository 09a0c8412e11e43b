"""The recipe runs small; on 10x10 digits whitening takes the middle layers' condition number down by more than 95 %."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import auto_cli
from recipe_scripts import run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import fisher_conditioning as recipe  # noqa: E402 (found through the line above)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("fisher")
    small = ["--seeds=2", "--steps=24", "--num_points=2", "--every_n_steps=8", "--workers=0"]
    ran = run_recipe("fisher_conditioning", *small, f"--out_dir={out}")
    assert ran.returncode == 0, ran.stderr
    return out, ran.stdout


def results(out: Path, method: str) -> list[dict]:
    return [r for r in json.loads((out / "results.json").read_text())["results"] if r["method"] == method]


@pytest.mark.parametrize("layer", ["net.linears.1", "net.linears.2"])
def test_the_condition_number_falls_by_more_than_95_percent_at_the_first_reparametrisation(done, layer):
    for run in results(done[0], "prong"):
        before, after = (row for row in run["history"] if row["layer"] == layer and row["step"] == 0)
        assert (before["reparametrization"], after["reparametrization"]) == ("before", "after")
        assert before["rank"] == after["rank"] == 20 * 20 + 20  # of full rank: no eigenvalue is left out
        assert after["percent"] == pytest.approx(100 * after["condition"] / before["condition"])
        assert after["percent"] < 5
        # Without damping, or with one below most eigenvalues; one of 1 % of the largest leaves most of it.
        assert run["damped"][layer][0] == pytest.approx(after["percent"])
        assert run["damped"][layer][0] < 5 < 30 < run["damped"][layer][-1] < 100


def test_all_methods_begin_with_the_same_matrix(done):
    starts = [[r["history"][0]["condition"] for r in results(done[0], method)] for method in recipe.LABELS]
    assert starts[0] == starts[1]
    assert starts[2] == pytest.approx(starts[0], rel=1e-6)
    assert starts[0][0] != starts[0][1]


def test_what_is_printed_and_drawn(done):
    out, printed = done
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:7]] == [
        [label, f"linears.{k}"] for label in recipe.LABELS.values() for k in (1, 2)
    ]
    assert rows[7][1:] == [f"{damping:g}" for damping in recipe.DAMPINGS]
    assert (out / "fisher_conditioning.png").stat().st_size > 50_000
    events = EventAccumulator(str(out / "prong" / "seed0"), {"images": 0}).Reload()
    assert "fisher/net.linears.1/percent" in events.Tags()["scalars"]
    assert "fisher/net.linears.1/after" in events.Tags()["images"]


def test_the_digits_are_resampled():
    data = recipe.make_data(recipe.Setting())
    data.setup("fit")
    images, labels = next(iter(data.eval_dataloader("train")))
    assert images.shape[1:] == data.input_shape == (1, 10, 10)
    small = recipe.ls.DigitsData()
    small.setup("fit")
    originals, expected = next(iter(small.eval_dataloader("train")))
    assert torch.equal(labels, expected)
    back = torch.nn.functional.interpolate(images, (8, 8), mode="bilinear", antialias=True)
    assert torch.corrcoef(torch.stack([back.flatten(), originals.flatten()]))[0, 1] > 0.95


def test_the_papers_setting_is_valid():
    config = str(RECIPES / "configs" / "mnist_conditioning.yaml")
    setting = auto_cli(recipe.Setting, args=["--config", config], as_positional=False)
    assert setting.data == "mnist"
    assert recipe.middle_layers(setting) == ["net.linears.1", "net.linears.2"]
    assert setting.steps // setting.every_n_steps == 10
    assert recipe.make_data(setting).input_shape == (1, 10, 10)
