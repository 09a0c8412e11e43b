"""Figure 6: how many epochs do W-asymmetric networks need, by number and size of their fixed weights?

Trains networks for each number of fixed filters an output channel (n_fix) and each standard deviation of the constants
(kappa), several seeds together as a population, and counts epochs until the training accuracy, taken while training, is
first at a given value. n_fix = 0 is the standard network, whatever kappa is: it is trained once, and fills its column.

The paper's text gives two of figure 6's values: standard networks take 11 epochs on average to reach 70 % on CIFAR-10,
the most asymmetric ones up to 72. It names neither the network's size nor the optimizer: this recipe takes the network
and the training of the paper's zoos (App. E.3.1), with one set of hyper-parameters.

Expected on the default (handwritten digits, 90 %, seeds 0 to 2, 230 CPU seconds on busy cores): 7.3 epochs for
standard networks, more with each step of n_fix and of kappa but one, which is even; 22 at n_fix 12 and kappa 2, and at
n_fix 12 and kappa 4 none within 40.

    python recipes/asymmetry_sweep.py
    python recipes/asymmetry_sweep.py --config recipes/configs/cifar10_sweep.yaml --data_dir DIR
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared import (
    UsageError,
    mean_and_deviation,
    publish,
    quiet,
    run_jobs,
    run_script,
    settings_of_a_training,
    stored,
    table,
    worker_count,
)
from zoo_training import AUGMENTATION, check_augmentation, image_tensors

import lightning_symmetry as ls

PAPER = {"standard": 11, "most asymmetric": 72}  # epochs to 70 % on CIFAR-10, App. A
# What has no influence on the training of a given cell.
OF_THE_SWEEP = {"n_fix", "kappa", "accuracy", "workers", "out_dir"}
Cell = tuple[int, float]
"""n_fix and kappa."""


@dataclass
class Setting:
    """Train networks for each n_fix and kappa, print epochs to a training accuracy, and draw them as a heat map.

    Args:
        n_fix: Fixed filters of each output channel, and fixed entries of each row of the head. Of the first
            convolution, half as many of its 9 entries (digits), or half as many again of its 27 (CIFAR-10), at least 2.
        kappa: Standard deviations of the constants.
        accuracy: Training accuracy to reach.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation and order of the data.
        constants_seed: Seed of masks and constants.
        data: Data set; the network is :func:`~lightning_symmetry.zoo_classifier`'s.
        data_dir: Folder of data sets that are not embedded.
        augment: Whether to mirror, shift and cut out training images, anew each time.
        norm: Normalisation in the network.
        epochs: Epochs of each training.
        batch_size: Batch size.
        learning_rate: Peak learning rate of SGD with momentum 0.9; it rises linearly from 0 over the first fifth of the
            training, and falls linearly to 0.
        weight_decay: Weight decay.
        label_smoothing: Label smoothing.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for TensorBoard logs, results and the figure.
    """

    n_fix: list[int] = field(default_factory=lambda: [0, 2, 4, 8, 12])
    kappa: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0])
    accuracy: float = 0.9
    seeds: int = 3
    seed: int = 0
    constants_seed: int = 0
    data: Literal["digits", "cifar10"] = "digits"
    data_dir: str = "data"
    augment: bool = False
    norm: Literal["layer", "batch"] = "layer"
    epochs: int = 40
    batch_size: int = 64
    learning_rate: float = 0.2
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    workers: int | None = None
    out_dir: str = "runs/asymmetry_sweep"


def factory_arguments(setting: Setting, cell: Cell) -> dict[str, Any]:
    """Return the arguments of :func:`~lightning_symmetry.zoo_classifier` for a cell."""
    n_fix, kappa = cell
    same = {"data": setting.data, "norm": setting.norm, "constants_seed": setting.constants_seed}
    if n_fix == 0:
        return {"kind": "standard", **same}
    first, share = {"digits": ("convs.0", 0.5), "cifar10": ("stem", 1.5)}[setting.data]
    overrides = {
        first: {"layout": "entries", "n_fix": max(2, int(share * n_fix))},
        "head": {"layout": "entries", "n_fix": n_fix},
    }
    return {"kind": "w", **same, "settings": {"n_fix": n_fix, "kappa": kappa, "overrides": overrides}}


def cells(setting: Setting) -> list[Cell]:
    """Return what is trained: without fixed weights there is no kappa."""
    return list(dict.fromkeys((n, kappa if n else 0.0) for n in setting.n_fix for kappa in setting.kappa))


def run(setting: Setting, cell: Cell, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train a cell's networks together; from the recipe's folder, where that was done before.

    Args:
        setting: The setting.
        cell: What is varied.
        tick: Reports finished epochs.
    """
    quiet()
    path = Path(setting.out_dir) / "cells" / f"n_fix{cell[0]}-kappa{cell[1]:g}.json"
    settings = {"cell": list(cell), "setting": settings_of_a_training(setting, OF_THE_SWEEP)}
    result = stored(path, settings, lambda: train(setting, cell, tick))
    if not result["new"]:
        tick(setting.epochs * setting.seeds)
    return result


