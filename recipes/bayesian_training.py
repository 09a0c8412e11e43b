"""One training, or one ensemble of trainings, for ``bayesian.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from bayesian_scores import NUM_BINS, measure, out_of_distribution, predict
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from shared import UsageError, clock, make_trainer, quiet, settings_of_a_training, stored
from torch import Tensor, nn

import lightning_symmetry as ls
from lightning_symmetry.callbacks import Calibration
from lightning_symmetry.modules import VariationalModule
from lightning_symmetry.variational import Predictive

Network = Literal["mlp8", "mlp16", "resnet20", "resnet110"]
Kind = Literal["standard", "w"]
Method = Literal["variational", "mean_field", "last_layer", "deterministic", "ensemble"]
DEPTH = {"mlp8": 8, "mlp16": 16}
# What of the setting has no influence on a single training of a given cell and seed.
OF_THE_COMPARISON = {"networks", "kinds", "methods", "baseline_networks", "seeds", "seed", "ensembles", "members"}
OF_THE_COMPARISON |= {"workers", "out_dir"}


@dataclass(frozen=True)
class Cell:
    """What is varied.

    Args:
        network: Network.
        kind: Standard, or W-asymmetric.
        method: What is trained.
    """

    network: Network
    kind: Kind
    method: Method

    @property
    def path(self) -> str:
        """A path that tells the trainings of one comparison apart."""
        return f"{self.network}/{self.kind}/{self.method}"


class Course(pl.Callback):
    """Report epochs to the recipe's progress bar, keep what is logged by the epoch, and time the training.

    Of the validations only that after half of the epochs takes place: the end is measured by itself.

    Args:
        tick: Reports finished epochs.
        halfway: Called after half of the epochs, where there is no noise to average.
        half: Number of these epochs.
    """

    def __init__(self, tick: Callable[[int], Any], halfway: Callable[[], Any], half: int) -> None:
        self.tick, self.halfway, self.half = tick, halfway, half
        self.curves: dict[str, list[float]] = {}
        self.seconds = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._since = clock()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: evaluation does not count."""
        self.seconds += clock() - self._since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock again."""
        trainer.limit_val_batches = 0
        self._since = clock()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock, and keep what was logged."""
        self.seconds += clock() - self._since
        logged = trainer.callback_metrics
        curves = {"train_loss": logged["train/loss"]}
        curves |= {name: logged[f"vi/{name}"] for name in ("kl", "elbo") if f"vi/{name}" in logged}
        for name, value in curves.items():
            self.curves.setdefault(name, []).append(float(value))
        if trainer.current_epoch + 1 == self.half:
            self.halfway()
        self.tick(1)


def make_data(setting: Any) -> Any:
    """Return the data module."""
    batch_size = setting.batch_size // setting.devices
    if setting.data == "digits":
        return ls.DigitsData(batch_size)
    return ls.VisionData(setting.data, setting.data_dir, batch_size)


def make_network(setting: Any, network: Network, kind: Kind, data: Any) -> nn.Module:
    """Return a network of a kind; masks and constants are the same for all seeds of the training."""
    channels = data.input_shape[0]
    last, preset, overrides = "head", "bayesian-resnet20", {}
    if network in DEPTH:
        last, preset = f"linears.{DEPTH[network]}", "bayesian-mlp"
        hidden = (setting.mlp_width,) * DEPTH[network]
        net = ls.MLP(math.prod(data.input_shape), hidden, data.num_classes, activation=nn.ReLU)
    else:
        kinds = {"resnet20": ls.ResNet20, "resnet110": ls.ResNet110}
        net = kinds[network](
            norm=setting.norm, width=setting.resnet_width, num_classes=data.num_classes, in_channels=channels
        )
        if channels == 1:  # the preset's 12 of 27 entries of a filter
            overrides = {"stem": {"n_fix": 4}}
    if kind == "w":
        skip = [last] if setting.data == "cifar100" else []
        ls.asymmetrize(net, preset=preset, seed=setting.asymmetry_seed, overrides=overrides, skip=skip)
    return net


def posterior_of(setting: Any, cell: Cell, seed: int) -> dict[str, Any] | None:
    """Return the arguments of :func:`~lightning_symmetry.to_variational` for a method; None for weights without any."""
    if cell.method in ("deterministic", "ensemble"):
        return None
    usual = {"variance": math.exp(setting.log_variance), "prior": setting.prior, "mode": setting.mode, "seed": seed}
    if cell.method == "mean_field":
        return usual | {"rank": 0, "diagonal": "learned"}
    usual |= {"rank": setting.rank, "diagonal": "constant"}
    if cell.method == "last_layer":
        depth = DEPTH.get(cell.network)
        usual["skip"] = ["net.stem", "net.stage*"] if depth is None else [f"net.linears.{k}" for k in range(depth)]
    return usual


