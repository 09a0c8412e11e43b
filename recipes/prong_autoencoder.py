"""Figure 3 of Natural Neural Networks: training a deep autoencoder with PRONG and with other optimizers.

Every method gets the same number of learning rates and of updates; the rate with the lowest training error at the end
counts. Errors are half the squared error of an image, over the first 10,000 training images; seconds are CPU seconds of
one thread, without the time to evaluate.

    python recipes/prong_autoencoder.py
    python recipes/prong_autoencoder.py --config recipes/configs/mnist_autoencoder.yaml --data_dir DIR
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from shared import make_trainer, mean_and_deviation, publish, quiet, run_jobs, table

import lightning_symmetry as ls

Method = Literal["sgd", "momentum", "rmsprop", "adam", "batch_norm", "center", "prong"]
LABELS = {
    "sgd": "SGD",
    "momentum": "SGD, momentum 0.9",
    "rmsprop": "RMSprop",
    "adam": "Adam",
    "batch_norm": "batch norm, momentum 0.9",
    "center": "centring, momentum 0.9",
    "prong": "PRONG, momentum 0.9",
}


@dataclass
class Setting:
    """Train the autoencoder with each method and learning rate, and compare the best of each.

    Args:
        methods: Optimizers; "center" is PRONG that centres only, "batch_norm" another network.
        learning_rates: Learning rates of SGD, with and without momentum, batch norm, centring and PRONG.
        adaptive_rates: Those of RMSprop and Adam, as many.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation and order of the data.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        hidden: Widths of the encoder.
        batch_size: Batch size.
        steps: Updates of each training.
        num_points: Number of times that the training error is measured.
        every_n_steps: Updates between two reparametrisations (T).
        num_samples: Samples of the statistics (N_s).
        eps: Damping of the whitening; well below the variance of the activations, or nothing is whitened.
        whiten_at_init: Whether PRONG whitens before the first update.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for results and figures.
    """

    methods: list[Method] = field(default_factory=lambda: list(LABELS))
    learning_rates: list[float] = field(default_factory=lambda: [0.3, 0.1, 0.03])
    adaptive_rates: list[float] = field(default_factory=lambda: [1e-2, 3e-3, 1e-3])
    seeds: int = 1
    seed: int = 0
    data: Literal["digits", "mnist", "fashion_mnist"] = "digits"
    data_dir: str = "data"
    hidden: list[int] = field(default_factory=lambda: [128, 64, 32, 10])
    batch_size: int = 128
    steps: int = 1000
    num_points: int = 10
    every_n_steps: int = 100
    num_samples: int = 128
    eps: float = 0.01
    whiten_at_init: bool = True
    workers: int | None = None
    out_dir: str = "runs/prong_autoencoder"


def make_data(setting: Setting) -> pl.LightningDataModule:
    """Return the data module."""
    if setting.data == "digits":
        return ls.DigitsData(setting.batch_size, normalize=False)
    return ls.VisionData(setting.data, setting.data_dir, setting.batch_size, normalize=False)


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

    def __init__(self, points: list[int], images: torch.Tensor, tick: Callable[[int], Any]) -> None:
        self.points, self.images, self.tick = points, images, tick
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


def run(
    setting: Setting, method: Method, rate: float, seed: int, tick: Callable[[int], Any], label: str = ""
) -> dict[str, Any]:
    """Train once and return the course of the training error; infinite from where it diverged."""
    quiet()
    pl.seed_everything(seed, verbose=False)
    data = make_data(setting)
    data.prepare_data()
    data.setup("fit")
    loader = data.eval_dataloader("train")
    images = torch.cat([x for x, _ in islice(loader, -(-10_000 // loader.batch_size))])[:10_000]
    net = ls.Autoencoder(images[0].numel(), setting.hidden, norm=method == "batch_norm")
    module = ls.ReconstructionModule(net, optimizer=make_optimizer(method, rate))
    points = [round(setting.steps * k / setting.num_points) for k in range(setting.num_points + 1)]
    progress = Progress([*points, -1], images, tick)
    callbacks: list[pl.Callback] = [progress]
    if method in ("center", "prong"):
        mode = "center" if method == "center" else "full"
        whitening = {name: getattr(setting, name) for name in ("every_n_steps", "num_samples", "eps", "whiten_at_init")}
        callbacks.insert(0, ls.PRONG(mode=mode, **whitening))
    folder = Path(setting.out_dir) / f"{method}{label}" / f"lr{rate:g}" / f"seed{seed}"
    every = max(1, setting.steps // 100)
    trainer = make_trainer(folder, callbacks, max_steps=setting.steps, devices=1, log_every_n_steps=every)
    trainer.fit(module, datamodule=data)
    errors = [error if math.isfinite(error) else math.inf for error in progress.errors]
    tick(len(points) - len(errors))
    errors += [math.inf] * (len(points) - len(errors))
    seconds = progress.seconds + [progress.seconds[-1]] * (len(points) - len(progress.seconds))
    return {
        "method": method,
        "rate": rate,
        "seed": seed,
        "label": label,
        "points": points,
        "errors": errors,
        "seconds": seconds,
    }


def best_rates(results: list[dict[str, Any]], methods: list[Method]) -> dict[Method, list[dict[str, Any]]]:
    """Return each method's runs with the learning rate whose mean error at the end is the lowest."""
    found = {}
    for method in methods:
        by_rate: dict[float, list[dict[str, Any]]] = {}
        for result in results:
            if result["method"] == method and not result["label"]:
                by_rate.setdefault(result["rate"], []).append(result)
        found[method] = min(by_rate.values(), key=lambda runs: sum(r["errors"][-1] for r in runs))
    return found


