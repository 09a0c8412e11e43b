"""Table 4 and figure 5: does the training loss fall on the straight line from a network's initialisation to its end?

Trains networks of each kind with random hyper-parameters (standard, sigma-asymmetric, W-asymmetric, and where asked for
a control with the masks of W but small constants), and evaluates the training loss on the line from the initial weights
of each to the trained ones: without augmentation, on the same batches everywhere, with the label smoothing that the
network was trained with. Networks that diverged are left out and counted. Trained networks and evaluated lines are
kept, so that a run goes on where it was.

Expected with `--networks 120` (handwritten digits, seed 0): the loss of W-asymmetric networks falls faster where it
falls least (Delta -0.024 against -0.005, p = 1e-18) and lies below the chord more often (global convexity 0.83 against
0.45, p = 6e-21); sigma-asymmetric networks are less convex than standard ones, and the control does not differ from
them. 90, 98 and 97 % of the lines are monotonic (standard, sigma, W), where the paper has 26, 87 and 100 % (CIFAR-10).

    python recipes/monotonic_interpolation.py
    python recipes/monotonic_interpolation.py --networks 100 --kinds '[standard,sigma,w,control]'
    python recipes/monotonic_interpolation.py --config recipes/configs/cifar10_interpolation.yaml --data_dir DIR
    python recipes/monotonic_interpolation.py --shard 0/2    # and --shard 1/2 elsewhere, then once without
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from shared import UsageError, publish, quiet, run_jobs, run_script, stored, table, worker_count
from zoo_training import EVAL_BATCH_SIZE, LABELS, Kind, ZooSetting, image_tensors, train_zoos, zoo_table

import lightning_symmetry as ls
from lightning_symmetry.landscape.statistics import TITLES

GROUP = 10  # networks whose lines are evaluated at once, and kept in one file
# Table 4: 300 networks a kind on CIFAR-10; 24 of the sigma-asymmetric ones diverged.
PAPER = {
    "standard": (".079 ± .109", "26.3", ".548 ± .139", ".823 ± .229"),
    "sigma": (".004 ± .047", "87.3", ".675 ± .143", ".976 ± .098"),
    "w": ("-.027 ± .026", "100", ".769 ± .165", "1.00 ± .000"),
}
MOST_CONVEX_FIRST = ("w", "sigma", "standard")  # the paper's order, in all four columns


@dataclass
class Setting(ZooSetting):
    """Train zoos, evaluate the line from initialisation to end of each network, print the table and draw the figure.

    Args:
        num_points: Points on a line.
        shown: Lines of each kind in the figure: those that end in the lowest training loss.
    """

    num_points: int = 25
    shown: int = 20
    out_dir: str = "runs/monotonic_interpolation"


def measure(
    setting: Setting, kind: Kind, folder: Path, positions: Sequence[int], tick: Callable[[int], Any]
) -> dict[str, Any]:
    """Evaluate the lines of some networks of a zoo; from the recipe's folder, where that was done before.

    Args:
        setting: The setting.
        kind: Kind of the networks.
        folder: Folder of their zoo.
        positions: Positions in it.
        tick: Reports finished lines.
    """
    quiet()
    zoo = ls.Zoo.open(folder)
    chosen = zoo.select(positions)
    settings = {
        "kind": kind,
        "indices": chosen.indices.tolist(),
        "weights": [chosen.stored(place).sha256 for place in range(len(chosen))],
        "num_points": setting.num_points,
    }

    def evaluate() -> dict[str, Any]:
        images, labels = image_tensors(setting.data, setting.data_dir)["train"]
        batches = list(zip(images.split(EVAL_BATCH_SIZE), labels.split(EVAL_BATCH_SIZE), strict=True))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        places = range(len(chosen))
        results = ls.evaluate_paths(
            chosen.network(0).to(device),
            [chosen.initial(place).to(device) for place in places],
            [chosen.network(place).to(device) for place in places],
            batches,
            setting.num_points,
            label_smoothing=torch.from_numpy(chosen["label_smoothing"]),
            progress=False,
        )
        return {"paths": [result.to_dict() for result in results]}

    name = f"{zoo.path.name}/{positions[0]:05d}.json"
    result = stored(Path(setting.out_dir) / "lines" / name, settings, evaluate)
    tick(len(positions))
    return result


def measure_lines(setting: Setting, zoos: dict[Kind, ls.Zoo]) -> dict[Kind, list[ls.PathResult]]:
    """Return the lines of the networks of each kind that did not diverge."""
    jobs = []
    for kind, zoo in zoos.items():
        good = np.flatnonzero(zoo["status"] == "ok").tolist()
        groups = [good[first : first + GROUP] for first in range(0, len(good), GROUP)]
        jobs += [{"setting": setting, "kind": kind, "folder": zoo.path, "positions": group} for group in groups]
    total = sum(len(job["positions"]) for job in jobs)
    workers = min(worker_count(setting.workers), len(jobs))
    found = run_jobs(measure, jobs, total, workers, f"{total} lines of {setting.num_points} points", "line")
    lines: dict[Kind, list[ls.PathResult]] = {kind: [] for kind in zoos}
    for result in found:
        for path in result["paths"]:
            curve = (torch.tensor(path[name], dtype=torch.float64) for name in ("alphas", "loss"))
            lines[result["kind"]].append(ls.PathResult(*curve))
    return lines


def summarise(statistics: ls.PathStatistics, diverged: Mapping[Kind, int]) -> str:
    """Return Table 4 with the paper's values beside ours."""
    rows = []
    for kind, found in statistics.kinds.items():
        cells = []
        for measure, paper in zip(TITLES, PAPER.get(kind, ("-",) * len(TITLES)), strict=True):
            mean, deviation = found.mean[measure], found.deviation[measure]
            ours = f"{mean:.1f}" if measure == "percent_monotonic" else f"{mean:.3f} ± {deviation:.3f}"
            cells += [ours, paper]
        rows.append([LABELS[kind], f"{found.number}", f"{diverged[kind] + found.left_out}", *cells])
    header = ["network", "number", "diverged"]
    return table([*header, *(name for label in TITLES.values() for name in (label, "paper"))], rows)


