"""A fit with PRONG leaves the module, the random state and the logs as one without it."""

from __future__ import annotations

import csv
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from prong_reference import Regression, batches, fit
from test_interpolation_leaves_no_trace import Snapshot, assert_equal
from tiny_modules import CLASSES, FEATURES, AugmentedData, Plain, TinyData, bn_net, deep_mlp, supervised, trainer
from torch import nn

from lightning_symmetry import asymmetrize
from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.whitening import HasWhitening


def callback(**kwargs: Any) -> PRONG:
    return PRONG(**{"every_n_steps": 2, "num_samples": 12, **kwargs})


class Still(Plain):
    """Trains nothing: its learning rate is 0. Logs, keeps metrics and draws random numbers."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__(bn_net())
        self.build = optimizer
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.drawn = [*self.drawn, float(torch.rand(()))]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.build(self.parameters(), lr=0.0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("samples", [None, "loader"])
def test_nothing_but_gradients_is_changed(optimizer, samples, tmp_path):
    """With a learning rate of 0 both runs end the same to the last bit, random numbers, data and logs included.

    Momentum and gradients are those of other coordinates; for Adam weights go to V and back, to rounding.
    """
    runs = []
    for prong in (None, callback(samples=samples and TinyData().train_dataloader())):
        module, after = Still(optimizer), Snapshot()
        own = dict(module.named_modules())
        pl.seed_everything(3, verbose=False)
        logger = CSVLogger(tmp_path, name=str(prong is None))
        callbacks = [after] if prong is None else [prong, after]
        trainer(*callbacks, logger=logger, log_every_n_steps=1).fit(module, datamodule=AugmentedData())
        assert all(part is own[name] for name, part in module.named_modules())
        state = {key: value for key, value in after.state.items() if key not in ("gradients", "optimizer")}
        with open(logger.experiment.metrics_file_path) as file:
            rows = [{k: v for k, v in row.items() if v and "prong" not in k} for row in csv.DictReader(file)]
        logged = [row for row in rows if len(row) > 1]
        assert logged
        runs.append({**state, "drawn": module.drawn, "logged": logged})
    if optimizer is torch.optim.SGD:
        assert_equal(*runs)
    else:
        torch.testing.assert_close(runs[0]["parameters"], runs[1]["parameters"], rtol=0, atol=1e-5)
        assert_equal(runs[0]["random"], runs[1]["random"])
        assert runs[0]["modes"] == runs[1]["modes"]
        assert runs[0]["drawn"] == runs[1]["drawn"]


BUILDS = {
    "linear": lambda: supervised(deep_mlp()),
    "batch norm": lambda: Plain(bn_net()),
    "frozen": lambda: Plain(frozen_first()),
    "shared": lambda: Plain(shared()),
    "asymmetric": lambda: Plain(asymmetrize(deep_mlp(), n_fix=2, kappa=1.0)),
    "transformer": lambda: Plain(Transformer()),
}


def frozen_first() -> nn.Module:
    net = deep_mlp()
    net[0].requires_grad_(False)
    return net


def shared() -> nn.Module:
    net = deep_mlp()
    return nn.Sequential(net[0], net[2], nn.ReLU(), net[2], net[4])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)[:, None])[:, 0])


class Fails(pl.Callback):
    def on_train_batch_end(self, run: pl.Trainer, *args: Any) -> None:
        if run.global_step == 3:
            raise RuntimeError("power cut")


def describe(module: nn.Module) -> dict[str, Any]:
    """Everything about a network but the values of its parameters and buffers."""
    hidden = {"_parameters", "_buffers", "_modules", "_own"}  # the last one is a cache of asymmetric layers
    return {
        name: {
            "object": id(part),
            "parameters": {key: (id(p), p is not None and p.requires_grad) for key, p in part._parameters.items()},
            "attributes": {
                key: repr(value) for key, value in vars(part).items() if key not in hidden and key != "_seen"
            },
        }
        for name, part in module.named_modules(remove_duplicate=False)
    }


@pytest.mark.filterwarnings("ignore:.*whiten left.*")
@pytest.mark.parametrize("fails", [False, True], ids=["to the end", "exception"])
@pytest.mark.parametrize("coordinates", ["canonical", "explicit"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_layers_come_back_as_they_were(build, coordinates, fails):
    if build is BUILDS["asymmetric"] and coordinates == "explicit":
        pytest.skip("fixed entries have canonical parameters only")
    module = build()
    before = describe(module.net)
    prong = callback(coordinates=coordinates)
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            seen.append(sum(isinstance(part, HasWhitening) for part in module.modules()))

    run = trainer(prong, Look(), *([Fails()] if fails else []), max_epochs=1)
    with pytest.raises(RuntimeError, match="power cut") if fails else pytest.MonkeyPatch.context():
        run.fit(module, datamodule=TinyData())
    assert min(seen) > 0
    assert describe(module.net) == before
    without = build()
    trainer(max_epochs=1).fit(without, datamodule=TinyData())
    assert vars(module).keys() == vars(without).keys()


def test_hooks_registered_in_between_stay():
    module, calls = Regression(), []

    class Hooks(pl.Callback):
        def on_train_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
            module.net[2].register_forward_hook(lambda *args: calls.append("hook"))

    fit(module, callback(), Hooks(), steps=1)
    calls.clear()
    module.net(torch.zeros(1, 6).double())
    assert calls == ["hook"]


def test_a_layer_with_hooks_is_left_alone_by_name():
    module = Regression()
    module.net[2].register_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match=r"net.2 \(it has hooks"):
        fit(module, prong := callback(), steps=1)
    assert prong.report.changed == ["net.0", "net.4"]


def test_a_second_fit_starts_anew():
    module, prong = Regression(), callback()
    run = fit(module, prong, steps=4)
    first = prong.state_dict()
    run.fit_loop.epoch_loop.max_steps = 7
    run.fit(module, batches())
    assert prong.num_reparametrizations == 2  # before step 5, and after step 6
    assert prong.state_dict()["due"] == 8
    assert not torch.equal(
        first["coefficients"]["net.0"]["center"], prong.state_dict()["coefficients"]["net.0"]["center"]
    )


def test_evaluating_does_not_whiten():
    module, prong = supervised(deep_mlp()), callback()
    run = trainer(prong)
    run.validate(module, datamodule=TinyData(), verbose=False)
    assert prong.report is None
    run.fit(module, datamodule=TinyData())
    kept = prong.state_dict()
    run.test(module, datamodule=TinyData(), verbose=False)
    assert_equal(prong.state_dict(), kept)
