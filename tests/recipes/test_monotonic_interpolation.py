"""Zoos are trained as the paper's, lines measured as it says, both once; order and tables tell what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli
from recipe_scripts import refusal, run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy

from lightning_symmetry.asymmetry import AsymmetricLayer
from lightning_symmetry.landscape import PathResult
from lightning_symmetry.landscape.statistics import path_statistics
from lightning_symmetry.metanets import Zoo, ZooWriter, zoo_classifier

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import monotonic_interpolation as recipe  # noqa: E402 (found through the line above)
import zoo_training  # noqa: E402
from shared import UsageError  # noqa: E402


def small(folder: Path, **values: Any) -> recipe.Setting:
    usual = {"kinds": ["standard", "w"], "networks": 3, "epochs": (1, 2), "batch_size": 256, "num_points": 5}
    return recipe.Setting(**{**usual, "workers": 0, "out_dir": str(folder), **values})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    setting = small(tmp_path_factory.mktemp("mli"))
    return setting, recipe.main(setting)


def zoos_of(setting: recipe.Setting) -> dict[str, Zoo]:
    return {kind: Zoo.open(Path(setting.out_dir) / "zoos" / f"{kind}-{setting.networks}") for kind in setting.kinds}


def test_lines_are_those_of_plain_loops(finished):
    setting, statistics = finished
    images, labels = zoo_training.image_tensors("digits", "data")["train"]
    for kind, zoo in zoos_of(setting).items():
        for place, record in enumerate(zoo.records):
            torch.manual_seed(record["seed"])
            net = zoo_classifier(kind).eval()
            start = {name: value.clone() for name, value in net.state_dict().items()}
            end = zoo.network(place).state_dict()
            for alpha, loss in zip([0.0, 0.25, 0.5, 0.75, 1.0], statistics[kind].results[place].loss, strict=True):
                net.load_state_dict(
                    {n: torch.lerp(v, end[n], alpha) if v.is_floating_point() else v for n, v in start.items()}
                )
                with torch.no_grad():
                    expected = cross_entropy(net(images), labels, label_smoothing=record["label_smoothing"])
                assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            assert statistics[kind].results[place].loss[-1].item() == pytest.approx(record["train_loss"], rel=1e-5)


def test_kinds_draw_hyperparameters_of_their_own(finished):
    standard, w = zoos_of(finished[0]).values()
    assert not set(standard["learning_rate"]) & set(w["learning_rate"])
    assert not set(standard["seed"]) & set(w["seed"])


def test_writes_figure_results_and_tensorboard(finished, capsys):
    setting, statistics = finished
    out = Path(setting.out_dir)
    assert (out / "monotonic_interpolation.png").stat().st_size > 20_000
    content = json.loads((out / "results.json").read_text())
    assert content["statistics"]["kinds"]["w"]["mean"] == statistics["w"].mean
    assert [line["loss"] for line in content["lines"]["w"]] == [r.loss.tolist() for r in statistics["w"].results]
    summary = EventAccumulator(str(out / "summary")).Reload()
    assert "monotonic_interpolation" in summary.Tags()["images"]


def test_neither_trains_nor_measures_again(finished, capsys):
    setting, statistics = finished
    files = [*Path(setting.out_dir).glob("lines/*/*.json"), *Path(setting.out_dir).glob("zoos/*/weights.bin")]
    before = {file: file.stat().st_mtime_ns for file in files}
    assert len(before) == 4
    again = recipe.main(setting)
    assert {file: file.stat().st_mtime_ns for file in files} == before
    assert again.to_dict() == statistics.to_dict()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| Standard", "| W-Asym"))]
    assert ".079 ± .109" in rows[2] and "-.027 ± .026" in rows[3]


def test_other_settings_do_not_pass_for_the_same_zoo(finished):
    with pytest.raises(UsageError, match="batch_size"):
        recipe.main(small(Path(finished[0].out_dir), batch_size=128))


def test_shards_make_the_zoo_of_one_run(finished, tmp_path, capsys):
    values = {"kinds": ["w"], "zoo_dir": str(tmp_path / "shared")}
    for shard in ("0/2", "1/2"):
        assert recipe.main(small(tmp_path, shard=shard, **values)) is None
        assert "without --shard" in capsys.readouterr().out
    assert recipe.main(small(tmp_path, **values)) is not None
    whole = zoos_of(finished[0])["w"].checksum(progress=False)
    assert Zoo.open(tmp_path / "shared" / "w-3").checksum(progress=False) == whole


def test_networks_that_diverged_are_left_out(tmp_path):
    setting = small(tmp_path)
    arguments = zoo_training.factory_arguments("standard", setting)
    networks = []
    for seed in range(3):
        torch.manual_seed(seed)
        networks.append(zoo_classifier(**arguments).state_dict())
    networks[1]["head.bias"] = torch.full((10,), torch.nan)
    with ZooWriter(tmp_path / "zoo", zoo_classifier(**arguments), "float32", zoo_training.FACTORY, arguments) as writer:
        records = [
            {"seed": seed + 10, "label_smoothing": 0.1, "accuracy": 0.5, "train_accuracy": 0.5} for seed in range(3)
        ]
        writer.append(networks, records)
    zoo = Zoo.open(tmp_path / "zoo")
    lines = recipe.measure_lines(setting, {"standard": zoo})["standard"]
    assert len(lines) == 2
    assert all(line.loss.isfinite().all() for line in lines)
    table = recipe.summarise(path_statistics({"standard": lines}), {"standard": 1})
    assert [cell.strip() for cell in table.splitlines()[-1].split("|")][1:4] == ["Standard", "2", "1"]
    assert [cell.strip() for cell in zoo_training.zoo_table({"standard": zoo}).splitlines()[-1].split("|")][2:4] == [
        "3",
        "1",
    ]


def curves(*losses: list[float]) -> list[PathResult]:
    alphas = torch.linspace(0, 1, len(losses[0]), dtype=torch.float64)
    return [PathResult(alphas, torch.tensor(loss, dtype=torch.float64)) for loss in losses]


def test_tells_the_order_and_where_it_is_not_the_papers():
    convex, concave, bumpy = [4.0, 2.0, 1.0, 0.5, 0.25], [4.0, 3.9, 3.5, 2.5, 0.0], [4.0, 5.0, 3.0, 4.0, 1.0]
    lines = {"standard": curves(bumpy, bumpy), "sigma": curves(convex, concave), "w": curves(convex, convex)}
    rows = [
        [c.strip() for c in r.split("|")[1:-1]] for r in recipe.order_table(path_statistics(lines)).splitlines()[2:]
    ]
    paper = "W-Asym > sigma-Asym > Standard"
    # Delta: -.25 and (-.25 - .1) / 2; monotonic: 100, 100, 0; local: 1, 1/2, 1/3; global: 1, 1/2, 1/3
    assert rows[0] == ["Delta", paper, paper, "agrees"]
    assert rows[1] == ["monotonic %", "W-Asym = sigma-Asym > Standard", paper, "agrees, but for a tie"]
    swapped = {"standard": lines["w"], "sigma": lines["sigma"], "w": lines["standard"]}
    rows = [r.split("|") for r in recipe.order_table(path_statistics(swapped)).splitlines()[2:]]
    assert [row[4].strip() for row in rows] == ["differs"] * 4
    assert rows[3][2].strip() == "Standard > sigma-Asym > W-Asym"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kinds": []}, "nothing to train"),
        ({"networks": 0}, "nothing to train"),
        ({"networks": 1, "kinds": ["w"]}, "Train more"),
        ({"augment": True}, "mirrors"),
        ({"shard": "2/2"}, "0 to n - 1"),
        ({"shard": "half"}, "i/n"),
        ({"num_points": 2}, "at least 3"),
        ({"learning_rate": (0.5, 0.1)}, "learning_rate"),
    ],
)
def test_refuses(values, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        recipe.main(small(tmp_path, **values))


def test_the_control_has_the_masks_of_w_and_small_constants():
    setting = small(Path("unused"))
    nets = {kind: zoo_classifier(**zoo_training.factory_arguments(kind, setting)) for kind in ("w", "control")}
    layers = {kind: [m for m in net.modules() if isinstance(m, AsymmetricLayer)] for kind, net in nets.items()}
    assert len(layers["w"]) == 4
    for one, other in zip(layers["w"], layers["control"], strict=True):
        assert torch.equal(one.mask, other.mask)
        assert (one.kappa, other.kappa) == (2.0, 0.02)


@pytest.mark.parametrize(("config", "module"), [("cifar10_interpolation", recipe), ("cifar10_zoo", zoo_training)])
def test_configurations_are_the_papers(config, module):
    args = ["--config", str(RECIPES / "configs" / f"{config}.yaml")]
    kind = recipe.Setting if module is recipe else zoo_training.ZooSetting
    setting = auto_cli(kind, args=args, as_positional=False)
    assert setting.networks == (300 if module is recipe else 10_000)
    assert setting.augment
    for kind in setting.kinds:
        net = zoo_classifier(**zoo_training.factory_arguments(kind, setting))
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    standard = zoo_classifier(**zoo_training.factory_arguments("standard", setting))
    assert sum(p.numel() for p in standard.parameters()) == 78_042


@pytest.mark.slow
def test_as_a_script(tmp_path):
    arguments = ["--kinds=[w]", "--networks=2", "--epochs=[1,1]", "--batch_size=512"]
    arguments += ["--num_points=3", "--workers=2", f"--out_dir={tmp_path}"]
    done = run_recipe("monotonic_interpolation", *arguments)
    assert done.returncode == 0, done.stderr
    assert "| W-Asym  | 2      | 0 " in done.stdout
    assert "2/2" in done.stderr
    assert refusal("monotonic_interpolation", *arguments, "--shard=2/2").startswith("monotonic_interpolation.py: ")
