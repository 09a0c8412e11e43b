"""The recipe runs on small zoos of its own and of the user's, keeps finished trainings, and says what it measured."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import auto_cli
from scipy.stats import kendalltau

from lightning_symmetry.metanets import Zoo, ZooWriter, zoo_classifier

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import metanetworks as recipe  # noqa: E402 (found through the line above)
from metanetworks_results import PAPER, results_table  # noqa: E402
from shared import UsageError  # noqa: E402

NAMES = ["mlp", "dmc", "deepsets", "deepsets_by_tensor", "statnn", "graph"]


def write_zoo(path: Path, kind: str, count: int = 24) -> str:
    """Write networks of random weights, the size of whose head tells their accuracy."""
    generator = torch.Generator().manual_seed(len(kind))
    network = zoo_classifier(kind)
    scales = torch.rand(count, generator=generator)
    with ZooWriter(path, network, factory="lightning_symmetry.metanets:zoo_classifier",
                   factory_arguments={"kind": kind}) as writer:  # fmt: skip
        rows = 0.1 * torch.randn(count, writer.layout.num_features, generator=generator)
        head = next(i for i, entry in enumerate(writer.layout.in_rows) if entry.name == "head.weight")
        start = sum(torch.Size(entry.shape).numel() for entry in writer.layout.in_rows[:head])
        rows[:, start : start + 320] *= 1 + 9 * scales[:, None]
        writer.append(rows, [{"index": i, "accuracy": float(s)} for i, s in enumerate(scales)])
    return str(path)


def small(folder: Path, **values) -> recipe.Setting:
    usual = {"learning_rates": [1e-3, 1e-2], "runs": 2, "metanet_epochs": 2, "metanet_batch_size": 6, "workers": 0}
    return recipe.Setting(**{**usual, "out_dir": str(folder / "out"), **values})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metanetworks")
    zoos = {kind: write_zoo(folder / kind, kind) for kind in ("standard", "w")}
    setting = small(folder, zoos=zoos)
    return setting, recipe.main(setting)


def test_all_metanetworks_are_trained_on_all_zoos(finished):
    _, results = finished
    assert [(r["kind"], r["metanetwork"], r["seed"]) for r in results] == [
        (kind, name, seed) for kind in ("standard", "w") for name in NAMES for seed in (1, 2)
    ]
    for result in results:
        true, predicted = np.array(result["true"]), np.array(result["predicted"])
        assert len(true) == 6 and 0 <= predicted.min() <= predicted.max() <= 1
        r2 = 1 - ((true - predicted) ** 2).sum() / ((true - true.mean()) ** 2).sum()
        assert result["test_r2"] == pytest.approx(r2, rel=1e-3, abs=1e-4)
        assert result["test_kendall"] == pytest.approx(kendalltau(true, predicted).statistic, abs=1e-5)
    by_zoo = {kind: {tuple(r["true"]) for r in results if r["kind"] == kind} for kind in ("standard", "w")}
    assert all(len(targets) == 1 for targets in by_zoo.values())  # the same test networks for all
    predictions = [tuple(r["predicted"]) for r in results]
    assert len(set(predictions)) == len(predictions)  # runs differ by their seed


def test_the_rate_is_that_of_the_best_validation(finished):
    setting, results = finished
    content = json.loads((Path(setting.out_dir) / "results.json").read_text())
    assert content["results"] == results
    assert len(content["search"]) == 2 * len(NAMES) * 2 and {r["seed"] for r in content["search"]} == {0}
    for result in results:
        scores = {
            r["val_r2"]: r["learning_rate"]
            for r in content["search"]
            if (r["kind"], r["metanetwork"]) == (result["kind"], result["metanetwork"])
        }
        assert result["learning_rate"] == scores[max(scores)]


def test_what_is_written(finished):
    setting, results = finished
    out = Path(setting.out_dir)
    assert (out / "metanetworks.png").stat().st_size > 20_000
    assert list((out / "summary").glob("events*"))
    assert len(list((out / "trainings").glob("*/events*"))) >= len(results)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in results_table(results).splitlines()[2:]]
    assert len(rows) == 2 * len(NAMES)
    first = [r["test_r2"] for r in results if (r["kind"], r["metanetwork"]) == ("standard", "mlp")]
    assert rows[0][2] == f"{np.mean(first):.3f} ± {np.std(first, ddof=1):.3f}"
    assert rows[0][3] == PAPER["standard", "mlp"][0] and rows[5][3] == "-"


def test_finished_trainings_are_kept_until_the_zoo_changes(finished, tmp_path):
    setting, results = finished
    out = tmp_path / "out"
    shutil.copytree(setting.out_dir, out)
    part = replace(setting, metanetworks=["mlp", "statnn"], out_dir=str(out))
    again = recipe.main(part)
    chosen = [r for r in results if r["metanetwork"] in ("mlp", "statnn")]
    assert [r | {"new": False} for r in chosen] == again
    other = {kind: write_zoo(tmp_path / kind, kind, 28) for kind in ("standard", "w")}
    assert all(r["new"] for r in recipe.main(replace(part, zoos=other)))


@pytest.mark.slow
def test_worker_processes_give_the_same(finished, tmp_path):
    setting, results = finished
    part = replace(setting, metanetworks=["statnn"], workers=2, out_dir=str(tmp_path / "out"))
    chosen = [r for r in results if r["metanetwork"] == "statnn"]
    for ours, theirs in zip(recipe.main(part), chosen, strict=True):
        assert ours["predicted"] == pytest.approx(theirs["predicted"], rel=1e-4)


@pytest.mark.slow
def test_zoos_are_trained_and_reused(tmp_path):
    setting = small(tmp_path, kinds=["standard", "w"], networks=16, epochs=(1, 1), metanetworks=["statnn"], runs=1,
                    learning_rates=[1e-3])  # fmt: skip
    results = recipe.main(setting)
    assert [r["kind"] for r in results] == ["standard", "w"]
    folder = tmp_path / "out" / "zoos" / "standard-16"
    before = (folder / "weights.bin").stat().st_mtime_ns
    assert len(Zoo.open(folder)) == 16
    assert not any(r["new"] for r in recipe.main(setting))
    assert (folder / "weights.bin").stat().st_mtime_ns == before


def test_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="at least one run"):
        recipe.main(small(tmp_path, runs=0))
    diverged = [{"kind": "w", "metanetwork": "mlp", "learning_rate": 1e-3, "val_r2": float("nan")}]
    with pytest.raises(UsageError, match="diverged"):
        recipe.best_rates(diverged)


@pytest.mark.parametrize("name", ["cifar10_metanetworks", "digits_metanetworks"])
def test_configs_are_those_of_the_paper(name):
    setting = auto_cli(
        recipe.Setting, args=["--config", str(RECIPES / "configs" / f"{name}.yaml")], as_positional=False
    )
    assert setting.learning_rates == [1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2]
    assert (setting.runs, setting.metanet_epochs, setting.metanet_batch_size, setting.metanet_decay) == (
        5,
        50,
        128,
        0.01,
    )
    assert setting.splits == (0.5, 0.25, 0.25)
    assert setting.epochs == ((10, 40) if name == "cifar10_metanetworks" else (2, 10))
    assert setting.networks == (10_000 if name.startswith("cifar10") else 1_050)
