"""Figure 2 of Natural Neural Networks: whitening the activations improves the conditioning of the Fisher matrix.

A small tanh network classifies images of 10x10 pixels. Of each middle layer (from hidden units to hidden units) the
figure shows the Fisher block of weight and bias before and after the first reparametrisation of PRONG, at the same
weights, and its condition number during training with SGD, RMSprop and PRONG, in per cent of the value at the start.
PRONG's is that of its own coordinates (V, d); RMSprop's is that of the parameters, not divided by its scales.

The embedded digits are resampled from 8x8 to 10x10 pixels, MNIST is downsampled from 28x28.

Expected, 10x10 digits, 3 seeds: the condition number, without damping, falls by more than 95 % at the first
reparametrisation in both layers. The second table says what is left of that where small eigenvalues are damped.

    python recipes/fisher_conditioning.py
    python recipes/fisher_conditioning.py --config recipes/configs/mnist_conditioning.yaml --data_dir DIR
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from shared import make_trainer, mean_and_deviation, publish, quiet, run_jobs, run_script, table, worker_count
from torch import nn

import lightning_symmetry as ls
from lightning_symmetry.callbacks.fisher_figures import draw_history, show_matrix
from lightning_symmetry.data.digits import MAX_VALUE
from lightning_symmetry.data.image_dataset import TensorImages
from lightning_symmetry.data.image_module import ImageSplits

Method = Literal["sgd", "rmsprop", "prong"]
LABELS = {"sgd": "SGD", "rmsprop": "RMSprop", "prong": "PRONG"}
SIDE = 10  # pixels
DAMPINGS = [0.0, 1e-8, 1e-6, 1e-4, 1e-2]


@dataclass
class Setting:
    """Train the network with each optimizer and follow the conditioning of its middle layers.

    Args:
        methods: Optimizers; PRONG is SGD with the callback.
        learning_rate: Learning rate of SGD.
        adaptive_rate: That of RMSprop.
        prong_rate: That of PRONG, which multiplies it by up to 1 / eps in some directions.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation and order of the data.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        hidden: Widths of the hidden layers.
        batch_size: Batch size.
        steps: Updates of each training.
        num_points: Number of times that the condition numbers are measured after the start.
        fisher_samples: Images that the Fisher matrix is taken over.
        every_n_steps: Updates between two reparametrisations (T).
        num_samples: Samples of the statistics (N_s); the first ones come from the first batch alone.
        eps: Damping of the whitening; well below the variance of the activations, or nothing is whitened.
        damping: Damping of the condition numbers, in units of the largest eigenvalue at the start.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for results and figures.
    """

    methods: list[Method] = field(default_factory=lambda: list(LABELS))
    learning_rate: float = 0.1
    adaptive_rate: float = 1e-3
    prong_rate: float = 0.03
    seeds: int = 3
    seed: int = 0
    data: Literal["digits", "mnist", "fashion_mnist"] = "digits"
    data_dir: str = "data"
    hidden: list[int] = field(default_factory=lambda: [20, 20, 20])
    batch_size: int = 120
    steps: int = 500
    num_points: int = 10
    fisher_samples: int = 1000
    every_n_steps: int = 100
    num_samples: int = 100
    eps: float = 0.01
    damping: float = 0.0
    workers: int | None = None
    out_dir: str = "runs/fisher_conditioning"


class LargerDigits(ls.DigitsData):
    """The embedded digits, resampled to 10x10 pixels and 256 levels."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(1, 10, 10)."""
        return (1, SIDE, SIDE)

    def _load(self) -> ImageSplits:
        splits = super()._load()
        parts: dict[str, TensorImages] = {}
        for name, part in splits.plain.items():
            images = F.interpolate(part.images * (255 / MAX_VALUE), (SIDE, SIDE), mode="bilinear", antialias=True)
            mean, std = (x.flatten().tolist() for x in (part.mean, part.std))
            parts[name] = TensorImages(images.round().to(torch.uint8), part.labels, mean, std)
        return ImageSplits(parts["train"], parts)


def make_data(setting: Setting) -> pl.LightningDataModule:
    """Return the data module."""
    if setting.data == "digits":
        return LargerDigits(setting.batch_size)
    return ls.VisionData(setting.data, setting.data_dir, setting.batch_size, image_size=SIDE)


