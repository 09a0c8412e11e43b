"""Choice of the learning rates, table and figure of `prong_convnet.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from shared import mean_and_deviation, table

LABELS = {
    "momentum": "SGD",
    "rmsprop": "RMSprop",
    "batch_norm": "batch norm",
    "prong": "PRONG",
    "prong_plus": "PRONG+",
}
Runs = list[dict[str, Any]]
"""The results of one method and learning rate, one a seed."""


def best_rates(results: Runs, methods: Sequence[str]) -> dict[str, Runs]:
    """Return each method's runs with the learning rate of the lowest mean validation error at the end.

    Of equal ones that with the lowest training loss counts.
    """
    found = {}
    for method in methods:
        by_rate: dict[float, Runs] = {}
        for result in results:
            if result["method"] == method:
                by_rate.setdefault(result["rate"], []).append(result)
        found[method] = min(
            by_rate.values(), key=lambda runs: tuple(sum(r[n][-1] for r in runs) for n in ("val_error", "train_loss"))
        )
    return found


def mean_course(runs: Runs) -> dict[str, torch.Tensor]:
    """Return the means over the seeds of what was measured, as far as all have gone."""
    length = min(len(r["points"]) for r in runs)
    names = [name for name, value in runs[0].items() if isinstance(value, list)]
    return {name: torch.tensor([r[name][:length] for r in runs], dtype=torch.float64).mean(0) for name in names}


def summarise(best: dict[str, Runs]) -> str:
    """Return the table: training loss and validation error on the way, test error, and what it costs.

    The last columns say when the mean training loss was first as low as SGD's at the end, and how long an update takes.
    """
    courses = {method: mean_course(runs) for method, runs in best.items()}
    points = max((course["points"] for course in courses.values()), key=len)
    shown = sorted({-(-len(points) * part // 4) - 1 for part in (1, 2, 4)})
    goal = courses["momentum"]["train_loss"][-1].item() if "momentum" in courses else -math.inf
    rows = []
    for method, runs in best.items():
        course = courses[method]
        last = len(course["points"]) - 1  # of one that diverged
        cells = [LABELS[method], f"{runs[0]['rate']:g}"]
        cells += [f"{course['train_loss'][min(k, last)]:.3g}" for k in shown]
        for k in shown:
            cells.append(mean_and_deviation([100 * r["val_error"][min(k, last)] for r in runs], 2))
        cells.append(mean_and_deviation([100 * r["test_error"] for r in runs], 2))
        reached = ((course["train_loss"] <= goal) & course["train_loss"].isfinite()).nonzero().flatten().tolist()
        digits = {"points": 0, "seconds": 1}
        cells += [f"{course[name][reached[0]]:.{d}f}" if reached else "-" for name, d in digits.items()]
        cells.append(f"{1e3 * fmean(r['seconds'][-1] / r['points'][-1] for r in runs):.2f}")
        rows.append(cells)
    after = [f"{int(points[k])}" for k in shown]
    header = ["method", "learning rate", f"training loss, {after[0]} updates", *after[1:]]
    header += [f"validation error %, {after[0]}", *after[1:], "test error %"]
    return table([*header, "updates to SGD's loss", "seconds", "ms/update"], rows)


class PlainNumbers(LogFormatter):
    """Label a logarithmic axis by numbers as one writes them, between powers of ten where there are few of these."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw(best: dict[str, Runs], title: str) -> Figure:
    """Draw figure 4: training loss and validation error against updates and against seconds."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for method, runs in best.items():
        course, style = mean_course(runs), {"color": f"C{list(LABELS).index(method)}", "linewidth": 1.2}
        for row, y in zip(axes, (course["train_loss"], 100 * course["val_error"]), strict=True):
            for ax, x in zip(row, ("points", "seconds"), strict=True):
                ax.plot(course[x], y, **style, label=f"{LABELS[method]} ({runs[0]['rate']:g})")
    for row, name in zip(axes, ("training loss", "validation error %"), strict=True):
        row[0].set(ylabel=name, yscale="log")
        row[0].yaxis.set_major_formatter(PlainNumbers())
        row[0].yaxis.set_minor_formatter(PlainNumbers(minor_thresholds=(1.5, 0.5)))
    axes[1, 0].set(xlabel="updates")
    axes[1, 1].set(xlabel="seconds" if torch.cuda.is_available() else "CPU seconds, one thread")
    figure.suptitle(f"{title}, best learning rate of each method")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(best))
    return figure
