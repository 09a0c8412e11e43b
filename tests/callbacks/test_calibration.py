"""Calibration of any classifier: where the outputs come from, what is logged, kept and drawn."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from calibrated import Validated, assert_agrees, by_hand, fit, outputs_of
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_modules import CLASSES, FEATURES, Plain, TinyData, bn_net, loader, mlp, samples, supervised, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from lightning_symmetry.callbacks import Calibration
from lightning_symmetry.callbacks.calibration_outputs import predictor_module
from lightning_symmetry.modules import VariationalModule

MODULES = {
    "supervised": supervised,
    "calls its network": Validated,
    "calls its forward": lambda: Validated(own=True),
}


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_validation_and_test_are_measured(build):
    module, callback = build(), Calibration(num_bins=5)
    run = fit(module, callback)
    expected = by_hand(*outputs_of(module.net, "val"), num_bins=5)
    assert_agrees(callback.result["val"], expected)
    assert (callback.result["val"].epoch, callback.result["val"].step) == (2, 8)
    assert [(row["epoch"], row["step"]) for row in callback.history] == [(1, 4), (2, 8)]
    for key in ("ece", "mce", "nll", "brier", "accuracy"):
        assert float(run.callback_metrics[f"calibration/val_{key}"]) == pytest.approx(expected[key], rel=1e-5)
    (logged,) = run.test(module, datamodule=TinyData(), verbose=False)
    expected = by_hand(*outputs_of(module.net, "test"), num_bins=5)
    assert_agrees(callback.result["test"], expected)
    assert logged["calibration/test_ece"] == pytest.approx(expected["ece"], rel=1e-5)
    assert logged["calibration/test_nll"] == pytest.approx(logged.get("test/loss", logged.get("val/loss")), rel=1e-5)
    assert len(callback.history) == 2


def test_other_callbacks_can_monitor_it(tmp_path):
    saver = ModelCheckpoint(tmp_path, monitor="calibration/val_ece", save_top_k=1)
    stopper = EarlyStopping("calibration/val_nll", patience=2)
    callback = Calibration()
    fit(Validated(), saver, stopper, callback, max_epochs=4, enable_checkpointing=True)
    assert float(saver.best_model_score) == pytest.approx(min(row["ece"] for row in callback.history), rel=1e-6)
    assert float(stopper.best_score) == pytest.approx(min(row["nll"] for row in callback.history), rel=1e-6)


def test_accuracy_at_epochs_is_that_of_their_checkpoints(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    callback = Calibration(epochs=(1, 3))
    run = fit(Validated(), callback, saver, max_epochs=4, enable_checkpointing=True)
    assert list(callback.accuracy_at) == [1, 3]
    for epoch, accuracy in callback.accuracy_at.items():
        module = Validated()
        module.load_state_dict(torch.load(tmp_path / f"epoch={epoch - 1}.ckpt", weights_only=True)["state_dict"])
        assert accuracy == by_hand(*outputs_of(module.net, "val"))["accuracy"]
        assert float(run.callback_metrics[f"calibration/accuracy_epoch{epoch}"]) == pytest.approx(accuracy)
    assert "calibration/accuracy_epoch2" not in run.callback_metrics


def test_validations_within_an_epoch_do_not_end_it():
    callback = Calibration(epochs=(1,))
    fit(Validated(), callback, val_check_interval=0.5, max_epochs=1)
    assert [(row["epoch"], row["step"]) for row in callback.history] == [(0, 2), (1, 4)]
    assert callback.accuracy_at == {1: callback.history[1]["accuracy"]}
    with pytest.warns(UserWarning, match="no accuracy at epoch 1: no validation ended with this epoch"):
        fit(Validated(), callback, val_check_interval=3, max_epochs=1)
    assert callback.accuracy_at == {}


def test_epochs_after_the_end_are_warned_of():
    callback = Calibration(epochs=(2, 5))
    with pytest.warns(UserWarning, match=r"no accuracy at epochs \[5\]: training ended before"):
        fit(Validated(), callback)
    assert list(callback.accuracy_at) == [2]


def test_a_resumed_run_continues_the_history(tmp_path):
    whole = Calibration(epochs=(1, 3))
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    fit(Validated(), whole, saver, max_epochs=3, enable_checkpointing=True)
    resumed = Calibration(epochs=(1, 3))
    path = tmp_path / "epoch=1.ckpt"
    torch.load(path, weights_only=True)
    trainer(resumed, max_epochs=3).fit(Validated(), datamodule=TinyData(shuffle=False), ckpt_path=path)
    assert repr(resumed.history) == repr(whole.history)  # NaN of empty bins is not equal to itself
    assert resumed.accuracy_at == whole.accuracy_at
    assert len(whole.history) == 3


def test_several_loaders_are_measured_apart():
    module, callback = Validated(), Calibration(epochs=(1,))
    run = trainer(callback, max_epochs=1)
    run.fit(module, loader("train"), [loader("val"), loader("test", batch_size=3)])
    assert list(callback.result) == ["val/dataloader_idx_0", "val/dataloader_idx_1"]
    for index, split in enumerate(("val", "test")):
        expected = by_hand(*outputs_of(module.net, split))
        assert_agrees(callback.result[f"val/dataloader_idx_{index}"], expected)
        logged = float(run.callback_metrics[f"calibration/val_ece/dataloader_idx_{index}"])
        assert logged == pytest.approx(expected["ece"], rel=1e-5)
    assert callback.accuracy_at[1] == callback.result["val/dataloader_idx_0"].accuracy
    first, second = run.validate(module, [loader("val"), loader("test")], verbose=True)
    assert first["calibration/val_ece/dataloader_idx_0"] == second["calibration/val_ece/dataloader_idx_0"]
    assert len(callback.history) == 2  # none of the validation by itself


class Graphs(pl.LightningModule):
    """Predicts the nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch.x)


