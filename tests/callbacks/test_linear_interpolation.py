"""The segment at the end of fit equals the one evaluated by hand; what is logged; what is refused."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_modules import (
    CLASSES,
    FEATURES,
    SIZES,
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
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_symmetry import (
    GNN,
    MLP,
    AsymmetricModule,
    DigitsGraph,
    LinearInterpolation,
    SupervisedModule,
    asymmetrize,
    evaluate_path,
    parameter_distance,
)
from lightning_symmetry.callbacks.evaluation import quiet_copy
from lightning_symmetry.landscape import graph_step


def callback(**kwargs) -> LinearInterpolation:
    return LinearInterpolation(**{"num_points": 5, "progress": False, **kwargs})


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("build", [mlp, bn_net], ids=["mlp", "batch norm"])
def test_init_reference_equals_the_segment_by_hand(split, build):
    module = supervised(build())
    start = frozen(module.net)
    interpolation = callback(split=split)
    trainer(interpolation).fit(module, datamodule=TinyData())
    metrics = {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
    expected = by_hand(start, module.net, split, metrics=metrics)
    assert_same(interpolation.result, expected)
    torch.testing.assert_close(interpolation.result.metrics["accuracy"], expected.metrics["accuracy"])
    assert interpolation.result.num_samples == SIZES[split]
    assert interpolation.distance == pytest.approx(parameter_distance(start, module.net))
    assert (interpolation.result.loss[0] - interpolation.result.loss[-1]).abs() > 0.01  # it did train


REFERENCES = {
    "module": lambda other, path: other,
    "bare network": lambda other, path: other.net,
    "state dict file": lambda other, path: (torch.save(other.net.state_dict(), path), path)[1],
    "module's state dict file, as a string": lambda other, path: (torch.save(other.state_dict(), path), str(path))[1],
    "compiled network": lambda other, path: torch.compile(other.net, backend="eager"),
}


@pytest.mark.parametrize("reference", REFERENCES.values(), ids=REFERENCES)
def test_another_network_as_reference(reference, tmp_path):
    other = supervised(mlp(seed=8))
    before = copy.deepcopy(other.state_dict())
    interpolation = callback(reference=reference(other, tmp_path / "other.pt"))
    module = supervised()
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(other.net, module.net, "test"))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_lightning_checkpoint_as_reference(tmp_path):
    other = supervised(mlp(seed=8))
    first = trainer()
    first.fit(other, datamodule=TinyData())
    first.save_checkpoint(tmp_path / "other.ckpt")
    interpolation = callback(reference=tmp_path / "other.ckpt")
    module = supervised()
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(other.net, module.net, "test"))


def test_asymmetric_networks_of_one_seed():
    other = AsymmetricModule(mlp(seed=8), n_fix=2, kappa=1.0, asymmetry_seed=2)
    module = AsymmetricModule(mlp(), n_fix=2, kappa=1.0, asymmetry_seed=2)
    interpolation = callback(reference=other)
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(other.net, module.net, "test"))
    assert interpolation.distance == pytest.approx(parameter_distance(other.net, module.net))


def test_graphs():
    data = DigitsGraph(num_neighbors=3)
    torch.manual_seed(0)
    module = supervised(GNN(64, 10, hidden=8, num_layers=1), lr=0.01)
    start = frozen(module.net)
    interpolation = callback(split="val", num_points=3)
    trainer(interpolation, log_every_n_steps=1).fit(module, datamodule=data)
    expected = evaluate_path(start, module.net, [data.graph], 3, step=graph_step("val_mask"), progress=False)
    assert_same(interpolation.result, expected)


def test_recomputed_batch_norm():
    module = supervised(bn_net())
    start = frozen(module.net)
    interpolation = callback(batch_norm="recompute")
    trainer(interpolation).fit(module, datamodule=TinyData())
    recomputed = by_hand(start, module.net, "test", batch_norm="recompute", train_loader=loader("train"))
    assert_same(interpolation.result, recomputed)
    kept = by_hand(start, module.net, "test")
    assert (recomputed.loss - kept.loss).abs().max() > 1e-3


@pytest.mark.parametrize("build", [deep_mlp, bn_net], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("wrap", [supervised, Plain], ids=["supervised", "any module"])
def test_repaired_units(wrap, build):
    module = wrap(build())
    other = build(seed=8)
    interpolation = callback(batch_norm="repair", reference=other)
    trainer(interpolation).fit(module, datamodule=TinyData())
    repaired = by_hand(other, module.net, "test", batch_norm="repair", train_loader=loader("train"))
    assert_same(interpolation.result, repaired)
    kept = by_hand(other, module.net, "test")
    assert (repaired.loss - kept.loss)[1:-1].abs().min() > 1e-3
    assert repaired.loss[[0, -1]].tolist() == kept.loss[[0, -1]].tolist()


def test_own_metrics_replace_the_modules():
    metrics = {"f1": MulticlassF1Score(CLASSES, average="macro")}
    interpolation = callback(metrics=metrics)
    module = supervised()
    start = frozen(module.net)
    trainer(interpolation).fit(module, datamodule=TinyData())
    expected = by_hand(start, module.net, "test", metrics=metrics)
    assert list(interpolation.result.metrics) == ["f1"]
    torch.testing.assert_close(interpolation.result.metrics["f1"], expected.metrics["f1"])


def test_loss_of_the_module_is_the_one_evaluated():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.1)
    module = supervised(loss=loss)
    start = frozen(module.net)
    interpolation = callback()
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(start, module.net, "test", loss=loss))


def test_training_data_is_evaluated_in_order_and_without_augmentation():
    module = supervised()
    start = frozen(module.net)
    interpolation = callback(split="train")
    trainer(interpolation).fit(module, datamodule=AugmentedData())
    assert_same(interpolation.result, by_hand(start, module.net, "train"))


def test_data_augmented_at_random_is_drawn_the_same_for_everyone():
    """Otherwise the ranks of a distributed run would evaluate their positions on different data."""

    class Data(AugmentedData):
        eval_dataloader = None

        def __getattribute__(self, name):
            if name == "eval_dataloader":
                raise AttributeError(name)
            return super().__getattribute__(name)

    results = []
    for seed in (1, 2):
        module = supervised(mlp(), lr=0.0)
        interpolation = callback(split="train", reference=mlp(seed=8))
        torch.manual_seed(seed)
        trainer(interpolation, max_epochs=1).fit(module, datamodule=Data())
        results.append(interpolation.result.loss)
    assert torch.equal(*results)
    assert not torch.equal(results[0], by_hand(mlp(seed=8), mlp(), "train").loss)


def test_tensorboard_holds_scalars_curves_and_figures(tmp_path):
    interpolation = callback(split="val", name="path")
    module = supervised()
    run = trainer(interpolation, logger=TensorBoardLogger(tmp_path))
    run.fit(module, datamodule=TinyData())
    events = EventAccumulator(run.logger.log_dir)
    events.Reload()
    result = interpolation.result
    for name, value in {**result.summary(), "distance_per_parameter": interpolation.distance}.items():
        (event,) = events.Scalars(f"path/{name}")
        assert event.value == pytest.approx(value, rel=1e-6, abs=1e-12)
        assert event.step == run.global_step
    for quantity, values in {"loss": result.loss, "accuracy": result.metrics["accuracy"]}.items():
        curve = events.Scalars(f"path/{quantity}_curve")
        assert [event.step for event in curve] == [0, 25, 50, 75, 100]
        assert [event.value for event in curve] == pytest.approx(values.tolist(), rel=1e-6)
        (image,) = events.Images(f"path/{quantity}_path")
        assert image.encoded_image_string.startswith(b"\x89PNG")


def test_every_logger_is_served(tmp_path):
    loggers = [
        CSVLogger(tmp_path / "csv"),
        TensorBoardLogger(tmp_path / "one"),
        TensorBoardLogger(tmp_path / "two"),
    ]
    interpolation = callback()
    trainer(interpolation, logger=loggers).fit(supervised(), datamodule=TinyData())
    table = (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "interpolation/midpoint_barrier" in table.splitlines()[0]
    assert "interpolation/distance_per_parameter" in table.splitlines()[0]
    for logger in loggers[1:]:
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        (event,) = events.Scalars("interpolation/max_barrier")
        assert event.value == pytest.approx(interpolation.result.max_barrier, rel=1e-6, abs=1e-12)


def test_an_even_number_of_points_has_no_midpoint(tmp_path):
    interpolation = callback(num_points=4)
    run = trainer(interpolation, logger=TensorBoardLogger(tmp_path))
    run.fit(supervised(), datamodule=TinyData())
    events = EventAccumulator(run.logger.log_dir)
    events.Reload()
    assert math.isnan(events.Scalars("interpolation/midpoint_barrier")[0].value)
    assert math.isfinite(events.Scalars("interpolation/max_barrier")[0].value)


MODES = {
    "accumulated": {"accumulate_grad_batches": 2},
    "barebones": {"barebones": True, "logger": None, "enable_checkpointing": None, "enable_model_summary": None},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "clipped": {"gradient_clip_val": 0.1},
    "no validation": {"limit_val_batches": 0},
}


@pytest.mark.parametrize("kwargs", MODES.values(), ids=MODES)
@pytest.mark.parametrize("build", [mlp, lambda: asymmetrize(mlp(), n_fix=2, kappa=1.0)], ids=["plain", "w"])
def test_modes_of_the_trainer(kwargs, build):
    kwargs = dict(kwargs)
    if kwargs.get("barebones"):
        kwargs["enable_progress_bar"] = None
    module = supervised(build())
    start = frozen(module.net)
    interpolation = callback(split="val")
    trainer(interpolation, **kwargs).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(start, module.net, "val"))


def test_fast_dev_run_evaluates_as_many_batches():
    module = supervised()
    start = frozen(module.net)
    interpolation = callback(split="val")
    trainer(interpolation, fast_dev_run=1).fit(module, datamodule=TinyData())
    batches = list(loader("val"))[:1]
    assert len(list(loader("val"))) > 1
    expected = evaluate_path(start, module.net, batches, 5, loss=module.loss, progress=False)
    assert interpolation.result.num_samples == expected.num_samples
    torch.testing.assert_close(interpolation.result.loss, expected.loss)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_true_precision(precision, dtype):
    module = supervised(lr=0.05)
    start = frozen(module.net).to(dtype)
    interpolation = callback(split="val")
    trainer(interpolation, precision=precision).fit(module, datamodule=TinyData())
    # By the end Lightning may have cast the module back, which is exact for a bfloat16 number.
    batches = [(x.to(dtype), y) for x, y in loader("val")]
    expected = evaluate_path(start, frozen(module.net).to(dtype), batches, 5, loss=module.loss, progress=False)
    assert_same(interpolation.result, expected, tolerance=1e-6)


@pytest.mark.parametrize("compiled", ["network", "module", "module in place"])
def test_compiled_modules(compiled):
    for build in (Plain,) if compiled == "module" else (supervised, Plain):  # tracing metrics takes long
        module = build(mlp())
        start = frozen(module.net)
        fitted = module
        if compiled == "network":
            module.net = torch.compile(module.net, backend="eager")
        elif compiled == "module":
            fitted = torch.compile(module, backend="eager")
        else:
            module.compile(backend="eager")
        interpolation = callback(split="val")
        trainer(interpolation).fit(fitted, datamodule=TinyData())
        end = getattr(module.net, "_orig_mod", module.net)
        assert_same(interpolation.result, by_hand(start, end, "val"))
        assert interpolation.result.loss[0] != interpolation.result.loss[-1]


def test_a_compiled_run_takes_the_reference_of_a_plain_one(tmp_path):
    other = supervised(mlp(seed=8))
    torch.save(other.state_dict(), tmp_path / "other.pt")
    module = supervised(mlp())
    module.net = torch.compile(module.net, backend="eager")
    interpolation = callback(reference=tmp_path / "other.pt")
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(other.net, module.net._orig_mod, "test"))


@pytest.mark.parametrize("averaging", ["ema", "swa"])
def test_averaged_weights_are_the_end_if_averaging_stands_before(averaging):
    average = EMAWeightAveraging() if averaging == "ema" else StochasticWeightAveraging(swa_lrs=0.05)
    module = supervised()
    start = frozen(module.net)
    interpolation = callback()
    trainer(average, interpolation, max_epochs=3).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(start, module.net, "test"))


def test_two_callbacks_of_different_names():
    first, second = callback(), callback(reference=mlp(seed=8), name="connectivity")
    module = supervised()
    start = frozen(module.net)
    trainer(first, second).fit(module, datamodule=TinyData())
    assert_same(first.result, by_hand(start, module.net, "test"))
    assert_same(second.result, by_hand(mlp(seed=8), module.net, "test"))


def test_two_callbacks_of_one_name_are_refused():
    with pytest.raises(RuntimeError, match="state_key"):
        trainer(callback(), callback(reference=mlp()))


def test_a_second_fit_starts_its_own_segment():
    interpolation = callback()
    for seed in (0, 1):
        module = supervised(mlp(seed))
        start = frozen(module.net)
        trainer(interpolation).fit(module, datamodule=TinyData())
        assert_same(interpolation.result, by_hand(start, module.net, "test"))


def test_an_interrupted_fit_leaves_no_result():
    class Interrupt(pl.Callback):
        def on_train_batch_end(self, *args) -> None:
            raise KeyboardInterrupt

    interpolation = callback()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer(interpolation, Interrupt()).fit(supervised(), datamodule=TinyData())
    assert interpolation.result is None


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_only_if_asked_for(capsys, caplog, progress):
    caplog.set_level("INFO")
    interpolation = callback(progress=progress)
    run, module = trainer(interpolation, max_epochs=1), supervised()
    capsys.readouterr()
    run.fit(module, datamodule=TinyData())
    captured = capsys.readouterr()
    assert ("path" in captured.err) is progress
    assert ("midpoint barrier" in caplog.text) is progress


def test_synchronised_batch_norm_becomes_ordinary_in_copies():
    """Ranks evaluate different positions: synchronised statistics would mix them, or hang."""
    module = supervised(nn.SyncBatchNorm.convert_sync_batchnorm(bn_net()))
    clone = quiet_copy(module)
    assert not any(isinstance(part, nn.SyncBatchNorm) for part in clone.modules())
    assert any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in clone.state_dict().items())
    assert clone.state_dict().keys() == module.state_dict().keys()
    x = torch.randn(7, FEATURES)
    assert torch.equal(clone.eval()(x), bn_net().eval()(x))


def test_arguments_are_checked():
    with pytest.raises(MisconfigurationException, match="`split` to be 'train', 'val' or 'test' but got 'valid'"):
        LinearInterpolation(split="valid")
    with pytest.raises(MisconfigurationException, match="'keep', 'recompute' or 'repair' but got 'reset'"):
        LinearInterpolation(batch_norm="reset")
    with pytest.raises(ValueError, match="at least 2 points"):
        LinearInterpolation(num_points=1)


def test_sharding_strategies_are_refused():
    light = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(MisconfigurationException, match="FSDPStrategy shards them"):
        callback().setup(light, supervised(), "fit")


class Batches(pl.Callback):
    """Counts training batches."""

    count = 0

    def on_train_batch_end(self, *args) -> None:
        self.count += 1


REFUSED = {
    "missing file": (lambda path: "nowhere.ckpt", MisconfigurationException, "'nowhere.ckpt' does not exist"),
    "other architecture": (
        lambda path: nn.Linear(2, 2),
        MisconfigurationException,
        r"The reference \(Linear\) is no SupervisedModule: it lacks .*net\.linears",
    ),
    "other width": (
        lambda path: SupervisedModule(MLP(FEATURES, (7,), CLASSES)),
        MisconfigurationException,
        r"net\.linears\.0\.weight has shape \(7, 5\) in it and \(6, 5\) in the trained module",
    ),
    "asymmetric": (
        lambda path: asymmetrize(mlp(), n_fix=2, kappa=1.0),
        MisconfigurationException,
        r"has .*(fixed|mask)",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_reference_that_does_not_fit_is_refused_before_training(case, tmp_path):
    reference, error, message = case
    batches = Batches()
    with pytest.raises(error, match=message):
        trainer(callback(reference=reference(tmp_path)), batches).fit(supervised(), datamodule=TinyData())
    assert batches.count == 0


def test_a_reference_with_other_constants_is_refused_before_training():
    reference = AsymmetricModule(mlp(), n_fix=2, kappa=1.0, asymmetry_seed=1)
    module = AsymmetricModule(mlp(), n_fix=2, kappa=1.0, asymmetry_seed=2)
    batches = Batches()
    with pytest.raises(ValueError, match="different masks"):
        trainer(callback(reference=reference), batches).fit(module, datamodule=TinyData())
    assert batches.count == 0


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_missing_split_is_refused_before_training(split):
    batches = Batches()
    with pytest.raises(MisconfigurationException, match=f"The split '{split}' has no dataloader"):
        trainer(callback(split=split), batches).fit(supervised(), loader("train"))
    assert batches.count == 0


def test_metrics_of_a_module_that_does_not_say_its_outputs_are_refused_before_training():
    interpolation = callback(split="val", metrics={"accuracy": MulticlassAccuracy(CLASSES)})
    batches = Batches()
    with pytest.raises(MisconfigurationException, match="Plain does not say what to update them with"):
        trainer(interpolation, batches).fit(Plain(), loader("train"), loader("val"))
    assert batches.count == 0


def test_checkpoints_stay_loadable_with_weights_only(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    interpolation = callback()
    module = supervised()
    start = copy.deepcopy(module.state_dict())
    trainer(interpolation, saver, enable_checkpointing=True).fit(module, datamodule=TinyData())
    checkpoint = torch.load(saver.last_model_path, weights_only=True)
    kept = checkpoint["callbacks"][interpolation.state_key]["start"]
    assert all(torch.equal(kept[name], value) for name, value in start.items())
