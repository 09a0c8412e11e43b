"""The conditioning of Fisher blocks during a fit, against a loop over samples and outcomes in float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fisher_callbacks import LAYERS, callback, of, prong
from lightning.pytorch.callbacks import ModelCheckpoint
from prong_reference import Regression, batches, data, fit, network
from test_interpolation_leaves_no_trace import Snapshot, assert_equal
from tiny_modules import AugmentedData, Plain, TinyData, bn_net, deep_mlp, supervised, trainer
from torch import Tensor, nn

from lightning_symmetry import asymmetrize, condition_number, fisher_blocks, reparametrize, whiten
from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning
from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.whitening import HasWhitening, collect_statistics, whitened_layers

sys.path.insert(0, str(Path(__file__).parents[1] / "whitening"))

from fisher_reference import fisher_by_loop

OPTIMIZERS = {"sgd": None, "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01)}


class Watch(pl.Callback):
    """Keeps the module before each step and at the end; stands last, so that it sees what others have done."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def on_before_optimizer_step(self, run: pl.Trainer, module: Regression, optimizer: Any) -> None:
        self.modules.append(copy.deepcopy(module.net))

    def on_train_epoch_end(self, run: pl.Trainer, module: Regression) -> None:
        self.last = copy.deepcopy(module.net)


class InCoordinates(nn.Module):
    """V U (h - c) + d, with V and d its parameters."""

    def __init__(self, weight: Tensor, bias: Tensor, U: Tensor, c: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight @ torch.linalg.inv(U)), nn.Parameter(bias + weight @ c)
        self.U, self.c = U, c

    def forward(self, h: Tensor) -> Tensor:
        return (h - self.c) @ self.U.T @ self.weight.T + self.bias


def canonical(layer: nn.Module) -> tuple[Tensor, Tensor]:
    weight, bias = layer.canonical_parameters() if isinstance(layer, HasWhitening) else (layer.weight, layer.bias)
    return weight.detach(), bias.detach()


def reference(net: nn.Sequential, coordinates: nn.Sequential, layer: str, inputs: Tensor) -> Tensor:
    """The block of a layer of ``net`` in the coordinates that the layers of another network have."""
    parts = []
    for part, other in zip(net, coordinates, strict=True):
        if not hasattr(part, "weight"):
            parts.append(part)
            continue
        weight, bias = canonical(part)
        U, c = torch.eye(weight.shape[1]).double(), torch.zeros(weight.shape[1]).double()
        if isinstance(other, HasWhitening):
            (U,), (c,) = other.whitening_matrix()
        parts.append(InCoordinates(weight, bias, U, c))
    index = layer.removeprefix("net.")
    return fisher_by_loop(nn.Sequential(*parts), inputs, "mse", [f"{index}.weight", f"{index}.bias"])


def check_row(row: dict[str, Any], block: Tensor) -> None:
    values = torch.linalg.eigvalsh(block)
    assert row["largest"] == pytest.approx(values[-1].item(), rel=1e-9)
    assert row["smallest"] == pytest.approx(values[0].item(), rel=1e-5)
    assert row["condition"] == pytest.approx(condition_number(block), rel=1e-5)
    assert row["rank"] == len(block)


def test_along_a_fit_in_canonical_coordinates():
    fisher, watch = callback(), Watch()
    fit(Regression(), fisher, watch, steps=5)
    inputs = data().tensors[0]
    for layer in LAYERS:
        rows = of(fisher.history, layer)
        assert [row["step"] for row in rows] == [0, 2, 4, 5]
        assert [row["reparametrization"] for row in rows] == [None] * 4
        for row, net in zip(rows, [*watch.modules[0:5:2], watch.last], strict=True):
            check_row(row, reference(net, net, layer, inputs))
            assert row["percent"] == pytest.approx(100 * row["condition"] / rows[0]["condition"])
        torch.testing.assert_close(
            fisher.matrices[layer]["start"], reference(*watch.modules[:1] * 2, layer, inputs), rtol=1e-9, atol=1e-12
        )
        assert fisher.matrices[layer].keys() == {"start", "end"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False], ids=["before PRONG", "after PRONG"])
def test_both_sides_of_each_reparametrisation_in_the_coordinates_of_the_optimizer(first, optimizer):
    fisher, watch = callback(every_n_steps=3), Watch()
    others = [fisher, prong()] if first else [prong(), fisher]
    fit(Regression(None, OPTIMIZERS[optimizer]), *others, watch, steps=8)
    modules, inputs = [*watch.modules, watch.last], data().tensors[0]
    for layer in LAYERS:
        rows = of(fisher.history, layer)
        assert [(row["step"], row["reparametrization"]) for row in rows] == [
            (0, "before"), (0, "after"), (3, None), (4, "before"), (4, "after"), (6, None), (8, "before"), (8, "after"),
        ]  # fmt: skip
        plain = copy.deepcopy(modules[0])
        for part in plain:
            if isinstance(part, HasWhitening):
                part._applied = type(part._applied)()
        for row in rows:
            net = modules[row["step"]]
            old = modules[row["step"] - 1] if row["step"] else plain
            check_row(row, reference(net, old if row["reparametrization"] == "before" else net, layer, inputs))
        assert rows[0]["percent"] == 100
        assert fisher.matrices[layer].keys() == {"start", "before", "after", "end"}
    without = callback(every_n_steps=3)
    fit(Regression(None, OPTIMIZERS[optimizer]), without, steps=1)
    initial = of(without.history, "net.0")[0]
    assert of(fisher.history, "net.0")[0]["condition"] == pytest.approx(initial["condition"], rel=1e-9)


