"""When a module's layers get their posterior, which do, and that the Trainer and the command line see a module."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from bayesian_modules import (
    CLASSES,
    FEATURES,
    WIDE,
    Bayesian,
    Network,
    assert_same_state,
    bayesian,
    fit,
    loader,
    mlp,
    trainer,
)
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_symmetry.modules import AsymmetricModule, SupervisedModule, VariationalMixin, VariationalModule
from lightning_symmetry.variational import VariationalLayer, kl_divergence, layout_of, to_variational

pytestmark = pytest.mark.filterwarnings("ignore:.*number of training batches", "ignore:You defined a `validation_step`")


class Whole(VariationalMixin, LightningModule):
    """A module in one class, with layers and steps behind the mixin's constructor."""

    def __init__(self, width: int = 6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Configured(VariationalMixin, Network):
    """A module that makes another layer in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(CLASSES, CLASSES)
        super().configure_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.late(super().forward(x))


class Later(VariationalMixin, SupervisedModule):
    """A subclass that adds a layer after its base's constructor."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(mlp(), **kwargs)
        self.net.append(nn.Linear(CLASSES, CLASSES))


def test_layers_behind_the_constructor_are_converted_by_the_trainer():
    module = Whole(width=4, posterior=WIDE, num_samples_predict=2)
    assert layout_of(module) == {}
    run = fit(module)
    assert list(layout_of(module)) == ["net.0", "net.2"]
    expected = -float(run.callback_metrics["vi/nll"]) - float(run.callback_metrics["vi/kl"]) / 26
    assert float(run.callback_metrics["vi/elbo"]) == pytest.approx(expected, rel=1e-6)
    assert not any(name.startswith("net.0") for name, p in module.named_parameters() if p.grad is None)
    assert run.test(module, loader("test"), verbose=False)[0]["test"] > 0


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_convert_too(stage):
    module = Later(num_samples_predict=2)
    assert layout_of(module) == {}
    getattr(trainer(), stage)(module, loader("test"))
    assert list(layout_of(module)) == ["net.0", "net.2", "net.3"]
    before = dict(module.named_parameters())
    getattr(trainer(), stage)(module, loader("test"))
    assert all(p is before[name] for name, p in module.named_parameters())


def test_layers_of_configure_model_are_converted():
    module = Configured(posterior={"skip": ["net.0"]})
    assert layout_of(module) == {}
    fit(module)
    assert list(layout_of(module)) == ["net.2", "late"]


def test_the_same_parameters_and_the_same_factors():
    """Means are the base class's own; factors follow from names, not from when layers are converted."""
    plain, early = SupervisedModule(mlp()), bayesian()
    for name, parameter in plain.named_parameters():
        assert torch.equal(dict(early.named_parameters())[name], parameter)
    late = Later(posterior=WIDE)
    late.configure_model()
    assert torch.equal(late.net[0].weight_factors, early.net[0].weight_factors)


class Empty(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scale * batch[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class BayesianEmpty(VariationalMixin, Empty):
    pass


def test_nothing_to_convert_is_refused():
    with pytest.raises(MisconfigurationException, match="found nothing to convert in BayesianEmpty"):
        fit(BayesianEmpty())


def test_a_network_that_is_variational_already():
    net = to_variational(mlp(), 1, prior=3.0)
    module = VariationalModule(net)
    assert {layer["prior"] for layer in layout_of(module).values()} == {3.0}
    fit(module)
    with pytest.raises(MisconfigurationException, match="VariationalModule is variational already: leave `posterior`"):
        VariationalModule(to_variational(mlp(), 1), posterior={"rank": 2})


class Perceptual(nn.modules.loss._Loss):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(CLASSES, 4)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.features(output), self.features(F.one_hot(target, CLASSES).float()))


class Learned(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(CLASSES, 4)
        self.add_state("total", torch.zeros(()))

    def update(self, output: Tensor, target: Tensor) -> None:
        self.total += self.features(output).sum()

    def compute(self) -> Tensor:
        return self.total


def test_metrics_and_losses_are_not_converted():
    module = bayesian(loss=Perceptual(), metrics={"learned": Learned()})
    assert list(layout_of(module)) == ["net.0", "net.2"]
    fit(module, max_epochs=1)
    assert module.predictor_module() is module.net


def test_only_some_layers():
    module = bayesian(posterior={"rank": 0, "overrides": {"net.2": {"rank": 3}}, "skip": ["net.0"]})
    assert {name: settings["rank"] for name, settings in layout_of(module).items()} == {"net.2": 3}
    run = fit(module, max_epochs=1)
    assert float(run.callback_metrics["vi/kl"]) == pytest.approx(float(kl_divergence(module.net[2]).detach()), rel=0.1)


def test_a_class_between():
    """Cooperative steps of classes that are mixed in later are called; the bound is taken once, around all."""

    class Regular(Network):
        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch) + 100

    class Both(Bayesian, Regular):
        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch) + 1000

    module = Both(num_data=26, posterior=WIDE)
    loss = float(module.training_step(next(iter(loader("train")))).detach())
    expected = module.losses[0] + 1100 + float(kl_divergence(module).detach()) / 26
    assert loss == pytest.approx(expected, rel=1e-6) and len(module.losses) == 1


def test_hyper_parameters(tmp_path):
    """Those of the base class and the mixin are saved by a base that saves its own, and restore the module."""
    module = Bayesian(width=4, num_samples_predict=3, posterior=WIDE, temperature=0.5)
    assert module.hparams["width"] == 4 and module.hparams["temperature"] == 0.5
    run = fit(module)
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Bayesian.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.variational == module.variational
    assert loaded.net[0].out_features == 4
    whole = Whole(width=4, num_samples_predict=3)
    fit(whole).save_checkpoint(tmp_path / "b.ckpt")
    loaded = Whole.load_from_checkpoint(tmp_path / "b.ckpt")
    assert loaded.variational.num_samples_predict == 3 and list(layout_of(loaded)) == ["net.0", "net.2"]


class BayesianAsymmetric(VariationalMixin, AsymmetricModule):
    pass


def test_hyper_parameters_of_a_module_that_keeps_some(tmp_path):
    module = BayesianAsymmetric(mlp(), n_fix=2, kappa=0.5, asymmetry_seed=4, num_samples_predict=3)
    run = fit(module)
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = BayesianAsymmetric.load_from_checkpoint(tmp_path / "a.ckpt", net=mlp(1))
    assert loaded.variational == module.variational and loaded.hparams["asymmetry_seed"] == 4
    assert_same_state(loaded.state_dict(), module.state_dict())
    layer = loaded.net[0]
    assert torch.equal(loaded.state_dict()["net.0.weight"][~layer.mask].view_as(layer.fixed), layer.fixed)


def test_copies():
    module = bayesian()
    fit(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_state(other.state_dict(), module.state_dict())
        fit(other, max_epochs=1)
        assert not torch.equal(other.net[0].weight, module.net[0].weight)


def test_signatures_stay():
    assert list(inspect.signature(Bayesian.training_step).parameters) == ["self", "batch"]
    assert Bayesian.training_step.__doc__ == Network.training_step.__doc__
    assert Bayesian.validation_step is LightningModule.validation_step


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader("train")


def test_the_command_line(monkeypatch, tmp_path):
    arguments = ["--model.width=9", "--model.num_samples_predict=2", "--model.posterior={rank: 1, prior: 'fan_in:100'}"]
    quiet = [
        "max_epochs=1",
        "accelerator=cpu",
        "logger=false",
        "enable_progress_bar=false",
        f"default_root_dir={tmp_path}",
    ]
    quiet = [f"--trainer.{argument}" for argument in [*quiet, "enable_checkpointing=false"]]
    monkeypatch.setattr(sys, "argv", ["main.py", "fit", *arguments, "--model.num_data=100", *quiet])
    cli = LightningCLI(Bayesian, Data, save_config_callback=None, seed_everything_default=0)
    assert cli.model.variational.num_data == 100 and cli.model.net[0].out_features == 9
    assert layout_of(cli.model)["net.0"]["prior"] == "fan_in:100"
    assert isinstance(cli.model.net[0], VariationalLayer)


def test_a_compiled_network():
    pl.seed_everything(0)
    module = bayesian(torch.compile(mlp(), backend="eager"), num_samples_predict=100)
    run = trainer(max_epochs=1)
    run.fit(module, loader("train"), loader("val"))
    assert module.predictor_module() is module.net and list(layout_of(module)) == ["net._orig_mod.0", "net._orig_mod.2"]
    (tested,) = run.test(module, loader("test"), verbose=False)
    plain = bayesian(num_samples_predict=100)
    plain.load_state_dict({k.replace("_orig_mod.", ""): v for k, v in module.state_dict().items()})
    (expected,) = trainer().test(plain, loader("test"), verbose=False)
    assert tested["test/loss"] == pytest.approx(expected["test/loss"], rel=0.1)