def middle_layers(setting: Setting) -> list[str]:
    """Return the names of the layers from hidden units to hidden units."""
    return [f"net.linears.{k}" for k in range(1, len(setting.hidden))]


def make_optimizer(setting: Setting, method: Method) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the optimizer of a method."""
    if method == "rmsprop":
        return partial(torch.optim.RMSprop, lr=setting.adaptive_rate)
    return partial(torch.optim.SGD, lr=setting.learning_rate if method == "sgd" else setting.prong_rate)


class StepTicks(pl.Callback):
    """Report each update to the recipe's progress bar."""

    def __init__(self, tick: Callable[[int], Any]) -> None:
        self.tick = tick

    def on_train_batch_end(self, *args: Any) -> None:
        """Report one update."""
        self.tick(1)


def run(setting: Setting, method: Method, seed: int, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train once and return the course of the condition numbers, and the matrices of PRONG's first seed."""
    quiet()
    pl.seed_everything(seed, verbose=False)
    data = make_data(setting)
    net = ls.MLP(SIDE * SIDE, setting.hidden, data.num_classes, norm=False, activation=nn.Tanh)
    module = ls.SupervisedModule(net, optimizer=make_optimizer(setting, method))
    fisher = ls.FisherConditioning(
        middle_layers(setting),
        max(1, setting.steps // setting.num_points),
        num_samples=setting.fisher_samples,
        damping=setting.damping,
        relative=True,
        progress=setting.workers == 0,
    )
    callbacks: list[pl.Callback] = [fisher, StepTicks(tick)]
    if method == "prong":
        callbacks.insert(0, ls.PRONG(setting.every_n_steps, setting.num_samples, setting.eps))
    folder = Path(setting.out_dir) / method / f"seed{seed}"
    trainer = make_trainer(folder, callbacks, max_steps=setting.steps, max_epochs=-1, devices=1, log_every_n_steps=10)
    trainer.fit(module, datamodule=data)
    loader = data.eval_dataloader("train")
    with torch.no_grad():
        losses = torch.cat([F.cross_entropy(net(x), y, reduction="none") for x, y in loader])
    result = {"method": method, "seed": seed, "history": fisher.history, "loss": losses.mean().item()}
    if method == "prong":
        result["damped"] = {name: damped_percent(m) for name, m in fisher.matrices.items()}
        if seed == setting.seed:  # as arrays: worker processes would share tensors, and end before they are read
            moments = ("before", "after")
            result["matrices"] = {n: {k: m[k].numpy() for k in moments} for n, m in fisher.matrices.items()}
    return result


def damped_percent(matrices: dict[str, torch.Tensor]) -> list[float]:
    """Return what is left of the condition number by the first reparametrisation, in per cent, at each damping."""
    before, after = matrices["before"], matrices["after"]
    unit = torch.linalg.matrix_norm(before, 2).item()
    return [100 * ls.condition_number(after, d * unit) / ls.condition_number(before, d * unit) for d in DAMPINGS]


def rows_of(runs: list[dict[str, Any]], layer: str) -> list[list[dict[str, Any]]]:
    """Return the measurements of a layer in order, each of all seeds."""
    histories = [[row for row in run["history"] if row["layer"] == layer] for run in runs]
    return [list(rows) for rows in zip(*histories, strict=True)]


def summarise(setting: Setting, by_method: dict[Method, list[dict[str, Any]]]) -> str:
    """Return the table: condition numbers at the start and in per cent of that."""
    shown = [setting.steps // 2, setting.steps]
    rows = []
    for method, runs in by_method.items():
        for layer in middle_layers(setting):
            measured = rows_of(runs, layer)
            start = [row["condition"] for row in measured[0]]
            first = next((rows for rows in measured if rows[0]["reparametrization"] == "after"), None)
            points = [[rows for rows in measured if rows[0]["step"] <= step][-1] for step in shown]
            cells = [_range([row["percent"] for row in rows]) if rows else "-" for rows in [first, *points]]
            loss = mean_and_deviation([run["loss"] for run in runs])
            rows.append([LABELS[method], layer.removeprefix("net."), _range(start), *cells, loss])
    after = [f"% after {step} updates" for step in shown]
    header = ["optimizer", "layer", "condition at start", "% after first reparametrisation", *after, "training loss"]
    return table(header, rows)


def summarise_dampings(setting: Setting, runs: list[dict[str, Any]]) -> str:
    """Return the table: what is left by the first reparametrisation, in per cent, at several dampings."""
    rows = []
    for layer in middle_layers(setting):
        values = zip(*[run["damped"][layer] for run in runs], strict=True)
        rows.append([layer.removeprefix("net."), *[_range(list(column)) for column in values]])
    return table(["damping, of the largest eigenvalue before", *[f"{d:g}" for d in DAMPINGS]], rows)


def _range(values: list[float]) -> str:
    """Return the range over the seeds."""
    low, high = (f"{value:.0f}" if 10 <= value < 1000 else f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def draw(setting: Setting, by_method: dict[Method, list[dict[str, Any]]]) -> Figure:
    """Draw figure 2: Fisher blocks before and after whitening, and condition numbers during training."""
    layers = middle_layers(setting)
    figure = Figure(figsize=(max(8, 5 * len(layers)), 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2 * len(layers), height_ratios=[1, 1.2])
    pictures, image = [], None
    for k, layer in enumerate(layers):
        matrices = by_method["prong"][0]["matrices"][layer] if "prong" in by_method else {}
        for j, (moment, matrix) in enumerate(matrices.items()):
            pictures.append(figure.add_subplot(grid[0, 2 * k + j]))
            image = show_matrix(torch.from_numpy(matrix), pictures[-1])
            pictures[-1].set_title(f"|F| {moment} whitening", fontsize="medium")
        ax = figure.add_subplot(grid[1, 2 * k : 2 * k + 2])
        for method, runs in by_method.items():
            measured = rows_of(runs, layer)
            percents = torch.tensor([[row["percent"] for row in rows] for rows in measured], dtype=torch.float64)
            means = percents.log().mean(1).exp().tolist()
            history = [{**rows[0], "percent": mean} for rows, mean in zip(measured, means, strict=True)]
            draw_history(history, layer, "percent", ax, LABELS[method], marker="o", markersize=3)
            steps = [row["step"] for row in history]
            ax.fill_between(steps, percents.amin(1), percents.amax(1), alpha=0.2, linewidth=0)
        ax.axhline(5, color="grey", linewidth=1, linestyle=":", label="5 %")
        ax.set_title(layer.removeprefix("net."), fontsize="medium")
        ax.legend(fontsize="small")
    if image is not None:
        figure.colorbar(image, ax=pictures, label="|entry| / largest", shrink=0.8)
    figure.suptitle(f"Fisher blocks of the middle layers, {setting.data} 10x10, {setting.seeds} seed(s)")
    return figure


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all trainings."""
    quiet()
    workers = worker_count(setting.workers)
    make_data(setting).prepare_data()
    seeds = range(setting.seed, setting.seed + setting.seeds)
    jobs = [{"setting": setting, "method": method, "seed": seed} for seed in seeds for method in setting.methods]
    label = f"{len(jobs)} trainings on {setting.data}"
    results = run_jobs(run, jobs, len(jobs) * setting.steps, workers, label, "update")
    by_method = {method: [r for r in results if r["method"] == method] for method in setting.methods}
    texts, figure = {"table": summarise(setting, by_method)}, draw(setting, by_method)
    if "prong" in by_method:
        texts["dampings"] = summarise_dampings(setting, by_method["prong"])
    for result in results:
        result.pop("matrices", None)
    out = Path(setting.out_dir)
    publish(out, "fisher_conditioning", figure, texts, {"setting": asdict(setting), "results": results})
    print(f"\nCondition numbers of Fisher blocks, {setting.data} 10x10, {setting.seeds} seed(s), lowest to highest:\n")
    print(f"{texts['table']}\n")
    if "dampings" in texts:
        print(f"% of the condition number after the first reparametrisation, by damping:\n\n{texts['dampings']}\n")
    print(f"Figure: {out / 'fisher_conditioning.png'}\nTensorBoard: tensorboard --logdir {out}")
    return results


if __name__ == "__main__":
    run_script(main, Setting)