def train(setting: Setting, cell: Cell, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train a cell's networks together and return their training accuracy by the epoch, and their test accuracy."""
    data, seeds = image_tensors(setting.data, setting.data_dir), range(setting.seed, setting.seed + setting.seeds)
    arguments = factory_arguments(setting, cell)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = [ls.seeded_network(ls.zoo_classifier, seed, **arguments).to(device) for seed in seeds]
    same = {"learning_rate", "weight_decay", "label_smoothing", "epochs"}
    found = ls.train_population(
        networks,
        *(tensor.to(device) for tensor in data["train"]),
        {**{name: [getattr(setting, name)] * setting.seeds for name in same}, "seed": list(seeds)},
        ls.PopulationSettings(batch_size=setting.batch_size, augment=AUGMENTATION if setting.augment else None),
        on_epoch=tick,
    )
    _, test_accuracy = ls.evaluate_population(networks[0], found.final, *(tensor.to(device) for tensor in data["test"]))
    return {
        "train_accuracy": found.history_accuracy.tolist(),
        "test_accuracy": test_accuracy.tolist(),
        "diverged": found.diverged.tolist(),
    }


def epochs_to(accuracy: float, history: list[float]) -> int | None:
    """Return the number of epochs after which a training accuracy was first reached; None if it never was."""
    return next((epoch for epoch, value in enumerate(history, 1) if value >= accuracy), None)


def by_cell(setting: Setting, results: list[dict[str, Any]]) -> dict[Cell, list[int | None]]:
    """Return each cell's epochs, one number a seed, for each n_fix and kappa: 0 fixed weights are the same for all."""
    found = {tuple(r["cell"]): [epochs_to(setting.accuracy, h) for h in r["train_accuracy"]] for r in results}
    return {(n, kappa): found[n, kappa if n else 0.0] for n in setting.n_fix for kappa in setting.kappa}


def shown(setting: Setting, epochs: list[int | None], deviation: bool = True) -> str:
    """Return a cell's epochs in words: mean ± deviation, or how many seeds came there at all."""
    reached = [epoch for epoch in epochs if epoch is not None]
    if len(reached) == len(epochs):
        return mean_and_deviation(reached, 1) if deviation else f"{fmean(reached):.3g}"
    return f"> {setting.epochs} ({len(reached)} of {len(epochs)} reach it)" if deviation else f"> {setting.epochs}"


def mean_epochs(setting: Setting, epochs: list[int | None]) -> float:
    """Return the mean over the seeds; infinite where one did not reach the accuracy."""
    return fmean(float("inf") if epoch is None else epoch for epoch in epochs)


def grid_table(setting: Setting, found: dict[Cell, list[int | None]]) -> str:
    """Return a table of epochs, kappa downwards and n_fix to the right, as in figure 6."""
    rows = [[f"{kappa:g}", *[shown(setting, found[n, kappa]) for n in setting.n_fix]] for kappa in setting.kappa]
    return table(["kappa", *[f"n_fix {n}" if n else "standard" for n in setting.n_fix]], rows)


def paper_table(setting: Setting, found: dict[Cell, list[int | None]]) -> str:
    """Return a table with what the paper's text says of figure 6."""
    most = max(setting.n_fix), max(setting.kappa)
    rows = [["most asymmetric here" if most[0] else "-", shown(setting, found[most]), f"{PAPER['most asymmetric']}"]]
    if 0 in setting.n_fix:
        rows.insert(0, ["standard", shown(setting, found[0, setting.kappa[0]]), f"{PAPER['standard']}"])
    return table(["network", f"epochs to {setting.accuracy:.0%}, {setting.data}", "paper, 70% on CIFAR-10"], rows)


def trend(setting: Setting, found: dict[Cell, list[int | None]]) -> str:
    """Return how often the mean epochs grow from one value of n_fix, or of kappa, to the next."""
    means = {cell: mean_epochs(setting, epochs) for cell, epochs in found.items()}
    numbers, kappas = sorted(setting.n_fix), sorted(setting.kappa)
    wider = [(means[a, k], means[b, k]) for k in kappas for a, b in pairwise(numbers)]
    larger = [(means[n, a], means[n, b]) for n in numbers if n for a, b in pairwise(kappas)]
    parts = [
        f"from one {name} to the next in {sum(b > a for a, b in pairs)} of {len(pairs)} (fewer in "
        f"{sum(b < a for a, b in pairs)})"
        for name, pairs in (("n_fix", wider), ("kappa", larger))
        if pairs
    ]
    return f"More epochs {', '.join(parts)}; the paper: more asymmetric networks need more time." if parts else ""


def draw(setting: Setting, found: dict[Cell, list[int | None]], results: list[dict[str, Any]]) -> Figure:
    """Draw figure 6, and beside it the test accuracy at the end."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = {cell: mean_epochs(setting, values) for cell, values in found.items()}
    words = {cell: shown(setting, values, deviation=False) for cell, values in found.items()}
    _heat_map(left, setting, epochs, words, "viridis")
    left.set_title(f"Epochs to {setting.accuracy:.0%} training accuracy (hatched: not all of {setting.seeds} seeds)")
    ends = {tuple(r["cell"]): 100 * fmean(r["test_accuracy"]) for r in results}
    accuracy = {(n, kappa): ends[n, kappa if n else 0.0] for n, kappa in found}
    _heat_map(right, setting, accuracy, {cell: f"{value:.1f}" for cell, value in accuracy.items()}, "viridis_r")
    right.set_title(f"Test accuracy % after {setting.epochs} epochs")
    return figure


def _heat_map(ax: Axes, setting: Setting, values: dict[Cell, float], words: dict[Cell, str], colours: str) -> None:
    grid = np.array([[values[n, kappa] for n in setting.n_fix] for kappa in setting.kappa])
    image = ax.imshow(np.ma.masked_invalid(grid), cmap=colours, aspect="auto")
    missing = {"facecolor": "lightgrey", "hatch": "//", "edgecolor": "grey"}
    for (row, column), value in np.ndenumerate(grid):
        word = words[setting.n_fix[column], setting.kappa[row]]
        if not np.isfinite(value):
            ax.fill_between([column - 0.5, column + 0.5], row - 0.5, row + 0.5, **missing)
        box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
        ax.text(column, row, word, ha="center", va="center", bbox=box)
    ax.set_xticks(range(len(setting.n_fix)), [f"{n}" if n else "0 (standard)" for n in setting.n_fix])
    ax.set_yticks(range(len(setting.kappa)), [f"{kappa:g}" for kappa in setting.kappa])
    ax.set(xlabel=r"$n_\mathrm{fix}$", ylabel=r"$\kappa$")
    if np.isfinite(grid).any():
        ax.get_figure().colorbar(image, ax=ax)


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all cells."""
    quiet()
    if not setting.n_fix or not setting.kappa or setting.seeds < 1:
        raise UsageError("There is nothing to train: give at least one of `n_fix`, `kappa` and `seeds`.")
    check_augmentation(setting)
    todo = cells(setting)
    for cell in todo:
        try:
            ls.zoo_classifier(**factory_arguments(setting, cell))
        except ValueError as error:
            raise UsageError(f"There is no network with n_fix {cell[0]} and kappa {cell[1]:g}: {error}") from None
    image_tensors(setting.data, setting.data_dir)  # downloads what is not there, before there are processes
    workers = min(worker_count(setting.workers), len(todo))
    jobs = [{"setting": setting, "cell": cell} for cell in todo]
    total = len(jobs) * setting.seeds * setting.epochs
    results = run_jobs(run, jobs, total, workers, f"{len(jobs) * setting.seeds} networks on {setting.data}")
    found, out = by_cell(setting, results), Path(setting.out_dir)
    texts = {"epochs": grid_table(setting, found), "paper": paper_table(setting, found)}
    said = trend(setting, found)
    figure = draw(setting, found, results)
    publish(out, "asymmetry_sweep", figure, {**texts, "trend": said}, {"setting": asdict(setting), "results": results})
    print(f"\nEpochs to {setting.accuracy:.0%} training accuracy on {setting.data}, {setting.seeds} seed(s):\n")
    print("\n\n".join([*texts.values(), said]))
    print(f"\nFigure: {out / 'asymmetry_sweep.png'}\nTensorBoard: tensorboard --logdir {out}")
    return results


if __name__ == "__main__":
    run_script(main, Setting)
