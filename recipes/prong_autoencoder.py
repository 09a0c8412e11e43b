"""Figure 3 of Natural Neural Networks: training a deep autoencoder with PRONG and with other optimizers.

Every method gets the same number of learning rates, batch sizes and updates; those with the lowest training error at
the end count. Then PRONG's best training is repeated with other dampings (eps) and intervals (T), and from an
initialisation that is not whitened. Errors are half the squared error of an image, over the first 10,000 training
images; seconds are CPU seconds of one thread, without the time to evaluate. Finished trainings lie in the folder of the
results and are not repeated.

    python recipes/prong_autoencoder.py
    python recipes/prong_autoencoder.py --config recipes/configs/mnist_autoencoder.yaml --data_dir DIR
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from autoencoder_training import Data, Method, Training, make_data, run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared import mean_and_deviation, publish, quiet, run_jobs, run_script, table, worker_count

LABELS = {
    "sgd": "SGD",
    "momentum": "SGD, momentum 0.9",
    "rmsprop": "RMSprop",
    "adam": "Adam",
    "batch_norm": "batch norm, momentum 0.9",
    "center": "centring, momentum 0.9",
    "prong": "PRONG, momentum 0.9",
    "prong_plus": "PRONG+, momentum 0.9",
}
Result = dict[str, Any]


@dataclass
class Setting:
    """Train the autoencoder with each method, learning rate and batch size, and compare the best of each.

    Args:
        methods: Optimizers; "center" is PRONG that centres only, "batch_norm" another network.
        learning_rates: Learning rates of SGD, with and without momentum, batch norm, centring and PRONG.
        adaptive_rates: Those of RMSprop and Adam, as many.
        batch_sizes: Batch sizes.
        seeds: Number of seeds, from ``seed`` on. The first one serves the search, the others the best of each method.
        seed: First seed, of initialisation and order of the data.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        hidden: Widths of the encoder.
        steps: Updates of each training.
        num_points: Number of times that the training error is measured.
        every_n_steps: Updates between two reparametrisations (T).
        num_samples: Samples of the statistics (N_s).
        eps: Damping of the whitening; well below the variance of the activations, or nothing is whitened.
        ema: Weight of the past in a moving average of the statistics; null: none.
        whiten_at_init: Whether PRONG whitens before the first update.
        eps_values: Dampings to try with PRONG's best learning rate and those around it (figure 3a); may be empty.
        intervals: Intervals to try, with and without whitened initialisation (figure 3b); may be empty.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for results and figures.
    """

    methods: list[Method] = field(default_factory=lambda: list(LABELS))
    learning_rates: list[float] = field(default_factory=lambda: [0.3, 0.1, 0.03])
    adaptive_rates: list[float] = field(default_factory=lambda: [1e-2, 3e-3, 1e-3])
    batch_sizes: list[int] = field(default_factory=lambda: [128])
    seeds: int = 1
    seed: int = 0
    data: Data = "digits"
    data_dir: str = "data"
    hidden: list[int] = field(default_factory=lambda: [128, 64, 32, 10])
    steps: int = 1000
    num_points: int = 10
    every_n_steps: int = 100
    num_samples: int = 128
    eps: float = 0.01
    ema: float | None = None
    whiten_at_init: bool = True
    eps_values: list[float] = field(default_factory=lambda: [0.1, 0.01, 0.001])
    intervals: list[int] = field(default_factory=lambda: [10, 100, 1000])
    workers: int | None = None
    out_dir: str = "runs/prong_autoencoder"


def search_of(setting: Setting, method: Method) -> list[Training]:
    """Return the trainings among which a method's best is searched."""
    rates = setting.adaptive_rates if method in ("adam", "rmsprop") else setting.learning_rates
    names = ("every_n_steps", "num_samples", "eps", "ema", "whiten_at_init")
    whitening = {name: getattr(setting, name) for name in names} if method in ("center", "prong", "prong_plus") else {}
    points = tuple(round(setting.steps * k / setting.num_points) for k in range(setting.num_points + 1))
    return [
        Training(method, rate, batch, setting.seed, setting.data, tuple(setting.hidden), points, **whitening)
        for rate, batch in product(rates, setting.batch_sizes)
    ]