def test_nodes_of_a_graph_are_those_of_the_split():
    x, y = samples("train").tensors
    mask = torch.arange(len(y)) % 3 == 0
    module, callback = Graphs(), Calibration()
    graph = Data(x=x, y=y, edge_index=torch.zeros(2, 0, dtype=torch.long), val_mask=mask)
    trainer(callback).validate(module, GraphLoader([graph]), verbose=False)
    assert_agrees(callback.result["val"], by_hand(module.net(x[mask]).detach().softmax(1), y[mask]))


def test_targets_of_mappings_and_outputs_with_probabilities():
    class Named(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch["x"])

    x, y = samples("val").tensors
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    module, callback = Named(nn.Sequential(mlp(), nn.Softmax(1))), Calibration(outputs="probabilities")
    trainer(callback).validate(module, DataLoader(rows, batch_size=5), verbose=False)
    assert_agrees(callback.result["val"], by_hand(module.net(x).detach(), y))


class Averaging(Validated):
    """Says itself which submodule predicts, and lets a hook average two calls of it, as a Bayesian module does."""

    def __init__(self) -> None:
        super().__init__()
        self.other = mlp(seed=5)

    def predictor_module(self) -> nn.Module:
        return self.net

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        handle = self.net.register_forward_hook(self._average, prepend=True)
        try:
            self.net(batch[0])
        finally:
            handle.remove()

    def _average(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if getattr(self, "within", False):
            return None
        self.within = True
        again = module(args[0] + 1)
        self.within = False
        return ((output.softmax(-1) + again.softmax(-1)) / 2).log()


def test_averaged_probabilities_of_the_module_that_predicts():
    module, callback = Averaging(), Calibration()
    trainer(callback).validate(module, loader("val"), verbose=False)
    x, y = samples("val").tensors
    with torch.no_grad():
        mean = (module.net(x).softmax(1) + module.net(x + 1).softmax(1)) / 2
    assert_agrees(callback.result["val"], by_hand(mean, y))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bayesian_module_is_measured_by_its_averaged_probabilities(compiled):
    module, callback = VariationalModule(mlp(), posterior={"rank": 2}, num_samples_predict=4), Calibration()
    if compiled:
        module.net.compile(backend="eager")
    run = fit(module, callback)
    assert callback.result["val"].nll == pytest.approx(float(run.callback_metrics["val/loss"]), rel=1e-5)
    assert callback.result["val"].accuracy == pytest.approx(float(run.callback_metrics["val/accuracy"]))
    run.test(module, loader("test"), verbose=False)
    assert callback.result["test"].nll == pytest.approx(float(run.callback_metrics["test/loss"]), rel=1e-5)


def test_which_submodule_predicts():
    class Parts(Plain):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__(nn.Identity())
            for name, part in parts.items():
                setattr(self, name, part)

    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    learned = Parts(body=layer)
    learned.scale = nn.Parameter(torch.ones(()))
    listed = Parts(blocks=nn.ModuleList([layer]))
    for module in (Parts(body=layer, head=other), learned, listed):
        assert predictor_module(module) is module
    assert predictor_module(Parts(body=layer, act=nn.ReLU())) is layer
    assert predictor_module(Parts(body=layer, head=other), "head") is other


def test_a_submodule_by_its_name():
    net = nn.Sequential(mlp(), nn.Linear(CLASSES, CLASSES))
    module, callback = Validated(net), Calibration(predictor="net.0")
    trainer(callback).validate(module, loader("val"), verbose=False)
    assert_agrees(callback.result["val"], by_hand(*outputs_of(net[0], "val")))


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_a_compiled_network(way):
    plain, callbacks = Validated(), [Calibration(), Calibration()]
    fit(plain, callbacks[0])
    module = Validated()
    if way == "in place":
        module.net.compile(backend="eager")
    else:
        module.net = torch.compile(module.net, backend="eager")
    call = module.net._compiled_call_impl
    fit(module, callbacks[1])
    assert module.net._compiled_call_impl is call
    for row, expected in zip(callbacks[1].history, callbacks[0].history, strict=True):
        assert row["ece"] == pytest.approx(expected["ece"], abs=1e-6)


def images(folder: Any) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}


