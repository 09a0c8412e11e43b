"""The reference is permuted before the segment is measured: the same function, closer to the trained network."""

from __future__ import annotations

import copy
import csv
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from distributed import launch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_interpolation_leaves_no_trace import Snapshot, assert_equal
from tiny_modules import (
    CLASSES,
    FEATURES,
    AugmentedData,
    Plain,
    TinyData,
    assert_same,
    bn_net,
    by_hand,
    deep_mlp,
    frozen,
    loader,
    mlp,
    supervised,
    trainer,
)
from torch import nn

from lightning_symmetry import MLP, DigitsData, LinearInterpolation, SupervisedModule, align, asymmetrize
from lightning_symmetry.landscape import parameter_distance

METHODS = ["weights", "activations"]


def callback(**kwargs: Any) -> LinearInterpolation:
    return LinearInterpolation(**{"num_points": 5, "progress": False, **kwargs})


@cache
def trained_reference() -> nn.Module:
    """A network trained on the tiny data, whose units differ."""
    module = supervised(deep_mlp(seed=5))
    trainer(max_epochs=3).fit(module, datamodule=TinyData())
    return module.net.eval()


def fit(module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    run = trainer(*callbacks, **{"max_epochs": 3, **kwargs})
    run.fit(module, datamodule=TinyData())
    return run


def test_barriers_on_the_digits_fall(tmp_path):
    data = DigitsData(64)

    def module(seed: int) -> SupervisedModule:
        torch.manual_seed(seed)
        return SupervisedModule(MLP(64, (64, 64, 64), 10), optimizer=partial(torch.optim.AdamW, lr=2e-3))

    reference = module(0)
    trainer(max_epochs=15).fit(reference, datamodule=data)
    plain = callback(reference=reference, name="plain")
    aligned = [callback(reference=reference, align=method, name=method) for method in METHODS]
    trainer(plain, *aligned, max_epochs=15, logger=CSVLogger(tmp_path)).fit(module(1), datamodule=data)
    assert plain.alignment is None
    assert plain.result.max_barrier > 0.1
    for interpolation in aligned:
        assert interpolation.result.max_barrier < 0.4 * plain.result.max_barrier
        for end in (0, -1):  # the functions are the same
            assert interpolation.result.loss[end] == pytest.approx(plain.result.loss[end].item(), rel=1e-4)
        assert interpolation.alignment.after > interpolation.alignment.before
    assert aligned[0].distance < plain.distance


@pytest.mark.parametrize("method", METHODS)
def test_result_is_that_of_aligning_by_hand(method):
    module, reference = supervised(deep_mlp(seed=6)), trained_reference()
    interpolation = callback(reference=reference, align=method)
    fit(module, interpolation)
    found = align(reference, module.net, method, example_input=torch.zeros(2, FEATURES), dataloader=loader("train"))
    assert found.num_moved > 0
    ours = {name.removeprefix("net."): p for name, p in interpolation.alignment.permutations.items()}
    assert ours.keys() == found.permutations.keys()
    assert all(torch.equal(permutation, found.permutations[name]) for name, permutation in ours.items())
    assert interpolation.alignment.after == pytest.approx(found.after, rel=1e-6)
    assert_same(interpolation.result, by_hand(found.network, module.net, "test"))
    assert interpolation.distance == pytest.approx(parameter_distance(found.network, module.net), rel=1e-6)
    unaligned = by_hand(reference, module.net, "test")
    torch.testing.assert_close(interpolation.result.loss[[0, -1]], unaligned.loss[[0, -1]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["network", "module", "checkpoint", "weights"])
def test_references_of_all_kinds(kind, tmp_path):
    module = supervised(deep_mlp(seed=6))
    whole = supervised(copy.deepcopy(trained_reference()))
    reference = {"network": whole.net, "module": whole}.get(kind, tmp_path / "reference.ckpt")
    if kind in ("checkpoint", "weights"):
        torch.save({"state_dict": whole.state_dict()} if kind == "checkpoint" else whole.net.state_dict(), reference)
    state = frozen(whole).state_dict()
    interpolation = callback(reference=reference, align="weights")
    fit(module, interpolation)
    assert interpolation.alignment.num_moved > 0
    assert_equal(dict(whole.state_dict()), dict(state))
    found = align(trained_reference(), module.net, example_input=torch.zeros(2, FEATURES))
    assert_same(interpolation.result, by_hand(found.network, module.net, "test"))


def test_the_initialisation_is_aligned_too():
    module = supervised(deep_mlp(seed=6), lr=0.5)
    start = frozen(module.net)
    interpolation = callback(align="weights")
    fit(module, interpolation)
    found = align(start, module.net, example_input=torch.zeros(2, FEATURES))
    assert_same(interpolation.result, by_hand(found.network, module.net, "test"))


def test_similarity_is_logged(tmp_path):
    interpolation = callback(reference=trained_reference(), align="weights", name="aligned")
    logger = CSVLogger(tmp_path)
    fit(supervised(deep_mlp(seed=6)), interpolation, callback(name="plain"), logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        logged = {key: float(value) for row in csv.DictReader(file) for key, value in row.items() if value}
    assert logged["aligned/similarity_before"] == pytest.approx(interpolation.alignment.before)
    assert logged["aligned/similarity_after"] == pytest.approx(interpolation.alignment.after)
    assert logged["aligned/similarity_after"] > logged["aligned/similarity_before"]
    assert "plain/similarity_before" not in logged
    assert logged["aligned/max_barrier"] == pytest.approx(interpolation.result.max_barrier)


class Never(pl.Callback):
    """Sees whether a batch was trained on."""

    trained = False

    def on_train_batch_start(self, *args: Any) -> None:
        self.trained = True


class TwoInputs(Plain):
    """Its forward takes more than the first part of a batch."""

    def forward(self, x, scale):
        return self.net(x) * scale

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0], 1.0), batch[1])


