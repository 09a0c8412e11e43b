"""Epochs are counted and shown rightly, the sweep runs small and goes on, and its configuration builds networks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import auto_cli
from recipe_scripts import refusal, run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy

from lightning_symmetry.asymmetry import AsymmetricLayer
from lightning_symmetry.metanets import zoo_classifier

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import asymmetry_sweep as recipe  # noqa: E402 (found through the line above)
from shared import UsageError  # noqa: E402
from zoo_training import image_tensors  # noqa: E402


def small(folder: Path, **values) -> recipe.Setting:
    usual = {"n_fix": [0, 4], "kappa": [0.5, 2.0], "seeds": 2, "epochs": 3, "batch_size": 256, "workers": 0}
    return recipe.Setting(**{**usual, "out_dir": str(folder), **values})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    setting = small(tmp_path_factory.mktemp("sweep"), accuracy=0.12)
    return setting, recipe.main(setting)


def test_counts_epochs_from_one_and_tells_what_is_not_reached():
    assert recipe.epochs_to(0.7, [0.7, 0.9]) == 1
    assert recipe.epochs_to(0.7, [0.2, 0.69, 0.71, 0.6]) == 3
    assert recipe.epochs_to(0.7, [0.2, 0.69, float("nan")]) is None  # a network that diverged


def test_every_cell_is_trained_once_and_standard_networks_fill_a_column(finished):
    setting, results = finished
    assert [tuple(r["cell"]) for r in results] == [(0, 0.0), (4, 0.5), (4, 2.0)]
    found = recipe.by_cell(setting, results)
    assert set(found) == {(0, 0.5), (0, 2.0), (4, 0.5), (4, 2.0)}
    assert found[0, 0.5] == found[0, 2.0]


def test_follows_a_plain_loop(finished):
    """The course of one network of the population is that of the network trained by itself."""
    setting, results = finished
    seed = setting.seed + 1
    images, labels = image_tensors("digits", "data")["train"]
    torch.manual_seed(seed)
    net = zoo_classifier(**recipe.factory_arguments(setting, (4, 2.0))).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=setting.learning_rate, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(seed)
    steps, step, course = setting.epochs * -(-len(images) // setting.batch_size), 0, []
    for _ in range(setting.epochs):
        right = 0
        for index in torch.randperm(len(images), generator=generator).split(setting.batch_size):
            rate = min(step / (0.2 * steps), (steps - step) / (0.8 * steps))
            optimizer.param_groups[0]["lr"] = setting.learning_rate * rate
            logits = net(images[index])
            optimizer.zero_grad()
            cross_entropy(logits, labels[index], label_smoothing=setting.label_smoothing).backward()
            optimizer.step()
            right += (logits.argmax(1) == labels[index]).sum().item()
            step += 1
        course.append(right / len(images))
    (mine,) = (r["train_accuracy"][1] for r in results if tuple(r["cell"]) == (4, 2.0))
    assert mine == pytest.approx(course, abs=3 / len(images))  # float32: rounding may turn single images


def test_writes_figure_results_and_tensorboard(finished):
    setting, results = finished
    out = Path(setting.out_dir)
    assert (out / "asymmetry_sweep.png").stat().st_size > 20_000
    assert json.loads((out / "results.json").read_text())["results"] == results
    summary = EventAccumulator(str(out / "summary")).Reload()
    assert "asymmetry_sweep" in summary.Tags()["images"]


def test_does_not_train_again_for_another_accuracy(finished):
    setting, results = finished
    again = recipe.main(small(Path(setting.out_dir), accuracy=0.999))
    assert not any(r["new"] for r in again)
    assert [r["train_accuracy"] for r in again] == [r["train_accuracy"] for r in results]
    text = recipe.grid_table(small(Path(setting.out_dir), accuracy=0.999), recipe.by_cell(setting, again))
    assert text.count("\n") == 3


def test_shows_what_is_not_reached():
    setting = small(Path("unused"), epochs=40)
    assert recipe.shown(setting, [10, 12]) == "11.0 ± 1.4"
    assert recipe.shown(setting, [10, None]) == "> 40 (1 of 2 reach it)"
    assert recipe.shown(setting, [None, None], deviation=False) == "> 40"
    found = {(0, 0.5): [5, 5], (0, 2.0): [5, 5], (4, 0.5): [5, 7], (4, 2.0): [9, None]}
    assert recipe.grid_table(setting, found).splitlines()[-1].split("|")[1:-1][0].strip() == "2"
    said = recipe.trend(setting, found)
    assert "n_fix to the next in 2 of 2" in said
    assert "kappa to the next in 1 of 1" in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_fix": []}, "nothing to train"),
        ({"seeds": 0}, "nothing to train"),
        ({"augment": True}, "mirrors"),
        ({"n_fix": [17]}, "no network with n_fix 17"),
    ],
)
def test_refuses(values, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        recipe.main(small(tmp_path, **values))


def test_configuration_builds_networks():
    args = ["--config", str(RECIPES / "configs" / "cifar10_sweep.yaml")]
    setting = auto_cli(recipe.Setting, args=args, as_positional=False)
    assert setting.accuracy == 0.7
    for cell in recipe.cells(setting):
        net = zoo_classifier(**recipe.factory_arguments(setting, cell))
        layers = [module for module in net.modules() if isinstance(module, AsymmetricLayer)]
        assert len(layers) == (10 if cell[0] else 0)  # 9 convolutions, skips included, and the head
        assert {layer.kappa for layer in layers} == ({cell[1]} if cell[0] else set())
        assert all(layer.mask.flatten(1).unique(dim=0).shape[0] == layer.mask.shape[0] for layer in layers)


@pytest.mark.slow
def test_as_a_script(tmp_path):
    arguments = ["--n_fix=[0,4]", "--kappa=[2.0]", "--seeds=1", "--epochs=1", "--batch_size=512", "--workers=2"]
    done = run_recipe("asymmetry_sweep", *arguments, f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "| kappa | standard" in done.stdout
    assert "2/2" in done.stderr
    refused = refusal("asymmetry_sweep", *arguments, "--n_fix=[17]", f"--out_dir={tmp_path}")
    assert refused.startswith("asymmetry_sweep.py: There is no network with n_fix 17")
