"""The recipe runs small and continues where it was stopped; PRONG whitens its networks; the configs are valid."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import auto_cli
from PIL import Image
from recipe_scripts import run_recipe
from torch import nn

from lightning_symmetry import collect_statistics, reparametrize, whiten

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import prong_convnet as recipe  # noqa: E402 (found through the line above)
from prong_convnet_networks import inception  # noqa: E402


def test_runs_on_the_digits_and_keeps_finished_trainings(tmp_path: Path) -> None:
    small = ["--learning_rates=[0.01]", "--adaptive_rates=[0.001]", "--steps=60", "--val_every=20", "--workers=0"]
    small += ["--width=4", "--every_n_steps=20", f"--out_dir={tmp_path}"]
    done = run_recipe("prong_convnet", *small)
    assert done.returncode == 0, done.stderr
    results = {r["method"]: r for r in json.loads((tmp_path / "results.json").read_text())["results"]}
    assert list(results) == list(recipe.LABELS)
    for result in results.values():
        assert result["points"] == [20, 40, 60]
        assert all(a < b for a, b in zip(result["seconds"], result["seconds"][1:], strict=False))
        assert all(math.isfinite(value) for value in result["train_loss"])
    assert results["prong"]["train_loss"][-1] < results["momentum"]["train_loss"][-1]
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows] == ["method", "SGD", "RMSprop", "batch norm", "PRONG", "PRONG+"]
    assert (tmp_path / "prong_convnet.png").stat().st_size > 10_000

    kept = tmp_path / "prong" / "lr0.01" / "seed0" / "result.json"
    content = json.loads(kept.read_text())
    content["test_error"] = 0.123  # shows where the table takes it from
    kept.write_text(json.dumps(content))
    setting = auto_cli(recipe.Setting, args=small, as_positional=False)
    again = {r["method"]: r for r in recipe.main(setting)}
    assert again.pop("prong")["test_error"] == 0.123
    assert all(again[name] == results[name] | {"new": False} for name in again)


def test_diverged_trainings_come_last(tmp_path: Path) -> None:
    setting = recipe.Setting(steps=20, val_every=10, width=4, out_dir=str(tmp_path))
    runs = [recipe.run(setting, "momentum", rate, 0, lambda count: None) for rate in (1e20, 1e-5)]
    assert runs[0]["val_error"] == [math.inf]
    assert recipe.best_rates(runs, ["momentum"]) == {"momentum": [runs[1]]}
    diverged, other = recipe.summarise({"momentum": [runs[0]], "prong": [runs[1]]}).splitlines()[2:]
    assert [cell.strip() for cell in diverged.split("|")][3:7] == ["inf"] * 4  # 2 losses, 2 errors
    assert "inf" not in other.partition("|")[2].rpartition("-")[0]
    recipe.draw({"momentum": [runs[0]], "prong": [runs[1]]}, "")


def test_learning_rate_falls_where_the_validation_error_does_not(tmp_path: Path) -> None:
    setting = recipe.Setting(steps=60, val_every=10, patience=2, width=4, out_dir=str(tmp_path))
    result = recipe.run(setting, "momentum", 1e-9, 0, lambda count: None)
    assert result["lr"] == pytest.approx([1e-9, 1e-9, 1e-9, 1e-10, 1e-10, 1e-11])  # as of before the evaluation


@pytest.mark.parametrize("values", [{"batch_size": 9, "devices": 2}, {"val_every": 7}, {"val_fraction": 0.0}])
def test_refuses(values: dict, tmp_path: Path) -> None:
    with pytest.raises(recipe.UsageError, match=r"no multiple of `(devices|val_every)`|no validation split"):
        recipe.main(recipe.Setting(**values, out_dir=str(tmp_path)))


@pytest.mark.parametrize("norm", [True, False])
def test_all_layers_of_the_inception_network_are_whitened(norm: bool) -> None:
    torch.manual_seed(0)
    net, images = inception(5, norm).double(), torch.randn(8, 3, 64, 64, dtype=torch.float64)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 57 * norm
    before = net(images)
    assert before.shape == (8, 5)
    assert 0.1 < before.std() < 10  # the start gets through all layers
    whiten(net)
    assert len(net.whitening_report.changed) == 58
    assert not net.whitening_report.left_alone
    assert not reparametrize(net, collect_statistics(net, lambda: net(images)), eps=0.01)
    torch.testing.assert_close(net(images), before)


CONFIGS = {
    "cifar10_prong": {"crop": 24, "batch_size": 128, "val_every": 1000, "patience": 4, "network": "vgg"},
    "imagenet_prong": {"crop": 224, "batch_size": 256, "patience": 1, "network": "inception", "devices": 8},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_papers_settings_are_valid(name: str) -> None:
    config = RECIPES / "configs" / f"{name}.yaml"
    setting = auto_cli(recipe.Setting, args=["--config", str(config)], as_positional=False)
    assert {key: getattr(setting, key) for key in CONFIGS[name]} == CONFIGS[name]
    assert "prong_plus" in setting.methods
    assert setting.steps % setting.val_every == setting.batch_size % setting.devices == 0
    assert len(setting.learning_rates) == len(setting.adaptive_rates) or "rmsprop" not in setting.methods


def tiny_images(folder: Path) -> Path:
    """Write images of two classes that differ in brightness, of various sizes."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for label in range(2):
            (folder / split / f"class{label}").mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(100 * label, 100 * label + 155, (70 + index % 3, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"class{label}" / f"{index}.png")
    return folder


@pytest.mark.slow
def test_the_setting_of_imagenet_runs_on_two_devices(tmp_path: Path) -> None:
    config = ["--config", str(RECIPES / "configs" / "imagenet_prong.yaml"), "--devices=2", "--methods=[prong_plus]"]
    small = ["--image_size=64", "--crop=48", "--val_fraction=0.25", "--num_workers=0", "--batch_size=12", "--eps=0.1"]
    small += ["--steps=6", "--val_every=3", "--every_n_steps=3", "--num_samples=24", "--learning_rates=[0.001]"]
    done = run_recipe(
        "prong_convnet",
        *config,
        *small,
        f"--data_dir={tiny_images(tmp_path / 'data')}",
        f"--out_dir={tmp_path / 'out'}",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert result["points"] == [3, 6]
    assert all(math.isfinite(value) for value in result["train_loss"])
    assert done.stdout.count("| PRONG+") == 1  # by the first process only
