"""The recipe runs small, its claim holds on the digits, and every configuration builds its networks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonargparse import auto_cli
from recipe_scripts import run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_symmetry import asymmetrize

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import linear_mode_connectivity as recipe  # noqa: E402 (found through the line above)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One pair of standard and of W-asymmetric networks on the digits, as a user would run it."""
    out = tmp_path_factory.mktemp("recipe")
    done = run_recipe("linear_mode_connectivity", "--pairs=1", "--kinds=[standard,w]", f"--out_dir={out}")
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(out=out, printed=done.stdout, progress=done.stderr)


def test_w_asymmetric_digits_networks_are_linearly_connected_and_standard_ones_are_not(run: SimpleNamespace) -> None:
    results = {r["kind"]: r for r in json.loads((run.out / "results.json").read_text())["results"]}
    assert results["w"]["test"]["midpoint_barrier"] <= 0.02
    assert results["standard"]["test"]["midpoint_barrier"] >= 0.2
    assert all(min(recipe.end_points([r], "test")) >= 95 for r in results.values())


def test_prints_the_table_beside_the_papers_and_shows_progress(run: SimpleNamespace) -> None:
    rows = [line for line in run.printed.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["network", "Standard", "W-Asym"]
    assert "0.188 ± .12" in rows[1] and "-0.012 ± .00" in rows[2]
    assert "160/160" in run.progress  # 4 networks of 40 epochs


def test_writes_figure_weights_and_tensorboard_logs(run: SimpleNamespace) -> None:
    assert (run.out / "linear_mode_connectivity.png").stat().st_size > 10_000
    assert (run.out / "w" / "pair0" / "a" / "last.ckpt").exists()
    events = EventAccumulator(str(run.out / "w" / "pair0" / "b")).Reload()
    assert "interpolation_test/midpoint_barrier" in events.Tags()["scalars"]
    assert "interpolation_train/loss_path" in events.Tags()["images"]
    assert len(events.Scalars("interpolation_test/loss_curve")) == 25
    summary = EventAccumulator(str(run.out / "summary")).Reload()
    assert "linear_mode_connectivity" in summary.Tags()["images"]


SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


CONFIGS = [path for path in sorted((RECIPES / "configs").glob("*.yaml")) if "linear_mode" in path.read_text()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configurations_build_all_kinds_of_networks(config: Path) -> None:
    setting = auto_cli(recipe.Setting, args=["--config", str(config)], as_positional=False)
    assert setting.paper in recipe.PAPER
    data = SimpleNamespace(input_shape=SHAPES.get(setting.data), num_features=128, num_classes=10)
    masks = {}
    for kind in setting.kinds:
        net = recipe.make_network(setting, data)
        transform = recipe.asymmetry(setting, kind)
        if transform is not None:
            net = asymmetrize(net, **transform)
            masks[kind] = {name: buffer for name, buffer in net.named_buffers() if name.endswith("mask")}
            kappas = {m.kappa for m in net.modules() if hasattr(m, "kappa")}
            assert kind != "control" or kappas == {setting.control_kappa}
    assert masks["w"].keys() == masks["control"].keys()
    assert all(mask.equal(masks["control"][name]) for name, mask in masks["w"].items())
