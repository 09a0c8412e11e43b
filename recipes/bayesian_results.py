"""Tables and figure of ``bayesian.py``, and what the paper's Table 2 has."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bayesian_training import Cell, half_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared import mean_and_deviation, publish, table

KINDS = {"standard": "Standard", "w": "W-Asym"}
NETWORKS = {"mlp8": "MLP-8", "mlp16": "MLP-16", "resnet20": "ResNet20", "resnet110": "ResNet110"}
METHODS = {
    "variational": "variational",
    "mean_field": "mean-field",
    "last_layer": "last layer only",
    "deterministic": "deterministic",
    "ensemble": "ensemble",
}
COLUMNS = ["Train loss", "Test loss", "ECE", "Test acc %", "Test acc % at half of the epochs"]
# Table 2: mean and deviation over 10 trainings of 50 epochs, the last column after 25. The norm is given for CIFAR-100.
PAPER = {
    ("cifar10", "mlp8", None): {
        "standard": ["1.34 ± .00", "1.24 ± .01", ".039 ± .009", "56.37 ± .31", "52.87 ± 0.2"],
        "w": ["1.31 ± .01", "1.22 ± .01", ".042 ± .009", "57.08 ± .50", "54.15 ± 0.2"],
    },
    ("cifar10", "mlp16", None): {
        "standard": ["2.29 ± .02", "2.28 ± .03", ".026 ± .017", "13.54 ± 2.0", "13.34 ± 2.7"],
        "w": ["1.39 ± .01", "1.27 ± .01", ".045 ± .009", "55.16 ± .44", "51.42 ± 0.3"],
    },
    ("cifar10", "resnet20", None): {
        "standard": [".596 ± .01", ".535 ± .03", ".045 ± .007", "81.98 ± 1.2", "72.37 ± 1.0"],
        "w": [".600 ± .02", ".535 ± .01", ".044 ± .004", "81.94 ± 0.6", "73.64 ± 1.5"],
    },
    ("cifar10", "resnet110", None): {
        "standard": [".803 ± .08", ".706 ± .08", ".052 ± .007", "75.71 ± 2.8", "59.85 ± 3.9"],
        "w": [".745 ± .07", ".658 ± .06", ".049 ± .004", "77.40 ± 2.4", "63.20 ± 3.0"],
    },
    ("cifar100", "resnet20", "batch"): {
        "standard": ["1.68 ± .03", "1.57 ± .02", ".078 ± .004", "56.83 ± .62", "46.80 ± 0.9"],
        "w": ["1.62 ± .02", "1.50 ± .03", ".076 ± .006", "58.40 ± .62", "49.29 ± 0.4"],
    },
    ("cifar100", "resnet20", "layer"): {
        "standard": ["1.97 ± .02", "1.88 ± .02", ".090 ± .007", "50.02 ± .54", "37.24 ± 1.1"],
        "w": ["1.91 ± .03", "1.82 ± .02", ".086 ± .006", "51.20 ± .47", "39.03 ± 1.0"],
    },
}
TITLES = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
Runs = dict[Cell, list[dict[str, Any]]]
"""The results of each cell, one a seed, or one an ensemble."""


def by_cell(results: list[dict[str, Any]]) -> Runs:
    """Return the results of each cell."""
    runs: Runs = {}
    for result in results:
        runs.setdefault(Cell(**result["cell"]), []).append(result)
    return runs


def report(setting: Any, results: list[dict[str, Any]]) -> None:
    """Print the tables, and write them, the figure and the results into the folder of the recipe."""
    runs, out, title = by_cell(results), Path(setting.out_dir), title_of(setting)
    tables = {"table 2": measured_table(runs), "the paper's table 2": paper_table(setting)}
    figure = draw(runs, title)
    publish(out, "bayesian", figure, tables, {"setting": asdict(setting), "results": results})
    print(f"\n{title} (half: {half_of(setting.epochs)}), mean ± deviation over the runs of the last column")
    for heading, text in tables.items():
        print(f"\n{heading[0].upper()}{heading[1:]}:\n\n{text}")
    print(f"\nFigure: {out / 'bayesian.png'}\nTensorBoard: tensorboard --logdir {out}")


def title_of(setting: Any) -> str:
    """Return what was trained on what and for how long."""
    residual = any(network.startswith("resnet") for network in setting.networks)
    norm = {"layer": "LN", "batch": "BN"}[setting.norm] if residual else "LN"
    return f"{TITLES[setting.data]}, {norm}, {setting.epochs} epochs"


def measured_table(runs: Runs) -> str:
    """Return Table 2 as measured.

    The loss is the mean over a training's last epoch, with one sample. AUROC is of test images against the same images
    with their pixels in another order, by the predictive entropy, and by the mutual information of output and weights.
    """
    rows = []
    for cell, mine in runs.items():
        values = [
            mean_and_deviation([r["train_loss"] for r in mine]),
            mean_and_deviation([r["test"]["nll"] for r in mine]),
            mean_and_deviation([r["test"]["ece"] for r in mine]),
            mean_and_deviation([100 * r["test"]["accuracy"] for r in mine], 2),
            mean_and_deviation([100 * r["half"] for r in mine], 2),
        ]
        for name in ("entropy", "mutual_information"):
            scores = [r["auroc"][name] for r in mine]
            values.append("-" if scores[0] is None else mean_and_deviation(scores))
        values.append("-" if mine[0]["kl"] is None else f"{sum(r['kl'] for r in mine) / len(mine):.3g}")
        values += [f"{mine[0]['parameters']:,}", f"{sum(r['seconds'] for r in mine) / len(mine):.3g}", f"{len(mine)}"]
        rows.append([NETWORKS[cell.network], KINDS[cell.kind], METHODS[cell.method], *values])
    seconds = "seconds" if torch.cuda.is_available() else "CPU seconds"
    header = ["network", "kind", "method", *COLUMNS, "OOD AUROC, entropy", "OOD AUROC, mutual information", "KL, nats"]
    return table([*header, "parameters", seconds, "runs"], rows)


def paper_rows(setting: Any) -> dict[tuple[str, str, str | None], dict[str, list[str]]]:
    """Return what the paper has of the setting's networks: on the same data, or else on any."""
    found = {key: rows for key, rows in PAPER.items() if key[1] in setting.networks}
    same = {key: rows for key, rows in found.items() if key[0] == setting.data and key[2] in (None, setting.norm)}
    return same or found


