"""Tables and figures of ``low_rank_vision.py`` and ``low_rank_language.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from low_rank_training import Cell
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared import mean_and_deviation, publish, table

INITS = {"random": "random", "spectral": "spectral", "spectral_ones": "spectral ones"}
DECAYS = {"l2": "L2", "frobenius": "Frobenius"}
STARTS = {"scratch": "from scratch", "pretrained": "pre-trained"}
Runs = dict[Cell, list[dict[str, Any]]]
"""The results of each cell, one a seed."""


@dataclass(frozen=True)
class Quality:
    """What networks are judged by.

    Args:
        key: Its name in a result.
        label: Its name in tables.
        scale: What to multiply it with there.
        digits: Its decimals.
    """

    key: str
    label: str
    scale: float
    digits: int

    def of(self, result: dict[str, Any]) -> float:
        """Return it of a training."""
        return self.scale * result[self.key]


def by_cell(results: list[dict[str, Any]]) -> Runs:
    """Return the results of each cell."""
    runs: Runs = {}
    for result in results:
        runs.setdefault(Cell(**result["cell"]), []).append(result)
    return runs


def report(setting: Any, results: list[dict[str, Any]], quality: Quality, title: str, name: str) -> None:
    """Print the tables, and write them, the figure and the results into the folder of the recipe."""
    runs, out = by_cell(results), Path(setting.out_dir)
    tables = {
        quality.label: grid_table(runs, quality.of, quality.digits),
        "effective rank, mean over the layers, at the end": grid_table(runs, lambda r: r["effective_rank"], 1),
        "step size": step_size_table(runs, quality),
        "all trainings": training_table(runs, quality),
    }
    figure = draw(runs, quality, title)
    publish(out, name, figure, tables, {"setting": asdict(setting), "results": results})
    print(f"\n{title}, {setting.seeds} seed(s), mean ± deviation")
    for heading, text in tables.items():
        print(f"\n{heading[0].upper()}{heading[1:]}:\n\n{text}")
    print(f"\nFigure: {out / f'{name}.png'}\nTensorBoard: tensorboard --logdir {out}")


def training_table(runs: Runs, quality: Quality) -> str:
    """Return a table of all cells.

    The difference is to the dense network of the same seed. The loss is that of one batch, right before and right after
    the factors took the weights' place, of one seed. Distance and largest barrier are those of the segment from the
    dense network of the same seed to the product of the factors. The training loss is the mean over the last batches,
    as many as there are between two measurements of the effective ranks. Seconds contain these measurements.
    """
    rows = []
    for cell, mine in runs.items():
        dense = cell.init == "dense"
        varied = ["dense", "-", "-", "1"]
        if not dense:
            varied = [INITS[cell.init], DECAYS[cell.decay], STARTS[cell.start], f"{cell.step_factor:g}"]
        measured = [mean_and_deviation([quality.of(r) for r in mine], quality.digits)]
        measured += [mean_and_deviation([r[name] for r in mine]) for name in ("train_loss", "test_loss")]
        measured += [mean_and_deviation([r["effective_rank"] for r in mine], 1)]
        measured += [f"{sum(r['seconds'] for r in mine) / len(mine):.0f}"]
        compared = ["-"] * 4 if dense else _against_dense(mine, runs[cell.baseline], quality)
        size = [f"{cell.width}", f"{cell.rank:g}"]
        rows.append([*size, *varied, f"{mine[0]['parameters']:,}", *measured, *compared])
    seconds = "seconds" if torch.cuda.is_available() else "CPU seconds"
    header = ["width", "rank ratio", "initialisation", "decay", "start", "step size", "parameters", quality.label]
    header += ["training loss at the end", "test loss", "effective rank", seconds, "difference to dense"]
    return table([*header, "loss at the switch", "distance/parameter", "max barrier"], rows)


def _against_dense(mine: list[dict[str, Any]], dense: list[dict[str, Any]], quality: Quality) -> list[str]:
    """Return what compares low-rank networks with the dense ones of the same seeds."""
    differences = [quality.of(a) - quality.of(b) for a, b in zip(mine, dense, strict=True)]
    losses = [mine[0]["switch"][0][f"low_rank/loss_{moment}"] for moment in ("before", "after")]
    paths = [r["path"][0] for r in mine]
    return [
        mean_and_deviation(differences, quality.digits),
        f"{losses[0]:.3f} → {losses[1]:.3f}",
        f"{sum(path['distance'] for path in paths) / len(paths):.2e}",
        mean_and_deviation([path["max_barrier"] for path in paths], 2),
    ]


def grid_table(runs: Runs, value: Callable[[dict[str, Any]], float], digits: int) -> str:
    """Return a table over initialisation, decay and start of a value: mean and deviation over the seeds."""
    cells = [cell for cell in runs if cell.init != "dense" and cell.step_factor == 1]
    columns = list(dict.fromkeys((cell.decay, cell.start) for cell in cells))
    rows = []
    for width in dict.fromkeys(cell.width for cell in cells):
        for rank, init in product(sorted({cell.rank for cell in cells}, reverse=True), INITS):
            mine = [runs.get(Cell(init, decay, start, rank, width)) for decay, start in columns]
            if any(mine):
                shown = ["-" if r is None else mean_and_deviation([value(x) for x in r], digits) for r in mine]
                rows.append([f"{width}", f"{rank:g}", INITS[init], *shown])
        dense = runs[next(cell for cell in cells if cell.width == width).baseline]
        rows.append([f"{width}", "1", "dense", *[mean_and_deviation([value(x) for x in dense], digits)] * len(columns)])
    header = [f"{DECAYS[decay]}, {STARTS[start]}" for decay, start in columns]
    return table(["width", "rank ratio", "initialisation", *header], rows)


def step_size_table(runs: Runs, quality: Quality) -> str:
    """Return a table of what another step size does, with the difference for the same seeds."""
    rows = []
    for cell, mine in runs.items():
        if cell.step_factor == 1 or cell.init == "dense":
            continue
        usual = runs[Cell(cell.init, cell.decay, cell.start, cell.rank, cell.width)]
        before, after = ([quality.of(r) for r in each] for each in (usual, mine))
        values = [before, after, [b - a for a, b in zip(before, after, strict=True)]]
        label = [INITS[cell.init], DECAYS[cell.decay], STARTS[cell.start], f"{cell.step_factor:g}"]
        rows.append([*label, *[mean_and_deviation(v, quality.digits) for v in values]])
    return table(["initialisation", "decay", "start", "step size", "of 1", "of this", "difference"], rows)


def draw(runs: Runs, quality: Quality, title: str) -> Figure:
    """Draw quality by initialisation, the segment to the dense network, and effective ranks.

    The fourth panel shows quality against size where there is more than one rank or width, else the segment's quality.
    """
    first = next(cell for cell in runs if cell.init != "dense")
    same = {c: r for c, r in runs.items() if (c.width, c.rank, c.step_factor) == (first.width, first.rank, 1.0)}
    dense = runs[first.baseline]
    figure = Figure(figsize=(12, 8), layout="constrained")
    (left, path), (rank, right) = figure.subplots(2, 2)
    _draw_grid(left, same, dense, quality)
    _draw_paths(path, same, "loss", 1.0)
    path.set_ylabel("test loss")
    _draw_ranks(rank, same, dense)
    sizes = len({(cell.width, cell.rank) for cell in runs if cell.init != "dense"}) > 1
    if sizes:
        _draw_sizes(right, runs, quality)
    else:
        _draw_paths(right, same, quality.key.removeprefix("test_"), quality.scale)
        right.set_ylabel(quality.label)
    figure.suptitle(f"{title}, width {first.width}, rank {first.rank:g}" + (" (last panel: all)" if sizes else ""))
    return figure


def _draw_grid(ax: Axes, runs: Runs, dense: list[dict[str, Any]], quality: Quality) -> None:
    for index, (decay, start) in enumerate((d, s) for d in DECAYS for s in STARTS):
        for position, init in enumerate(INITS):
            mine = next((r for c, r in runs.items() if (c.init, c.decay, c.start) == (init, decay, start)), None)
            if mine is not None:
                values = torch.tensor([quality.of(r) for r in mine])
                ax.errorbar(
                    position + 0.12 * (index - 1.5),
                    values.mean(),
                    values.std() if len(values) > 1 else None,
                    fmt="o" if start == "pretrained" else "s",
                    color=f"C{list(DECAYS).index(decay)}",
                    markerfacecolor=None if start == "pretrained" else "white",
                    label=f"{DECAYS[decay]}, {STARTS[start]}",
                )
    values = torch.tensor([quality.of(r) for r in dense])
    ax.axhline(values.mean(), color="black", linestyle="--", label="dense")
    ax.set_xticks(range(len(INITS)), list(INITS.values()))
    ax.set(ylabel=quality.label, title="Initialisation, decay and pre-training")
    _legend_once(ax)


def _draw_paths(ax: Axes, runs: Runs, name: str, scale: float) -> None:
    """Draw the segments of networks with spectral initialisation."""
    for cell, mine in runs.items():
        if cell.init != "spectral":
            continue
        paths = [r["path"][0] for r in mine]
        curves = torch.tensor([p["loss"] if name == "loss" else p["metrics"][name] for p in paths]) * scale
        ax.plot(
            paths[0]["alphas"],
            curves.mean(0),
            "-" if cell.start == "pretrained" else "--",
            color=f"C{list(DECAYS).index(cell.decay)}",
            marker=".",
            label=f"{DECAYS[cell.decay]}, {STARTS[cell.start]}",
        )
    ax.set(xlabel="t: from the dense network (0) to the low-rank one (1)", title="Linear interpolation, spectral")
    ax.legend(fontsize="small")


def _draw_ranks(ax: Axes, runs: Runs, dense: list[dict[str, Any]]) -> None:
    """Draw effective ranks on the way, of networks with spectral initialisation."""
    for cell, mine in [*runs.items(), (None, dense)]:
        if cell is not None and cell.init != "spectral":
            continue
        steps = mine[0]["course"]["step"]
        style = {"color": "black", "linestyle": ":", "label": "dense"}
        if cell is not None:
            style = {
                "color": f"C{list(DECAYS).index(cell.decay)}",
                "linestyle": "-" if cell.start == "pretrained" else "--",
                "label": f"{DECAYS[cell.decay]}, {STARTS[cell.start]}",
            }
        ax.plot(steps, torch.tensor([r["course"]["mean"] for r in mine]).mean(0), **style)
    ax.set(xlabel="update", ylabel="effective rank, mean over layers", title="Effective rank, spectral", yscale="log")
    for formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        formatter("{x:g}")
    _legend_once(ax)


def _draw_sizes(ax: Axes, runs: Runs, quality: Quality) -> None:
    """Draw quality against parameters: dense networks, and spectral factors with Frobenius decay, by start and rank."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell, mine in runs.items():
        if cell.init == "dense":
            label = "dense"
        elif (cell.init, cell.decay, cell.step_factor) == ("spectral", "frobenius", 1.0):
            label = f"rank {cell.rank:g}, {STARTS[cell.start]}"
        else:
            continue
        mean = sum(quality.of(r) for r in mine) / len(mine)
        lines.setdefault(label, []).append((mine[0]["parameters"], mean))
    ranks = sorted({label.partition(",")[0] for label in lines if label != "dense"})
    for label, points in lines.items():
        style = {"color": "black", "linestyle": ":"}
        if label != "dense":
            style = {"color": f"C{2 + ranks.index(label.partition(',')[0])}"}
            style["linestyle"] = "--" if label.endswith(STARTS["scratch"]) else "-"
        ax.plot(*zip(*sorted(points), strict=True), marker=".", label=label, **style)
    ax.set(xlabel="parameters", ylabel=quality.label, title="Size, spectral with Frobenius decay", xscale="log")
    sizes = [size for size, _ in lines["dense"]]
    ax.set_xticks(sizes, [f"{size / 1000:.3g} k" for size in sizes])
    ax.xaxis.set_minor_formatter("")
    ax.legend(fontsize="small")


def _legend_once(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    ax.legend(once.values(), once.keys(), fontsize="small")
