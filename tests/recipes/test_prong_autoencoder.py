"""The recipe runs small, and PRONG is ahead of momentum on the digits."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from jsonargparse import auto_cli
from recipe_scripts import run_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import prong_autoencoder as recipe  # noqa: E402 (found through the line above)


def test_prong_is_ahead_of_momentum_on_the_digits(tmp_path: Path) -> None:
    small = ["--methods=[momentum,prong]", "--learning_rates=[0.1]", "--steps=400", "--num_points=4", "--workers=0"]
    small += ["--hidden=[48,24]", "--eps_values=[0.1,0.01]", "--intervals=[400]", "--seeds=2"]
    done = run_recipe("prong_autoencoder", *small, f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "results.json").read_text())
    results = {r["method"]: r for r in content["results"]}
    assert results["prong"]["points"] == [0, 100, 200, 300, 400]
    assert results["prong"]["errors"][0] == results["momentum"]["errors"][0]  # the same network to begin with
    assert results["prong"]["errors"][-1] < 0.9 * results["momentum"]["errors"][-1]
    assert all(math.isfinite(e) for r in results.values() for e in r["errors"])
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    first = [row.split("|")[1].strip() for row in rows]
    assert first == ["method", "SGD, momentum 0.9", "PRONG, momentum 0.9", "eps", "0.1", "0.01", "T", "400"]
    assert [[r["seed"] for r in runs] for runs in content["best"].values()] == [[0, 1], [0, 1]]
    assert [(r["eps"], r["every_n_steps"], r["whiten_at_init"]) for r in content["eps"] + content["intervals"]] == [
        (0.1, 100, True),
        (0.01, 100, True),
        (0.01, 400, True),
        (0.01, 400, False),
    ]
    assert content["eps"][1]["errors"] == results["prong"]["errors"]
    assert (tmp_path / "prong_autoencoder.png").stat().st_size > 10_000


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    def go(*rates: float, steps: int = 4) -> dict[float, dict]:
        setting = recipe.Setting(
            ["sgd"], list(rates), hidden=[4], steps=steps, num_points=2, workers=0, out_dir=str(tmp_path)
        )
        return {r["rate"]: r for r in recipe.main(setting)["results"]}

    first, second = go(0.1), go(0.1, 0.01)
    assert [(rate, r["new"]) for rate, r in second.items()] == [(0.1, False), (0.01, True)]
    assert second[0.1]["errors"] == first[0.1]["errors"]
    assert go(0.1, steps=6)[0.1]["new"]  # another setting


def test_the_papers_setting_is_valid() -> None:
    setting = auto_cli(
        recipe.Setting, args=["--config", str(RECIPES / "configs" / "mnist_autoencoder.yaml")], as_positional=False
    )
    assert (setting.every_n_steps, setting.num_samples, setting.hidden) == (1000, 100, [1000, 500, 250, 30])
    assert len(setting.learning_rates) == len(setting.adaptive_rates)