def around(rate: float, rates: Sequence[float]) -> list[float]:
    """Return a learning rate and its neighbours in a search."""
    rates = sorted(rates)
    at = rates.index(rate)
    return rates[max(0, at - 1) : at + 2]


def best_of(results: Sequence[Result]) -> Result:
    """Return the training with the lowest error at the end."""
    return min(results, key=lambda result: result["errors"][-1])


def train_all(setting: Setting, trainings: Sequence[Training], what: str) -> list[Result]:
    """Run trainings, those that are there twice once."""
    workers = worker_count(setting.workers)
    each = list(dict.fromkeys(trainings))
    jobs = [{"training": one, "data_dir": setting.data_dir, "out_dir": setting.out_dir} for one in each]
    found = run_jobs(run, jobs, len(jobs) * setting.num_points, workers, f"{len(jobs)} {what}", unit="point")
    by_training = dict(zip(each, found, strict=True))
    return [by_training[one] for one in trainings]


def as_training(result: Result) -> Training:
    """Return what a result was made with."""
    values = {name: result[name] for name in Training.__dataclass_fields__}
    return Training(**values | {"hidden": tuple(values["hidden"]), "points": tuple(values["points"])})


def summarise(best: dict[Method, list[Result]]) -> str:
    """Return the table: training error after so many updates, and what an update costs."""
    points = next(iter(best.values()))[0]["points"]
    shown = [len(points) // 4, len(points) // 2, 3 * len(points) // 4, len(points) - 1]
    rows = []
    for method, runs in best.items():
        errors = [mean_and_deviation([r["errors"][k] for r in runs], 2) for k in shown]
        cost = sum(r["seconds"][-1] / r["points"][-1] for r in runs) / len(runs)
        rows.append([LABELS[method], f"{runs[0]['rate']:g}", f"{runs[0]['batch_size']}", *errors, f"{1e3 * cost:.2f}"])
    header = ["method", "learning rate", "batch", *[f"{points[k]} updates" for k in shown], "CPU ms/update"]
    return table(header, rows)


def summarise_sensitivity(dampings: Sequence[Result], intervals: Sequence[Result]) -> str:
    """Return the tables of figures 3a and 3b: training error at the end."""
    parts = []
    if dampings:
        rates = sorted({r["rate"] for r in dampings})
        rows = []
        for eps in dict.fromkeys(r["eps"] for r in dampings):
            errors = {r["rate"]: r["errors"][-1] for r in dampings if r["eps"] == eps}
            rows.append([f"{eps:g}", *[f"{errors[rate]:.2f}" for rate in rates]])
        parts.append(table(["eps", *[f"learning rate {rate:g}" for rate in rates]], rows))
    if intervals:
        rows = []
        for interval in dict.fromkeys(r["every_n_steps"] for r in intervals):
            runs = {r["whiten_at_init"]: r for r in intervals if r["every_n_steps"] == interval}
            cost = 1e3 * runs[True]["seconds"][-1] / runs[True]["points"][-1]
            rows.append([f"{interval}", *[f"{runs[kind]['errors'][-1]:.2f}" for kind in (True, False)], f"{cost:.2f}"])
        parts.append(table(["T", "whitened initialisation", "fan-in", "CPU ms/update"], rows))
    return "\n\n".join(parts)


def draw(setting: Setting, best: dict[Method, list[Result]], dampings: list[Result], intervals: list[Result]) -> Figure:
    """Draw figure 3: sensitivity above, where there is any, and below the error against updates and CPU seconds."""
    rows = 2 if dampings or intervals else 1
    figure = Figure(figsize=(11, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    if rows == 2:
        draw_sensitivity(axes[0, 0], axes[0, 1], dampings, intervals)
    for method, runs in best.items():
        error = torch.tensor([r["errors"] for r in runs]).mean(0)
        seconds = torch.tensor([r["seconds"] for r in runs]).mean(0)
        for ax, x in zip(axes[-1], (runs[0]["points"], seconds), strict=True):
            ax.plot(x, error, marker="o", markersize=2, label=f"{LABELS[method]} ({runs[0]['rate']:g})")
    axes[-1, 0].set_title("best of each method (learning rate)")
    axes[-1, 1].set_title("the same by time")
    for ax in axes.flat:
        ax.set(xlabel="updates", ylabel="training error", yscale="log")
    axes[-1, 1].set_xlabel("CPU seconds, one thread")
    axes[-1, 0].legend(fontsize="x-small")
    figure.suptitle(f"autoencoder on {setting.data}")
    return figure


def draw_sensitivity(left: Axes, right: Axes, dampings: list[Result], intervals: list[Result]) -> None:
    """Draw figures 3a and 3b. As there, what does not learn (ends above the error of the start) is left out."""
    dampings, intervals = ([r for r in part if r["errors"][-1] < r["errors"][0]] for part in (dampings, intervals))
    styles = dict(zip(sorted({r["rate"] for r in dampings}), (":", "--", "-"), strict=False))
    colours = {eps: f"C{k}" for k, eps in enumerate(sorted({r["eps"] for r in dampings}))}
    for r in dampings:
        label = f"eps {r['eps']:g}, rate {r['rate']:g}"
        left.plot(r["points"], r["errors"], styles[r["rate"]], color=colours[r["eps"]], label=label)
    colours = {interval: f"C{k}" for k, interval in enumerate(sorted({r["every_n_steps"] for r in intervals}))}
    for r in intervals:
        style, label = ("-", f"T {r['every_n_steps']}") if r["whiten_at_init"] else ("--", "the same, fan-in")
        right.plot(r["points"], r["errors"], style, color=colours[r["every_n_steps"]], label=label)
    for ax, title in ((left, "PRONG: damping"), (right, "PRONG: interval and initialisation")):
        ax.set_title(title)
        if ax.lines:
            ax.legend(fontsize="x-small")


def main(setting: Setting) -> dict[str, Any]:
    """Run the recipe and return its results."""
    quiet()
    make_data(setting.data, setting.data_dir, setting.batch_sizes[0]).prepare_data()
    search = [training for method in setting.methods for training in search_of(setting, method)]
    found = train_all(setting, search, f"autoencoders on {setting.data}")
    best = {method: [best_of([r for r in found if r["method"] == method])] for method in setting.methods}
    winners = [as_training(runs[0]) for runs in best.values()]
    if setting.seeds > 1:
        seeds = range(setting.seed + 1, setting.seed + setting.seeds)
        again = [replace(one, seed=seed) for one in winners for seed in seeds]
        for result in train_all(setting, again, "of them with other seeds"):
            best[result["method"]].append(result)
    dampings, intervals = [], []
    if "prong" in best and (setting.eps_values or setting.intervals):
        tuned = as_training(best["prong"][0])
        pairs = product(setting.eps_values, around(tuned.rate, setting.learning_rates))
        others = [replace(tuned, eps=eps, rate=rate) for eps, rate in pairs]
        pairs = product(setting.intervals, (True, False))
        others += [replace(tuned, every_n_steps=interval, whiten_at_init=white) for interval, white in pairs]
        results = train_all(setting, others, "more of PRONG")
        dampings, intervals = results[: -2 * len(setting.intervals) or None], results[-2 * len(setting.intervals) :]
        intervals = intervals if setting.intervals else []
    out = Path(setting.out_dir)
    texts = {"table": summarise(best), "sensitivity": summarise_sensitivity(dampings, intervals)}
    content = {"setting": asdict(setting), "results": found, "best": best, "eps": dampings, "intervals": intervals}
    publish(out, "prong_autoencoder", draw(setting, best, dampings, intervals), texts, content)
    print(
        f"\nTraining error, autoencoder on {setting.data}, {setting.seeds} seed(s), the best of each method's search:\n"
    )
    print("\n\n".join(text for text in texts.values() if text))
    print(f"\nFigure: {out / 'prong_autoencoder.png'}\nTensorBoard: tensorboard --logdir {out}")
    return content


if __name__ == "__main__":
    run_script(main, Setting)
