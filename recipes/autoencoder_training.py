"""One training of an autoencoder, whose training error is measured on the way, for ``prong_autoencoder.py``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from shared import make_trainer, quiet, stored

import lightning_symmetry as ls

Method = Literal["sgd", "momentum", "rmsprop", "adam", "batch_norm", "center", "prong", "prong_plus"]
Data = Literal["digits", "mnist", "fashion_mnist"]


@dataclass(frozen=True)
class Training:
    """What one training depends on.

    Args:
        method: Optimizer; "center" is PRONG that centres only, "batch_norm" another network.
        rate: Learning rate.
        batch_size: Batch size.
        seed: Seed of initialisation and order of the data.
        data: Data set.
        hidden: Widths of the encoder.
        points: Updates after which the error is measured, from 0 to the last one.
        every_n_steps: T of PRONG, like what follows; ignored by the others.
        num_samples: N_s.
        eps: Damping.
        ema: Weight of the past in the moving average of the statistics.
        whiten_at_init: Whether there is a reparametrisation before the first update.
    """

    method: Method
    rate: float
    batch_size: int
    seed: int
    data: Data
    hidden: tuple[int, ...]
    points: tuple[int, ...]
    every_n_steps: int | None = None
    num_samples: int | None = None
    eps: float | None = None
    ema: float | None = None
    whiten_at_init: bool | None = None

    @property
    def name(self) -> str:
        """A path that tells the trainings of one comparison apart."""
        whitening = f"-T{self.every_n_steps}-Ns{self.num_samples}-eps{self.eps:g}" if self.eps is not None else ""
        whitening += "" if self.ema is None else f"-ema{self.ema:g}"
        whitening += "-fanin" if self.whiten_at_init is False else ""
        return f"{self.method}{whitening}/lr{self.rate:g}-batch{self.batch_size}/seed{self.seed}"


def make_data(data: Data, data_dir: str, batch_size: int) -> pl.LightningDataModule:
    """Return the data module; intensities are between 0 and 1."""
    if data == "digits":
        return ls.DigitsData(batch_size, normalize=False)
    return ls.VisionData(data, data_dir, batch_size, normalize=False)


def make_optimizer(method: Method, rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the optimizer of a method."""
    if method == "adam":
        return partial(torch.optim.Adam, lr=rate)
    if method == "rmsprop":
        return partial(torch.optim.RMSprop, lr=rate)
    return partial(torch.optim.SGD, lr=rate, momentum=0.0 if method == "sgd" else 0.9)


class Progress(pl.Callback):
    """Measure the training error at some updates, and the CPU time without these measurements.

    Args:
        points: Updates at which to measure.
        images: Training images.
        tick: Reports to the progress bar.
    """

    def __init__(self, points: tuple[int, ...], images: torch.Tensor, tick: Callable[[int], Any]) -> None:
        self.points, self.images, self.tick = [*points, -1], images, tick
        self.errors: list[float] = []
        self.seconds: list[float] = []
        self._measuring = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and measure the first error."""
        self._start = time.process_time()
        self._measure(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Measure at the points."""
        if trainer.global_step == self.points[len(self.errors)]:
            self._measure(pl_module)
            self.tick(1)
            trainer.should_stop = not math.isfinite(self.errors[-1])

    @torch.no_grad()
    def _measure(self, module: pl.LightningModule) -> None:
        now = time.process_time()
        self.seconds.append(now - self._start - self._measuring)
        training = module.training
        module.eval()
        total = sum(module.loss(module.net(x), x.flatten(1)).item() * len(x) for x in self.images.split(2000))
        module.train(training)
        self.errors.append(total / len(self.images))
        self._measuring += time.process_time() - now


def run(training: Training, data_dir: str, out_dir: str, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train once, unless the result lies in the folder already, and return the course of the training error.

    Returns:
        The training's settings, with ``errors`` and CPU ``seconds`` at its points. Errors are infinite from where it
        diverged.
    """
    folder = Path(out_dir) / training.name
    found = stored(folder / "result.json", asdict(training), partial(_train, training, data_dir, folder, tick))
    if not found["new"]:
        tick(len(training.points) - 1)
    return found


def _train(training: Training, data_dir: str, folder: Path, tick: Callable[[int], Any]) -> dict[str, Any]:
    quiet()
    pl.seed_everything(training.seed, verbose=False)
    data = make_data(training.data, data_dir, training.batch_size)
    data.prepare_data()
    data.setup("fit")
    loader = data.eval_dataloader("train")
    images = torch.cat([x for x, _ in islice(loader, -(-10_000 // loader.batch_size))])[:10_000]
    net = ls.Autoencoder(images[0].numel(), training.hidden, norm=training.method == "batch_norm")
    module = ls.ReconstructionModule(net, optimizer=make_optimizer(training.method, training.rate))
    progress = Progress(training.points, images, tick)
    callbacks: list[pl.Callback] = [progress]
    if training.eps is not None:
        names = ("every_n_steps", "num_samples", "eps", "ema", "whiten_at_init")
        settings = {name: getattr(training, name) for name in names}
        mode = "center" if training.method == "center" else "full"
        callbacks.insert(0, ls.PRONG(mode=mode, plus=training.method == "prong_plus", **settings))
    steps = training.points[-1]
    trainer = make_trainer(folder, callbacks, max_steps=steps, devices=1, log_every_n_steps=max(1, steps // 100))
    trainer.fit(module, datamodule=data)
    missing = len(training.points) - len(progress.errors)
    tick(missing)
    errors = [error if math.isfinite(error) else math.inf for error in progress.errors] + [math.inf] * missing
    return {"errors": errors, "seconds": progress.seconds + progress.seconds[-1:] * missing}