def p_value_table(statistics: ls.PathStatistics) -> str:
    """Return the p-values of the differences from standard networks; the paper's are all below .001."""
    rows = [
        [LABELS[kind], *(_p_value(found.p_value[measure]) for measure in TITLES)]
        for kind, found in statistics.kinds.items()
        if kind != statistics.reference
    ]
    return table([f"p, against {LABELS[statistics.reference]}", *TITLES.values()], rows)


def _p_value(value: float) -> str:
    if math.isnan(value):
        return "-"  # neither kind has any spread
    return f"{value:.3f}" if value >= 1e-3 else f"{value:.0e}"


def order_table(statistics: ls.PathStatistics) -> str:
    """Return the order of the kinds by each measure, the one most like a convex problem first, and the paper's."""
    kinds = [kind for kind in MOST_CONVEX_FIRST if kind in statistics.kinds]
    rows = []
    for measure, label in TITLES.items():
        sign = 1 if measure == "max_increase" else -1  # Delta is best when it is low
        value = {kind: sign * statistics[kind].mean[measure] for kind in kinds}
        order = sorted(kinds, key=value.__getitem__)
        words = LABELS[order[0]]
        for before, after in pairwise(order):
            words += f" {'=' if value[before] == value[after] else '>'} {LABELS[after]}"
        ties = len(set(value.values())) < len(kinds)
        agrees = "agrees" + (", but for a tie" if ties else "") if order == kinds else "differs"
        rows.append([label, words, " > ".join(LABELS[kind] for kind in kinds), agrees])
    return table(["more like convex", "ours", "paper", ""], rows)


def draw(setting: Setting, statistics: ls.PathStatistics) -> Figure:
    """Draw figure 5."""
    figure = statistics.plot(setting.shown)
    for ax, (kind, found) in zip(figure.axes, statistics.kinds.items(), strict=True):
        ax.set_title(f"{LABELS[kind]}: {found.mean['percent_monotonic']:.0f} % monotonic")
    figure.suptitle(
        f"Training loss from initialisation (0) to end (1), {setting.data}, the {setting.shown} lowest at 1"
    )
    return figure


def main(setting: Setting) -> ls.PathStatistics | None:
    """Run the recipe and return the statistics; None where there is nothing to do but to train a shard."""
    quiet()
    if setting.num_points < 3 or setting.shown < 1:
        raise UsageError(
            "Give at least 3 `num_points`, of which one is inside a line, and at least 1 line to be `shown`; got "
            f"{setting.num_points} and {setting.shown}."
        )
    if (zoos := train_zoos(setting)) is None:
        return None
    diverged = {kind: int((zoo["status"] != "ok").sum()) for kind, zoo in zoos.items()}
    lines, out = measure_lines(setting, zoos), Path(setting.out_dir)
    try:
        statistics = ls.path_statistics(lines, "standard" if "standard" in lines else setting.kinds[0])
    except ValueError as error:  # fewer than two networks
        raise UsageError(f"{error} Train more `networks`.") from None
    texts = {"table 4": summarise(statistics, diverged)}
    if len(lines) > 1:
        texts |= {"p-values": p_value_table(statistics), "order": order_table(statistics)}
    texts["training"] = zoo_table(zoos)
    content = {"setting": asdict(setting), "statistics": statistics.to_dict(), "diverged": diverged}
    content["lines"] = {kind: [line.to_dict() for line in found] for kind, found in lines.items()}
    publish(out, "monotonic_interpolation", draw(setting, statistics), texts, content)
    print(f"\nLines from initialisation to end, {setting.data}, mean ± deviation:\n")
    print("\n\n".join(texts[name] for name in ("table 4", "p-values", "order") if name in texts))
    print("\nThe paper: 300 networks a kind on CIFAR-10.")
    print(f"Figure: {out / 'monotonic_interpolation.png'}\nTensorBoard: tensorboard --logdir {out}")
    return statistics


if __name__ == "__main__":
    run_script(main, Setting)
