"""Table and figure of ``metanetworks.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared import mean_and_deviation, table
from zoo_training import LABELS

NAMES = {
    "mlp": "MLP",
    "dmc": "DMC",
    "deepsets": "DeepSets",
    "deepsets_by_tensor": "DeepSets by tensor",
    "statnn": "StatNN",
    "graph": "Graph",
}
# Tables 3 and 9: R^2, tau, learning rate and parameters, with 10,000 networks a kind on CIFAR-10 and 5 runs.
PAPER = {
    ("standard", "mlp"): ("-.171 ± .11", ".311 ± .02", "1e-4", "4,994,945"),
    ("standard", "dmc"): (".950 ± .01", ".787 ± .02", "1e-3", "105,357"),
    ("standard", "deepsets"): (".855 ± .01", ".617 ± .03", "1e-2", "8,897"),
    ("standard", "statnn"): (".976 ± .00", ".866 ± .00", "1e-3", "119,297"),
    ("w", "mlp"): (".594 ± .12", ".864 ± .01", "1e-4", "3,880,833"),
    ("w", "dmc"): (".967 ± .01", ".911 ± .01", "5e-3", "105,357"),
    ("w", "deepsets"): (".936 ± .00", ".858 ± .00", "5e-3", "8,897"),
    ("w", "statnn"): (".978 ± .00", ".935 ± .01", "1e-2", "119,297"),
}
Results = list[dict[str, Any]]


def by_pair(results: Results) -> dict[tuple[str, str], Results]:
    """Return the runs of each metanetwork on each zoo."""
    found: dict[tuple[str, str], Results] = {}
    for result in results:
        found.setdefault((result["kind"], result["metanetwork"]), []).append(result)
    return found


def results_table(results: Results) -> str:
    """Return Table 3: mean and deviation over the runs, with the paper's values."""
    rows = []
    for (kind, name), runs in by_pair(results).items():
        r2, tau, rate, parameters = PAPER.get((kind, name), ("-",) * 4)
        measured = [mean_and_deviation([run[key] for run in runs]) for key in ("test_r2", "test_kendall")]
        chosen = [f"{runs[0]['parameters']:,}", parameters, f"{runs[0]['learning_rate']:g}", rate]
        rows.append([LABELS.get(kind, kind), NAMES[name], measured[0], r2, measured[1], tau, *chosen])
    header = ["networks", "metanetwork", "R^2", "paper", "tau", "paper", "parameters", "paper"]
    return table([*header, "learning rate", "paper"], rows)


def draw(results: Results) -> Figure:
    """Draw R^2 and tau of all, and for each metanetwork and zoo predicted against true accuracy in the first run."""
    pairs = by_pair(results)
    kinds, names = (list(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
    figure = Figure(figsize=(max(8, 2.4 * len(names)), 3 + 2.4 * len(kinds)), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3, 2.4 * len(kinds)])
    for ax, (key, title) in zip(top.subplots(1, 2), (("test_r2", "R²"), ("test_kendall", "Kendall's τ")), strict=True):
        _draw_bars(ax, pairs, kinds, names, key)
        ax.set_title(f"{title} on test networks, mean and deviation over runs", fontsize="small")
    for row, kind in zip(bottom.subplots(len(kinds), len(names), squeeze=False), kinds, strict=True):
        for ax, name in zip(row, names, strict=True):
            _draw_scatter(ax, pairs[kind, name][0])
            ax.set_title(f"{NAMES[name]}, {LABELS.get(kind, kind)}", fontsize="small")
        row[0].set_ylabel("predicted accuracy")
    bottom.supxlabel("true test accuracy", fontsize="small")
    return figure


def _draw_bars(ax: Axes, pairs: dict[tuple[str, str], Results], kinds: list[str], names: list[str], key: str) -> None:
    width = 0.8 / len(kinds)
    for place, kind in enumerate(kinds):
        values = [[run[key] for run in pairs[kind, name]] for name in names]
        at = np.arange(len(names)) + (place - (len(kinds) - 1) / 2) * width
        deviations = [np.std(found, ddof=1) if len(found) > 1 else 0 for found in values]
        ax.bar(at, [np.mean(found) for found in values], width, yerr=deviations, label=LABELS.get(kind, kind))
    ax.set_xticks(range(len(names)), [NAMES[name].replace(" ", "\n", 1) for name in names], fontsize="small")
    ax.set_ylim(bottom=max(-1.0, min(0.0, ax.get_ylim()[0])), top=1.0)
    ax.axhline(0, color="black", linewidth=0.5)
    ax.legend(fontsize="small")


def _draw_scatter(ax: Axes, run: dict[str, Any]) -> None:
    true, predicted = np.array(run["true"]), np.array(run["predicted"])
    ax.scatter(true, predicted, s=6, alpha=0.5)
    ends = [true.min(), true.max()]
    ax.plot(ends, ends, color="black", linewidth=0.7)
    margin = 0.3 * (ends[1] - ends[0])
    ax.set_ylim(ends[0] - margin, ends[1] + margin)  # what is told far beside the truth is clipped
    ax.annotate(f"R² {run['test_r2']:.2f}", (0.05, 0.9), xycoords="axes fraction", fontsize="small")
