"""Both recipes run small and keep finished trainings; what they compare is comparable; the configs are valid."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli
from recipe_scripts import refusal, run_recipe
from torch import nn

from lightning_symmetry import SupervisedModule, factorize

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import low_rank_language as language  # noqa: E402 (found through the line above)
import low_rank_vision as vision  # noqa: E402
from low_rank_results import by_cell, draw, grid_table, step_size_table  # noqa: E402
from low_rank_training import OF_THE_COMPARISON, Cell, decayed_groups, run, warmup_then_cosine  # noqa: E402
from shared import UsageError, settings_of_a_training  # noqa: E402

TEXT = " ".join(f"{a} times {b} is {a * b}." for a in range(40) for b in range(40))
DENSE = Cell("dense", "l2", "scratch", 1.0, 1)


def small(recipe: ModuleType, folder: Path, **values: Any) -> Any:
    if recipe is vision:
        usual = {"epochs": 2, "batch_size": 256, "every_n_steps": 4, "learning_rate": 0.05, "batch_norm": "keep"}
    else:
        (folder / "text.txt").write_text(TEXT)
        usual = {"text": str(folder / "text.txt"), "widths": [16, 8], "context": 16, "heads": 2, "steps": 12}
        usual |= {"warmup": 2, "every_n_steps": 4, "test_fraction": 0.1}
    return recipe.Setting(**{**usual, "workers": 0, "out_dir": str(folder / "out"), **values})


@pytest.fixture(scope="module", params=[vision, language], ids=["vision", "language"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Any, Any]:
    recipe = request.param
    setting = small(recipe, tmp_path_factory.mktemp(recipe.__name__))
    return recipe, setting, recipe.main(setting)


def test_everything_is_trained_and_written(finished):
    recipe, setting, results = finished
    runs = by_cell(results)
    assert set(runs) == {*recipe.cells(setting), *(cell.baseline for cell in recipe.cells(setting))}
    for cell, (result,) in runs.items():
        assert result["steps"] == 12
        assert result["course"]["step"] == [0, 4, 8, 12]
        assert all(math.isfinite(result[key]) for key in ("train_loss", "test_loss", "effective_rank"))
        assert (result["parameters"] < runs[cell.baseline][0]["parameters"]) == (cell.init != "dense")
    out = Path(setting.out_dir)
    (figure,) = out.glob("*.png")
    assert figure.stat().st_size > 20_000
    assert json.loads((out / "results.json").read_text())["results"] == results
    assert list((out / "summary").glob("events*"))


def test_segments_go_from_the_dense_network_to_the_low_rank_one(finished):
    runs = by_cell(finished[2])
    for cell, (result,) in runs.items():
        if cell.init == "dense":
            continue
        (path,) = result["path"]
        assert len(path["alphas"]) == 11
        ends = [runs[cell.baseline][0], result]
        assert [path["loss"][0], path["loss"][-1]] == pytest.approx([r["test_loss"] for r in ends], rel=1e-4)
        assert path["distance"] > 0


def test_all_begin_with_the_same_dense_weights(finished):
    """So that one batch has one loss before the switch, whatever becomes of the weights, and spectral is nearest."""
    runs = by_cell(finished[2])
    for start in ("scratch", "pretrained"):
        switches = {c: r["switch"][0] for c, (r,) in runs.items() if c.init != "dense" and c.start == start}
        for width, rank in {(c.width, c.rank) for c in switches}:
            mine = {c: s for c, s in switches.items() if (c.width, c.rank) == (width, rank)}
            losses = [switch["low_rank/loss_before"] for switch in mine.values()]
            assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
            errors = {c.init: s["low_rank/relative_error"] for c, s in mine.items()}
            assert errors["spectral"] == min(errors.values())


def test_tables_and_figure_show_the_results(finished):
    recipe, _, results = finished
    runs = by_cell(results)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in grid_table(
        runs, recipe.QUALITY.of, recipe.QUALITY.digits).splitlines()]  # fmt: skip
    columns = {"L2, from scratch": ("l2", "scratch"), "Frobenius, pre-trained": ("frobenius", "pretrained")}
    for row in cells[2:5]:
        for name, (decay, start) in columns.items():
            cell = Cell(row[2].replace(" ", "_"), decay, start, float(row[1]), int(row[0]))
            expected = recipe.QUALITY.scale * runs[cell][0][recipe.QUALITY.key]
            assert float(row[cells[0].index(name)]) == pytest.approx(expected, abs=0.51 * 10**-recipe.QUALITY.digits)
    steps = step_size_table(runs, recipe.QUALITY).splitlines()[2:]
    assert len(steps) == 4
    for line in steps:
        usual, other, difference = (float(value) for value in line.split("|")[5:8])
        assert difference == pytest.approx(other - usual, abs=1.1 * 10**-recipe.QUALITY.digits)
    panels = draw(runs, recipe.QUALITY, "").axes
    assert all(panel.has_data() for panel in panels)
    assert ("Size" in panels[3].get_title()) == (recipe is language)


def test_finished_trainings_are_kept(finished):
    recipe, setting, results = finished
    again = recipe.main(replace(setting, inits=["spectral"], half_steps=False))
    cells = [result["cell"] for result in again]
    assert {json.dumps(r) for r in again} == {json.dumps(r | {"new": False}) for r in results if r["cell"] in cells}
    assert len(again) < len(results)


def test_trainings_with_another_setting_or_folder_of_data_are_made_anew(tmp_path):
    before = small(vision, tmp_path, data="mnist", data_dir="a")
    again = {"out_dir": "elsewhere", "seeds": 3, "workers": 2, "num_workers": 1}
    others = {"data_dir": "b", "weight_decay": 0.0, "epochs": 3}
    matters = settings_of_a_training(before, OF_THE_COMPARISON)
    for name, value in (again | others).items():
        changed = settings_of_a_training(replace(before, **{name: value}), OF_THE_COMPARISON)
        assert (changed == matters) == (name in again)
    embedded = [settings_of_a_training(replace(before, data="digits", data_dir=d), OF_THE_COMPARISON) for d in "ab"]
    assert embedded[0] == embedded[1]


def test_frobenius_decay_of_a_dense_network_is_the_optimizers(tmp_path):
    """The dense network serves as the baseline of both."""
    runs = []
    for decay in ("l2", "frobenius"):
        setting = small(vision, tmp_path, weight_decay=0.1, out_dir=str(tmp_path / decay))
        runs.append(run(vision.make_task, setting, replace(DENSE, decay=decay), 3, lambda count: None))
    assert all(result["new"] for result in runs)
    assert runs[0]["test_loss"] == pytest.approx(runs[1]["test_loss"], rel=1e-4)


def test_saved_networks_have_their_factors(finished):
    recipe, setting, results = finished
    cell = next(c for c in by_cell(results) if c.init == "spectral" and c.start == "pretrained")
    path = Path(setting.out_dir) / cell.name / "seed0" / "last.ckpt"
    data = recipe.make_data(setting)
    data.setup("test")
    net = recipe.make_network(setting, data, cell.width)
    module = SupervisedModule.load_from_checkpoint(
        path, net=net, loss=recipe.make_task(setting).loss, weights_only=True
    )
    result = by_cell(results)[cell][0]
    assert sum(p.numel() for p in module.net.parameters()) == result["parameters"]
    total = count = 0.0
    module.eval()
    with torch.no_grad():
        for batch in data.test_dataloader():
            output, target = module.output_and_target(batch, "test")
            total, count = total + float(module.loss(output, target)) * len(target), count + len(target)
    assert total / count == pytest.approx(result["test_loss"], rel=1e-5)


def test_groups_decay_matrices_alone():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4), nn.Embedding(5, 6))
    matrices, others = decayed_groups(net.parameters(), 0.1)
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in matrices["params"]} == {id(net[0].weight), id(net[3].weight), id(net[4].weight)}
    assert len(others["params"]) == 4


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_schedule(warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, rates = warmup_then_cosine(optimizer, 20, warmup), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rising = [0.5 * (k + 1) / (warmup + 1) for k in range(warmup)]
    falling = [0.25 * (1 + math.cos(math.pi * k / (20 - warmup))) for k in range(20 - warmup)]
    assert rates == pytest.approx(rising + falling)


@pytest.mark.parametrize(
    ("recipe", "config"), [(vision, "cifar100_wrn"), (vision, "imagenet_resnet50"), (language, "lm1b")]
)
def test_configs(recipe, config):
    setting = auto_cli(recipe.Setting, args=[f"--config={RECIPES}/configs/{config}.yaml"], as_positional=False)
    assert setting.batch_size % setting.devices == 0
    classes = {
        "num_classes": 100,
        "input_shape": (3, 32, 32),
        "vocab_size": setting.vocab_size if recipe is language else 0,
    }
    data = type("Data", (), classes)()
    with torch.device("meta"):
        net = nn.ModuleDict({"net": recipe.make_network(setting, data, setting.widths[0])})
    dense = sum(p.numel() for p in net.parameters())
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    task = recipe.make_task(setting)
    factorize(net, setting.ranks[0], init="random", skip=task.skip, min_saving=task.min_saving)
    changed = {name.rpartition(".")[2] for name in net.factorization_report.changed}
    expected = {
        "cifar100_wrn": {"conv1", "conv2", "skip"},
        "imagenet_resnet50": {"conv1", "conv2", "conv3", "0"},
        "lm1b": {"query", "key", "value", "out", "up", "down"},
    }
    assert changed == expected[config]
    assert (sum(p.numel() for p in net.parameters()) < dense) == (config != "lm1b")  # whose rank is beyond break-even


@pytest.mark.parametrize(
    ("recipe", "values", "message"),
    [
        (vision, {"inits": []}, "nothing to train"),
        (language, {"seeds": 0}, "nothing to train"),
        (language, {"inits": []}, "nothing to train"),
        (language, {"warmup": 12}, "shorter than a training of 12 updates"),
        (vision, {"pretrain": 1.0}, "between 0 and 1"),
        (language, {"pretrain": 0.0}, "between 0 and 1"),
        (vision, {"batch_size": 9, "devices": 2}, "no multiple"),
        (language, {"batch_size": 9, "devices": 2}, "no multiple"),
    ],
)
def test_refuses(recipe, values, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        recipe.main(small(recipe, tmp_path, **values))


@pytest.mark.parametrize("name", ["low_rank_vision", "low_rank_language"])
def test_as_a_script(name, tmp_path):
    shared = [
        "--inits=[spectral]",
        "--decays=[frobenius]",
        "--starts=[pretrained]",
        "--half_steps=false",
        "--workers=0",
    ]
    own = {
        "low_rank_vision": ["--epochs=1", "--batch_size=512"],
        "low_rank_language": ["--steps=6", "--warmup=1", "--widths=[16]", "--ranks=[0.25]", "--max_tokens=20000"],
    }
    arguments = [*shared, *own[name], f"--out_dir={tmp_path}"]
    done = run_recipe(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert "| spectral" in done.stdout
    assert refusal(name, *arguments, "--seeds=0").startswith(f"{name}.py: There is nothing to train")
