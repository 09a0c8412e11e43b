"""The recipe runs small and keeps finished trainings; ensembles and tables are right; the configs are valid."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli
from recipe_scripts import refusal, run_recipe
from sklearn.metrics import roc_auc_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchmetrics.functional.classification import multiclass_calibration_error

import lightning_symmetry as ls
from lightning_symmetry.asymmetry import AsymmetricLayer
from lightning_symmetry.variational import VariationalLayer, variational_layers

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import bayesian as recipe  # noqa: E402 (found through the line above)
from bayesian_results import PAPER, by_cell, draw, measured_table, paper_rows, paper_table  # noqa: E402
from bayesian_scores import predict  # noqa: E402
from bayesian_training import (  # noqa: E402
    OF_THE_COMPARISON,
    Cell,
    make_data,
    make_module,
    make_network,
)
from shared import UsageError, settings_of_a_training  # noqa: E402

CONFIGS = ["mnist_bayesian_mlp", "cifar10_bayesian_mlp", "cifar10_bayesian_resnet", "cifar100_bayesian_resnet"]


def small(folder: Path, **values: Any) -> Any:
    usual = {"networks": ["mlp8"], "kinds": ["w"], "mlp_width": 24, "epochs": 3, "batch_size": 360, "seeds": 2}
    return recipe.Setting(
        **{**usual, "members": 2, "num_samples_predict": 3, "workers": 0, "out_dir": str(folder), **values}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    setting = small(tmp_path_factory.mktemp("bayesian"))
    return setting, recipe.main(setting)


def test_everything_is_trained_and_written(finished):
    setting, results = finished
    runs = by_cell(results)
    assert list(runs) == recipe.cells(setting)
    assert len(runs) == len(setting.methods)
    for cell, mine in runs.items():
        assert len(mine) == (1 if cell.method == "ensemble" else 2)
        bayesian = cell.method not in ("deterministic", "ensemble")
        for result in mine:
            assert len(result["curves"]["train_loss"]) == 3
            assert result["train_loss"] == result["curves"]["train_loss"][-1]
            assert all(math.isfinite(result["test"][name]) for name in ("nll", "ece", "accuracy"))
            assert 0 <= result["half"] <= 1
            assert ("kl" in result["curves"]) == (result["kl"] is not None) == bayesian
            assert (result["auroc"]["mutual_information"] is None) == (cell.method == "deterministic")
            assert sum(result["test"]["count"]) == 360
    out = Path(setting.out_dir)
    assert (out / "bayesian.png").stat().st_size > 20_000
    assert json.loads((out / "results.json").read_text())["results"] == results
    assert list((out / "summary").glob("events*"))


def test_half_of_the_epochs_is_when_it_is_validated(finished):
    setting, results = finished
    for cell, mine in by_cell(results).items():
        if cell.method != "ensemble":
            logged = EventAccumulator(str(Path(setting.out_dir) / cell.path / "seed0")).Reload()
            (point,) = logged.Scalars("calibration/val_accuracy")
            assert point.step == 4 - 1  # of 4 updates in one of three epochs
            assert point.value == pytest.approx(mine[0]["half"])


def test_curves_are_parts_of_the_bound(finished):
    """The bound a sample is the mean log likelihood less the divergence over the 1,437 training images."""
    for cell, mine in by_cell(finished[1]).items():
        if cell.method in ("variational", "mean_field", "last_layer"):
            for result in mine:
                curves = {name: torch.tensor(values) for name, values in result["curves"].items()}
                expected = -curves["train_loss"] - curves["kl"] / 1437
                assert curves["elbo"] == pytest.approx(expected, rel=1e-5)


def test_ensemble_is_the_mean_of_its_members_probabilities(finished):
    setting, results = finished
    data = make_data(setting)
    data.setup("test")
    images, target = (torch.cat(parts) for parts in zip(*data.eval_dataloader("test"), strict=True))
    cell = Cell("mlp8", "w", "ensemble")
    (result,) = by_cell(results)[cell]
    assert result["seed"] == [0, 1]
    probabilities = torch.zeros(360, 10, dtype=torch.float64)
    for seed in result["seed"]:
        net = ls.MLP(64, (24,) * 8, activation=nn.ReLU)
        ls.asymmetrize(net, n_fix=8, kappa=0.5, seed=1)  # the file has the masks and constants
        path = Path(setting.out_dir) / "mlp8" / "w" / "deterministic" / f"seed{seed}" / "last.ckpt"
        module = ls.SupervisedModule.load_from_checkpoint(path, net=net, weights_only=True).eval()
        with torch.no_grad():
            probabilities += module(images).double().softmax(1) / 2
    right = (probabilities.argmax(1) == target).double().mean()
    assert result["test"]["accuracy"] == pytest.approx(right.item())
    assert result["test"]["nll"] == pytest.approx(nn.functional.nll_loss(probabilities.log(), target).item(), rel=1e-5)
    error = multiclass_calibration_error(probabilities, target, 10, n_bins=15)
    assert result["test"]["ece"] == pytest.approx(error.item(), abs=1e-5)
    single = by_cell(results)[Cell("mlp8", "w", "deterministic")]
    assert [r["seed"] for r in single] == [0, 1]
    assert result["parameters"] == 2 * single[0]["parameters"]
    assert result["seconds"] == pytest.approx(sum(r["seconds"] for r in single))


def test_stored_scores_are_those_of_the_stored_network(finished):
    setting, results = finished
    data = make_data(setting)
    data.setup("test")
    cell = Cell("mlp8", "w", "deterministic")
    result = by_cell(results)[cell][1]
    module = make_module(setting, cell, 1, data)
    path = Path(setting.out_dir) / cell.path / "seed1" / "last.ckpt"
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    loader = data.eval_dataloader("test")
    known, unknown = (predict(module, loader, 1, permuted) for permuted in (False, True))
    entropy = torch.cat([known.entropy, unknown.entropy])
    assert result["auroc"]["entropy"] == pytest.approx(roc_auc_score([0] * 360 + [1] * 360, entropy), abs=1e-4)
    assert module.training


def test_methods(tmp_path):
    setting = small(tmp_path)
    data = make_data(setting)
    modules = {m: make_module(setting, Cell("mlp8", "w", m), 3, data) for m in setting.methods if m != "ensemble"}
    posteriors = {m: variational_layers(module) for m, module in modules.items() if m != "deterministic"}
    assert {m: len(layers) for m, layers in posteriors.items()} == {"variational": 9, "mean_field": 9, "last_layer": 1}
    assert list(posteriors["last_layer"]) == ["net.linears.8"]
    shown = {m: (p.rank, p.diagonal) for m, layers in posteriors.items() for p in [layers["net.linears.8"].posterior]}
    assert shown == {"variational": (4, "constant"), "mean_field": (0, "learned"), "last_layer": (4, "constant")}
    assert not any(isinstance(module, VariationalLayer) for module in modules["deterministic"].modules())
    # an ensemble of five has the parameters of a posterior of rank four, but for the norms
    sizes = {m: sum(p.numel() for p in module.parameters()) for m, module in modules.items()}
    norms = sum(p.numel() for p in modules["deterministic"].net.norms.parameters())
    assert 5 * sizes["deterministic"] - sizes["variational"] == 4 * norms
    residual = make_module(setting, Cell("resnet20", "w", "last_layer"), 0, data)
    assert list(variational_layers(residual)) == ["net.head"]


def test_all_of_a_seed_begin_with_the_same_weights(tmp_path):
    setting = small(tmp_path, kinds=["standard", "w"])
    modules = {}
    for cell in recipe.cells(setting):
        torch.manual_seed(5)
        modules[cell] = make_module(setting, cell, 5, make_data(setting))
    usual = dict(modules[Cell("mlp8", "standard", "deterministic")].net.named_parameters())
    masks = {
        n: m.mask for n, m in modules[Cell("mlp8", "w", "deterministic")].net.named_modules() if hasattr(m, "mask")
    }
    assert len(masks) == 9
    for cell, module in modules.items():
        for name, parameter in module.net.named_parameters():
            layer, _, kind = name.rpartition(".")
            if kind in ("weight", "bias"):
                mask = masks[layer].bool() if (cell.kind, kind) == ("w", "weight") and layer in masks else slice(None)
                assert torch.equal(parameter[mask], usual[name][mask])


def test_table_and_figure_show_the_results(finished):
    runs = by_cell(finished[1])
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in measured_table(runs).splitlines())
    assert len(rows) == len(runs)
    for row, mine in zip(rows, runs.values(), strict=True):
        shown = dict(zip(header, row, strict=True))
        accuracy = 100 * torch.tensor([r["test"]["accuracy"] for r in mine], dtype=torch.float64)
        assert float(shown["Test acc %"].split()[0]) == pytest.approx(accuracy.mean().item(), abs=0.006)
        assert ("±" in shown["Train loss"]) == (len(mine) > 1)
    assert all(panel.has_data() for panel in draw(runs, "").axes)


def test_the_papers_rows():
    """Of Table 2, in percent and nats, with two decimals as printed there."""
    assert PAPER["cifar10", "mlp16", None]["standard"] == [
        "2.29 ± .02", "2.28 ± .03", ".026 ± .017", "13.54 ± 2.0", "13.34 ± 2.7"]  # fmt: skip
    assert sum(len(rows) for rows in PAPER.values()) == 12
    setting = recipe.Setting(data="cifar100", networks=["resnet20"], norm="batch")
    assert list(paper_rows(setting)) == [("cifar100", "resnet20", "batch")]
    assert "58.40 ± .62" in paper_table(setting)
    assert list(paper_rows(replace(setting, data="cifar10"))) == [("cifar10", "resnet20", None)]
    digits = paper_table(recipe.Setting())
    assert digits.count("CIFAR-10 ") == 4
    assert "W-Asym   | variational | 1.39" in digits


def test_finished_trainings_are_kept(finished):
    setting, results = finished
    again = recipe.main(replace(setting, methods=["variational", "ensemble"], seeds=1))
    old = {json.dumps([r["cell"], r["seed"]]): r for r in results}
    assert len(again) == 2
    for result in again:
        before = old[json.dumps([result["cell"], result["seed"]])]
        assert result == before | ({"new": False} if "new" in before else {})


def test_trainings_with_another_setting_are_made_anew(tmp_path):
    before = small(tmp_path, data="mnist")
    matters = settings_of_a_training(before, OF_THE_COMPARISON)
    again = {"seeds": 5, "members": 4, "ensembles": 2, "methods": ["variational"], "workers": 2, "out_dir": "elsewhere"}
    others = {"temperature": 0.5, "mode": "shared", "asymmetry_seed": 1, "data_dir": "b", "epochs": 5}
    for name, value in (again | others).items():
        changed = settings_of_a_training(replace(before, **{name: value}), OF_THE_COMPARISON)
        assert (changed == matters) == (name in again)


def test_trainings_are_not_repeated():
    setting = recipe.Setting(seed=7, seeds=3, ensembles=2, members=2)
    todo = recipe.trainings(setting, recipe.cells(setting))
    assert len(todo) == len(set(todo))
    seeds = [seed for cell, seed in todo if cell == Cell("mlp16", "w", "deterministic")]
    assert seeds == [7, 8, 9, 10]
    assert {cell.method for cell, _ in todo if cell.network == "mlp8"} == {"variational"}
    assert not any(cell.method == "ensemble" for cell, _ in todo)


@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config):
    setting = auto_cli(recipe.Setting, args=[f"--config={RECIPES}/configs/{config}.yaml"], as_positional=False)
    residual, hundred = "resnet" in config, "100" in config
    shared = (
        setting.epochs,
        setting.batch_size,
        setting.seeds,
        setting.rank,
        setting.mode,
        setting.num_samples_predict,
    )
    assert shared == (50, 250, 10, 4, "local", 25)
    assert setting.learning_rate == (1e-3 if residual else 5e-4)
    assert (setting.log_variance, setting.prior) == ((-12, "fan_in") if residual else (-10, "fan_in:100"))
    assert setting.temperature == (1 if setting.data == "mnist" else 1 / 8)
    data = type("Data", (), {"num_classes": 100 if hundred else 10, "input_shape": (3, 32, 32)})()
    kinds = [network for network in setting.networks if network != "resnet110"]  # the same layers, many times
    for network in kinds:
        module = make_module(setting, Cell(network, "w", "variational"), 0, data)
        layers = {"mlp8": 9, "mlp16": 17, "resnet20": 22}[network]
        assert len(variational_layers(module)) == layers
        net = make_network(setting, network, "w", data)
        constants = [name for name, layer in net.named_modules() if isinstance(layer, AsymmetricLayer)]
        assert len(constants) == layers - hundred
        assert ("head" in constants) == (residual and not hundred)
        assert all(net.get_submodule(name).kappa == 0.5 for name in constants)
    assert paper_rows(setting)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"networks": []}, "nothing to train"),
        ({"seeds": 0}, "nothing to train"),
        ({"epochs": 0}, "nothing to train"),
        ({"methods": ["deterministic"], "baseline_networks": []}, "nothing to train"),
        ({"members": 1}, "2 of `members`"),
        ({"batch_size": 9, "devices": 2}, "no multiple"),
        ({"batch_size": 0}, "`batch_size` to be an integer of at least 1"),
        ({"learning_rate": -1.0}, "Invalid learning rate"),
        ({"rank": -1}, "no w mlp8, variational: Expected `rank`"),
        ({"prior": "wide"}, "Expected `prior`"),
        ({"mlp_width": 8, "kinds": ["w"]}, "no w mlp8, variational"),
        ({"temperature": -1.0}, "Expected `.*temperature"),
    ],
)
def test_refuses(values, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        recipe.main(small(tmp_path, **values))


@pytest.mark.slow
def test_as_a_script(tmp_path):
    arguments = ["--networks=[mlp8]", "--methods=[variational]", "--kinds=[standard]", "--seeds=1", "--epochs=1"]
    arguments += ["--mlp_width=16", "--batch_size=720", "--workers=1", f"--out_dir={tmp_path}"]
    done = run_recipe("bayesian", *arguments)
    assert done.returncode == 0, done.stderr
    assert "| MLP-8   | Standard | variational |" in done.stdout
    assert "1/1" in done.stderr
    refused = refusal("bayesian", *arguments, "--rank=-1")
    assert refused.startswith("bayesian.py: There is no standard mlp8, variational")