class WithExample(TwoInputs):
    example_input_array = (torch.zeros(2, FEATURES), torch.ones(1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        assert y.dtype == torch.long  # a batch, and not the example
        return x, y


class WithoutForward(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Branches(Plain):
    def forward(self, x):
        return self.net(x) if self.net(x).sum().item() > 0 else -self.net(x)


REFUSED = {
    "all layers have fixed entries": (
        lambda: supervised(asymmetrize(mlp(), n_fix=2, kappa=1.0)),
        METHODS,
        "Nothing can be permuted: the layers .* have fixed entries",
    ),
    "no hidden units": (lambda: supervised(nn.Linear(FEATURES, CLASSES)), METHODS, "has no hidden units"),
    "more inputs": (lambda: TwoInputs(), ["weights"], "cannot be traced.*missing 1 required.*set it to what `forward`"),
    "more inputs than batches have": (
        lambda: WithExample(),
        ["activations"],
        "cannot be traced.*missing 1 required.*choose align='weights'",
    ),
    "no forward": (lambda: WithoutForward(), METHODS, "cannot be traced.*forward"),
    "branches": (lambda: Branches(), METHODS, "cannot be traced: .*reads values that depend on its parameters"),
}


@pytest.mark.parametrize(("name", "method"), [(name, m) for name, (_, methods, _) in REFUSED.items() for m in methods])
def test_what_cannot_be_aligned_is_refused_when_fit_starts(name, method):
    build, _, message = REFUSED[name]
    never = Never()
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(), callback(align=method), never)
    assert not never.trained


def test_other_values_are_refused():
    with pytest.raises(MisconfigurationException, match="Expected `align` to be 'weights', 'activations' or None"):
        LinearInterpolation(align="units")


def test_example_input_array_is_what_forward_is_called_with():
    """Not the first part of a batch; and no hook for batches sees it."""
    module = WithExample(deep_mlp(seed=6))
    interpolation = callback(align="weights", split="train")
    fit(module, interpolation)
    assert set(interpolation.alignment.permutations) == {"net.0", "net.2"}
    assert interpolation.result.num_samples == 26


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_precision_of_the_trainer(precision, dtype, method):
    module = Plain(deep_mlp(seed=6))
    module.example_input_array = torch.zeros(2, FEATURES)
    interpolation = callback(reference=trained_reference(), align=method, split="train")
    fit(module, interpolation, precision=precision)
    assert interpolation.alignment.num_moved > 0
    assert interpolation.alignment.network.net[0].weight.dtype == dtype


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [supervised, Plain])
def test_nothing_is_changed(build, method):
    states = []
    for interpolation in (None, callback(align=method, reference=bn_net(2), split="train")):
        before, after = Snapshot(), Snapshot()
        pl.seed_everything(3, verbose=False)
        callbacks = [before, after] if interpolation is None else [before, interpolation, after]
        trainer(*callbacks).fit(build(bn_net(6)), datamodule=AugmentedData())
        assert_equal(before.state, after.state)
        states.append(after.state)
    assert_equal(*states)  # as without the callback, to the last bit


def test_fast_dev_run():
    interpolation = callback(reference=trained_reference(), align="activations", split="train")
    fit(supervised(deep_mlp(seed=6)), interpolation, fast_dev_run=True)
    assert interpolation.alignment.after >= interpolation.alignment.before
    assert interpolation.result.num_samples == 8


@pytest.mark.parametrize("side", ["reference", "trained module"])
def test_a_run_that_has_diverged_is_not_aligned(side):
    reference, module = copy.deepcopy(trained_reference()), supervised(deep_mlp(seed=6))

    class Diverge(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.net[2].weight.data[0, 0] = float("nan")

    if side == "reference":
        reference[2].weight.data[0, 0] = float("nan")
    interpolation = callback(reference=reference, align="weights")
    callbacks = [interpolation] if side == "reference" else [Diverge(), interpolation]
    with pytest.warns(UserWarning, match=f"not aligned: net.2.weight of the {side} is not finite"):
        fit(module, *callbacks)
    assert interpolation.alignment is None
    assert interpolation.result.loss.isnan().any()


def test_a_resumed_run_aligns_the_first_initialisation(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    run = trainer(callback(align="weights"), saver, max_epochs=2, enable_checkpointing=True)
    run.fit(supervised(deep_mlp(seed=6)), datamodule=TinyData(shuffle=False))
    straight = callback(align="weights")
    trainer(straight, max_epochs=4).fit(supervised(deep_mlp(seed=6)), datamodule=TinyData(shuffle=False))
    resumed = callback(align="weights")
    trainer(resumed, max_epochs=4).fit(
        supervised(deep_mlp(seed=1)), datamodule=TinyData(shuffle=False), ckpt_path=saver.last_model_path
    )
    assert_same(resumed.result, straight.result, tolerance=1e-12)
    assert resumed.alignment.after == straight.alignment.after
    assert_equal(resumed.alignment.permutations, straight.alignment.permutations)


def test_an_earlier_alignment_is_not_kept():
    interpolation = callback(reference=trained_reference(), align="weights")
    module = supervised(deep_mlp(seed=6))
    fit(module, interpolation)
    first = interpolation.alignment
    fit(module, interpolation)
    assert interpolation.alignment is not first


SCRIPT = """
import sys

import torch
from tiny_modules import TinyData, deep_mlp, supervised, trainer

from lightning_symmetry import LinearInterpolation

folder = sys.argv[1]
for method in ("weights", "activations"):
    module = supervised(deep_mlp(seed=6))
    reference = deep_mlp(seed=2)
    callback = LinearInterpolation(reference, 5, progress=False, align=method)
    run = trainer(callback, strategy="ddp", devices=2)
    run.fit(module, datamodule=TinyData())
    found = callback.alignment
    torch.save(
        {
            "end": module.net.state_dict(),
            "loss": callback.result.loss,
            "permutations": found.permutations,
            "before": found.before,
            "after": found.after,
            "network": found.network.state_dict(),
            "num_samples": callback.result.num_samples,
            "ranks": run.world_size,
        },
        f"{folder}/{method}_{run.global_rank}.pt",
    )
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Results of a distributed script, by method and rank."""
    folder = tmp_path_factory.mktemp("ddp")
    launch(SCRIPT, folder, timeout=120)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_processes_agree_with_one(runs, method):
    ranks = [torch.load(runs / f"{method}_{rank}.pt") for rank in range(2)]
    assert all(rank["ranks"] == 2 for rank in ranks)
    assert_equal(dict(ranks[0]["end"]), dict(ranks[1]["end"]))
    for key in ("loss", "permutations", "before", "after", "num_samples"):
        assert_equal(ranks[0][key], ranks[1][key], key)
    end = deep_mlp()
    end.load_state_dict(ranks[0]["end"])
    found = align(deep_mlp(seed=2), end, method, example_input=torch.zeros(2, FEATURES), dataloader=loader("train"))
    assert found.num_moved > 0
    for rank in ranks:
        for name, tensor in found.network.state_dict().items():
            assert torch.equal(rank["network"][f"net.{name}"], tensor)
        torch.testing.assert_close(rank["loss"], by_hand(found.network, end, "test").loss, rtol=1e-6, atol=1e-6)