def paper_table(setting: Any) -> str:
    """Return the paper's rows of the setting's networks; on other data than here where it has none on these."""
    rows = []
    for (data, network, norm), kinds in paper_rows(setting).items():
        name = NETWORKS[network] + {"batch": " (BN)", "layer": " (LN)", None: ""}[norm]
        rows += [[TITLES[data], name, KINDS[kind], "variational", *kinds[kind]] for kind in KINDS]
    return table(["data", "network", "kind", "method", *COLUMNS], rows)


def draw(runs: Runs, title: str) -> Figure:
    """Draw figure 4 for each network, calibration, accuracy, and how well other images are told apart."""
    networks = list(dict.fromkeys(cell.network for cell in runs))
    panels = len(networks) + 4
    rows = -(-panels // 3)
    figure = Figure(figsize=(15, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False).flatten()
    for ax, network in zip(axes, networks, strict=False):
        _draw_losses(ax, {cell: mine for cell, mine in runs.items() if cell.network == network})
        ax.set_title(f"{NETWORKS[network]}: training loss")
    reliability, error, accuracy, auroc = axes[len(networks) : panels]
    _draw_reliability(reliability, runs)
    _draw_points(error, runs, lambda r: r["test"]["ece"])
    error.set(ylabel="ECE", title="Expected calibration error, 15 bins")
    _draw_points(accuracy, runs, lambda r: 100 * r["test"]["accuracy"])
    accuracy.set(ylabel="test accuracy %", title="Test accuracy")
    _draw_points(auroc, runs, lambda r: r["auroc"]["entropy"])
    auroc.axhline(0.5, color="grey", linewidth=0.8)
    auroc.set(ylabel="AUROC of the predictive entropy", title="Test images against permuted pixels")
    for ax in axes[panels:]:
        ax.remove()
    figure.suptitle(title)
    return figure


def _draw_losses(ax: Axes, runs: Runs) -> None:
    """Draw training losses over epochs, with the deviation over the seeds as a band; methods differ in lines."""
    lines = dict(zip(METHODS, ["-", "--", ":", "-.", (0, (1, 3))], strict=True))
    for cell, mine in runs.items():
        if cell.method == "ensemble":
            continue
        curves = torch.tensor([r["curves"]["train_loss"] for r in mine], dtype=torch.float64)
        mean, deviation = curves.mean(0), curves.std(0, correction=0)
        epochs = range(1, len(mean) + 1)
        main = cell.method == "variational"
        style = {"color": f"C{list(KINDS).index(cell.kind)}", "linestyle": lines[cell.method]}
        label = f"{KINDS[cell.kind]}, {METHODS[cell.method]}"
        ax.plot(epochs, mean, **style, linewidth=2 if main else 1, label=label)
        if main:
            ax.fill_between(epochs, mean - deviation, mean + deviation, color=style["color"], alpha=0.2, linewidth=0)
    ax.set(xlabel="epoch", ylabel="training loss (nats, one sample)")
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize="xx-small", ncols=2, loc="upper right")


def _draw_reliability(ax: Axes, runs: Runs) -> None:
    """Draw the share of hits against the confidence, over all runs of a cell, of the variational networks."""
    shown = {c: mine for c, mine in runs.items() if c.method == "variational"} or runs
    ax.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    networks = list(dict.fromkeys(cell.network for cell in shown))
    for cell, mine in shown.items():
        count, confidence, hits = (_over_bins(mine, name) for name in ("count", "confidence", "hits"))
        total = count.sum(0)
        used = total >= 5  # fewer images say little
        points = [((count * part).sum(0) / total)[used] for part in (confidence, hits)]
        style = {"color": f"C{list(KINDS).index(cell.kind)}", "marker": "osD^"[networks.index(cell.network)]}
        label = f"{NETWORKS[cell.network]}, {KINDS[cell.kind]}, {METHODS[cell.method]}"
        ax.plot(*points, **style, linewidth=1, markersize=4, label=label)
    ax.set(xlabel="confidence", ylabel="accuracy", title="Reliability, bins of 5 images at least")
    ax.legend(fontsize="x-small")


def _over_bins(runs: list[dict[str, Any]], name: str) -> torch.Tensor:
    """Return a value of the bins of all runs, 0 where a bin is empty."""
    values = [[math.nan if value is None else value for value in r["test"][name]] for r in runs]
    return torch.tensor(values, dtype=torch.float64).nan_to_num()


def _draw_points(ax: Axes, runs: Runs, value: Any) -> None:
    """Draw a value of all runs by network and method, with a bar at the mean."""
    places = list(dict.fromkeys((cell.network, cell.method) for cell in runs))
    for cell, mine in runs.items():
        place = places.index((cell.network, cell.method)) + 0.2 * (2 * list(KINDS).index(cell.kind) - 1)
        values, color = [value(r) for r in mine], f"C{list(KINDS).index(cell.kind)}"
        ax.hlines(sum(values) / len(values), place - 0.15, place + 0.15, color=color)
        ax.plot([place] * len(values), values, "o", color=color, markersize=4, alpha=0.6, label=KINDS[cell.kind])
    names = [f"{NETWORKS[network]}\n{METHODS[method]}" for network, method in places]
    ax.set_xticks(range(len(places)), names, rotation=45, ha="right", fontsize="x-small")
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    ax.legend(once.values(), once.keys(), fontsize="x-small")