def test_the_first_reparametrisation_alone():
    fisher = callback(every_n_steps=100, reparametrizations="first")
    fit(Regression(), prong(whiten_at_init=False), fisher, steps=13)
    rows = of(fisher.history, "net.2")
    expected = [(0, None), (4, "before"), (4, "after"), (13, None)]
    assert [(row["step"], row["reparametrization"]) for row in rows] == expected
    assert not torch.equal(fisher.matrices["net.2"]["start"], fisher.matrices["net.2"]["before"])


def test_a_network_that_was_whitened_by_hand():
    module, fisher = Regression().double(), callback()
    whiten(module)
    inputs = data().tensors[0]
    reparametrize(module, collect_statistics(module, lambda: module(inputs)), eps=0.1)
    fit(module, fisher, steps=1)
    start = copy.deepcopy(Regression().double().net)
    check_row(of(fisher.history, "net.2")[0], reference(start, module.net, "net.2", inputs))


@pytest.mark.parametrize("build", [lambda: asymmetrize(deep_mlp(), n_fix=2, kappa=1.0), lambda: Conv()])
def test_other_layers(build):
    fisher, watch = FisherConditioning("net.*", 2, damping=1e-3, num_samples=26, progress=False), Watch()
    net = build()
    trainer(fisher, PRONG(2, 8, 0.1), watch, precision="64-true", max_epochs=1).fit(Plain(net), datamodule=TinyData())
    assert fisher.failures == 0
    inputs = TinyData().train_dataloader().dataset.tensors[0]
    layers = whitened_layers(watch.last)
    assert len(layers) == 3
    for layer, coordinates in layers.items():
        row = of(fisher.history, f"net.{layer}")[-1]
        assert (row["step"], row["reparametrization"]) == (4, "after")
        whitening = {layer: coordinates.whitening_matrix()}
        (block,) = fisher_blocks(net, inputs, [layer], whitening=whitening, progress=False).values()
        assert row["condition"] == pytest.approx(condition_number(block, 1e-3), rel=1e-6)


class Conv(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 3, groups=2, bias=False),
            nn.Flatten(), nn.Linear(12, 3),
        )  # fmt: skip


@pytest.mark.parametrize("with_prong", [False, True])
def test_nothing_is_changed(with_prong):
    states = []
    for fisher in (None, FisherConditioning("net.*", 1, damping=1e-3, num_samples=26, progress=False)):
        module, after = Plain(bn_net()), Snapshot()
        pl.seed_everything(3, verbose=False)
        callbacks = [fisher] if fisher else []
        callbacks += [PRONG(2, 8)] if with_prong else []
        trainer(*callbacks, after).fit(module, datamodule=AugmentedData())
        states.append(after.state)
    assert fisher.failures == 0
    assert_equal(*states)  # as without the callback, to the last bit


def test_metrics_and_logs_of_the_run_survive():
    values = []
    for callbacks in ([], [FisherConditioning("net.*", 1, damping=1e-3, progress=False)]):
        run = trainer(*callbacks)
        run.fit(supervised(deep_mlp()), datamodule=TinyData(shuffle=False))
        values.append({name: value.item() for name, value in run.callback_metrics.items()})
    assert values[0] == values[1]


@pytest.mark.parametrize(("step", "batch_size"), [(4, 10), (5, 8), (8, 10)])
def test_a_resumed_run_measures_what_the_uninterrupted_one_does(step, batch_size, tmp_path):
    """At the end of an epoch, since the order of the data is fixed: also right after a reparametrisation."""

    def run(folder: Path, **kwargs: Any) -> FisherConditioning:
        fisher = callback(every_n_steps=3)
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        module = Regression(network().double())  # else Lightning loads float64 into float32
        loader = batches(batch_size=batch_size)
        fit(module, prong(), fisher, saver, steps=10, loader=loader, enable_checkpointing=True, **kwargs)
        return fisher

    whole = run(tmp_path)
    resumed = run(tmp_path / "resumed", ckpt_path=tmp_path / f"step={step}.ckpt")
    assert_equal(resumed.history, whole.history)
    assert resumed.history[0]["percent"] == 100


def test_a_second_fit_starts_anew():
    fisher = callback()
    run = fit(Regression(), fisher, steps=2)
    first = fisher.history
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(Regression(), batches())
    assert fisher.history[0]["step"] == 2
    assert fisher.history is not first


def test_the_same_damping_in_all_coordinates():
    plain, damped = callback(), callback(damping=1e-3, relative=True)
    for fisher in (plain, damped):
        fit(Regression(), prong(), fisher, steps=5)
    for layer in LAYERS:
        delta = 1e-3 * of(plain.history, layer)[0]["largest"]
        for row, other in zip(of(plain.history, layer), of(damped.history, layer), strict=True):
            assert other["largest"] == row["largest"]
            expected = (row["largest"] + delta) / (row["smallest"] + delta)
            assert other["condition"] == pytest.approx(expected, rel=1e-9)
        matrix = damped.matrices[layer]["after"]
        assert of(damped.history, layer)[1]["condition"] == pytest.approx(condition_number(matrix, delta), rel=1e-9)


def test_blocks_that_are_not_formed():
    formed, free = (callback(layers=["net.2"], damping=0.01, max_size=size) for size in (70, 69))
    for fisher in (formed, free):
        fit(Regression(), prong(), fisher, steps=3)
    assert free.matrices == {}
    for row, other in zip(formed.history, free.history, strict=True):
        assert other["condition"] == pytest.approx(row["condition"], rel=1e-2)
        assert (row["rank"], other["rank"]) == (70, None)