def make_module(setting: Any, cell: Cell, seed: int, data: Any) -> ls.SupervisedModule:
    """Return what is trained."""
    net = make_network(setting, cell.network, cell.kind, data)
    optimizer = partial(torch.optim.Adam, lr=setting.learning_rate)
    posterior = posterior_of(setting, cell, seed)
    if posterior is None:
        return ls.SupervisedModule(net, optimizer=optimizer)
    return VariationalModule(
        net,
        optimizer=optimizer,
        posterior=posterior,
        temperature=setting.temperature,
        num_samples_predict=setting.num_samples_predict,
    )


def run(setting: Any, cell: Cell, seed: int, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train once and return what was measured; from the training's folder, where that was done before.

    Args:
        setting: The setting.
        cell: What is varied.
        seed: Seed of the initialisation and of the order of the data.
        tick: Reports finished epochs.
    """
    quiet()
    folder = Path(setting.out_dir) / cell.path / f"seed{seed}"
    matters = settings_of_a_training(setting, OF_THE_COMPARISON)
    settings = {"cell": asdict(cell), "seed": seed, "setting": matters}
    result = stored(folder / "result.json", settings, partial(train, setting, cell, seed, folder, tick))
    if not result["new"]:
        tick(setting.epochs)
    return result


def train(setting: Any, cell: Cell, seed: int, folder: Path, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train one network and return what was measured; what it predicts is saved, for ensembles."""
    pl.seed_everything(seed, verbose=False)
    data = make_data(setting)
    data.prepare_data()
    data.setup("fit")
    module, half = make_module(setting, cell, seed, data), half_of(setting.epochs)
    bayesian = isinstance(module, VariationalModule)
    predicted: dict[str, Tensor] = {}
    loader = data.eval_dataloader("test")

    def keep_halfway() -> None:
        if not bayesian:
            predicted["half"] = predict(module, loader, 1).log_probabilities

    calibration = Calibration(NUM_BINS, epochs=(half,))
    course = Course(tick, keep_halfway, half)
    trainer = make_trainer(
        folder,
        [course, calibration],
        max_epochs=setting.epochs,
        limit_val_batches=1.0,
        check_val_every_n_epoch=half,
        devices=setting.devices,
        precision=setting.precision,
        log_every_n_steps=50,
    )
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    module.to(trainer.strategy.root_device)
    count = setting.num_samples_predict if bayesian else 1
    known, unknown = (predict(module, loader, count, permuted) for permuted in (False, True))
    target = torch.cat([target for _, target in loader])
    if not bayesian:
        predicted |= {"test": known.log_probabilities, "permuted": unknown.log_probabilities, "target": target}
        _save(predicted, folder / "predictions.pt")
    return {
        "train_loss": course.curves["train_loss"][-1],
        "kl": course.curves["kl"][-1] if bayesian else None,
        "half": calibration.accuracy_at[half],
        "test": measure(known, target),
        "auroc": out_of_distribution(known, unknown, samples=bayesian),
        "curves": course.curves,
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": course.seconds,
    }


def half_of(epochs: int) -> int:
    """Return half of the epochs, at least one."""
    return max(1, epochs // 2)


@rank_zero_only
def _save(content: Any, path: Path) -> None:
    torch.save(content, path)


def ensemble(setting: Any, cell: Cell, seeds: Sequence[int], members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured of an ensemble of deterministic networks, whose probabilities are averaged.

    Args:
        setting: The setting.
        cell: What is varied; the method is "ensemble".
        seeds: Seeds of the members.
        members: Their results. Training loss and its curve are means over the members, seconds are of all together.
    """
    folder = Path(setting.out_dir) / Cell(cell.network, cell.kind, "deterministic").path
    saved = [torch.load(folder / f"seed{seed}" / "predictions.pt", weights_only=True) for seed in seeds]
    found = {name: Predictive.of(part[name] for part in saved) for name in ("test", "permuted", "half")}
    target = saved[0]["target"]
    curves = torch.tensor([member["curves"]["train_loss"] for member in members], dtype=torch.float64).mean(0)
    return {
        "cell": asdict(cell),
        "seed": list(seeds),
        "train_loss": curves[-1].item(),
        "kl": None,
        "half": measure(found["half"], target)["accuracy"],
        "test": measure(found["test"], target),
        "auroc": out_of_distribution(found["test"], found["permuted"], samples=True),
        "curves": {"train_loss": curves.tolist()},
        "parameters": sum(member["parameters"] for member in members),
        "seconds": sum(member["seconds"] for member in members),
    }


def check_cells(setting: Any, cells: Sequence[Cell], data: Any) -> None:
    """Refuse what cannot be built, before anything is trained.

    Raises:
        UsageError: If a network or a posterior cannot be.
    """
    for cell in cells:
        try:
            make_module(setting, cell, setting.seed, data).configure_optimizers()
        except ValueError as error:
            raise UsageError(f"There is no {cell.kind} {cell.network}, {cell.method}: {error}") from None