def test_figures_of_the_last_validation_of_epochs_and_of_tests(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    module, callback = Validated(), Calibration(epochs=(2,))
    run = fit(module, callback, max_epochs=3, logger=logger)
    assert images(tmp_path / "run") == {"calibration/val": [8, 12]}
    run.test(module, datamodule=TinyData(), verbose=False)
    assert images(tmp_path / "run") == {"calibration/val": [8, 12], "calibration/test": [12]}
    tags = EventAccumulator(str(tmp_path / "run")).Reload().Tags()["scalars"]
    assert {"calibration/val_ece", "calibration/test_ece", "calibration/accuracy_epoch2"} <= set(tags)


def test_an_epoch_that_is_the_last_is_drawn_once(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(Validated(), Calibration(epochs=(2,), name="other"), logger=logger)
    assert images(tmp_path / "run") == {"other/val": [8]}


class Watching(pl.Callback):
    """Keeps hooks and modes at the end."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = {
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pl_module.modules()],
            "modes": [m.training for m in pl_module.modules()],
            "gradients": [p.grad is None for p in pl_module.parameters()],
            "parameters": [p.detach().clone() for p in pl_module.parameters()],
            "random": torch.get_rng_state(),
            "metrics": {k: v for k, v in trainer.callback_metrics.items() if "calibration" not in k},
        }


def test_nothing_is_changed():
    states = []
    for callbacks in ([], [Calibration(epochs=(1,))]):
        watching, module = Watching(), supervised(bn_net())
        pl.seed_everything(3, verbose=False)
        trainer(*callbacks, watching, logger=False).fit(module, datamodule=TinyData())
        states.append(watching.state)
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_hooks_are_removed_after_an_exception():
    class Fails(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            raise RuntimeError("power cut")

    module = Fails()
    with pytest.raises(RuntimeError, match="power cut"):
        fit(module, Calibration(), num_sanity_val_steps=0)
    assert not module.net._forward_hooks
    assert not module.net._forward_pre_hooks


def test_fast_dev_run_and_barebones():
    callback = Calibration(epochs=(1,))
    fit(Validated(), callback, fast_dev_run=True)
    assert callback.result["val"].num_samples == 8
    module = Validated()
    module.log = lambda *args, **kwargs: pytest.fail("barebones logs nothing")
    module.validation_step = lambda batch, batch_idx: module.net(batch[0])
    run = pl.Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[callback])
    run.fit(module, datamodule=TinyData())
    assert_agrees(callback.result["val"], by_hand(*outputs_of(module.net, "val")))


def test_targets_that_are_all_ignored_are_warned_of():
    x = samples("val").tensors[0]
    data = DataLoader(TensorDataset(x, torch.full((len(x),), -100)), batch_size=8)
    callback = Calibration()
    with pytest.warns(UserWarning, match="no samples of val"):
        trainer(callback).validate(Validated(), data, verbose=False)
    assert np.isnan(callback.result["val"].ece)