def summarise(best: dict[Method, list[dict[str, Any]]]) -> str:
    """Return the table: training error after so many updates, and what an update costs."""
    points = next(iter(best.values()))[0]["points"]
    shown = [len(points) // 4, len(points) // 2, 3 * len(points) // 4, len(points) - 1]
    rows = []
    for method, runs in best.items():
        errors = [mean_and_deviation([r["errors"][k] for r in runs], 2) for k in shown]
        cost = sum(r["seconds"][-1] / r["points"][-1] for r in runs) / len(runs)
        rows.append([LABELS[method], f"{runs[0]['rate']:g}", *errors, f"{1e3 * cost:.2f}"])
    return table(["method", "learning rate", *[f"{points[k]} updates" for k in shown], "CPU ms/update"], rows)


def draw(setting: Setting, best: dict[Method, list[dict[str, Any]]]) -> Figure:
    """Draw figures 3c and 3d: the training error against updates and against CPU seconds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for method, runs in best.items():
        error = torch.tensor([r["errors"] for r in runs]).mean(0)
        seconds = torch.tensor([r["seconds"] for r in runs]).mean(0)
        for ax, x in zip(axes, (runs[0]["points"], seconds), strict=True):
            ax.plot(x, error, marker="o", markersize=2, label=f"{LABELS[method]} ({runs[0]['rate']:g})")
    axes[0].set(xlabel="updates", ylabel="training error", yscale="log")
    axes[1].set(xlabel="CPU seconds, one thread")
    figure.suptitle(f"autoencoder on {setting.data}, best learning rate of each method")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all trainings."""
    quiet()
    workers = setting.workers
    if workers is None:
        workers = 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
    make_data(setting).prepare_data()
    jobs = []
    for seed in range(setting.seed, setting.seed + setting.seeds):
        for method in setting.methods:
            rates = setting.adaptive_rates if method in ("adam", "rmsprop") else setting.learning_rates
            jobs += [{"setting": setting, "method": method, "rate": rate, "seed": seed} for rate in rates]
    results = run_jobs(
        run, jobs, len(jobs) * setting.num_points, workers, f"{len(jobs)} autoencoders on {setting.data}"
    )
    best = best_rates(results, setting.methods)
    out = Path(setting.out_dir)
    text, figure = summarise(best), draw(setting, best)
    publish(out, "prong_autoencoder", figure, {"table": text}, {"setting": asdict(setting), "results": results})
    print(f"\nTraining error, autoencoder on {setting.data}, {setting.seeds} seed(s), best learning rates:\n\n{text}\n")
    print(f"Figure: {out / 'prong_autoencoder.png'}\nTensorBoard: tensorboard --logdir {out}")
    return results


if __name__ == "__main__":
    main(auto_cli(Setting, as_positional=False))
