"""Table 1 and figure 3: are independently trained networks connected by a straight line of low loss?

Trains pairs of networks from different seeds (standard, sigma-asymmetric, W-asymmetric, and a control with the same
masks but small constants) and evaluates the loss on the segment between the two of each pair; for standard ones also
after the hidden units of the first were permuted to match the second (Git Re-Basin).

Expected on the default (handwritten digits, 3 pairs, seed 0, about 90 s on 2 cores): midpoint barrier of the test loss
0.33 for standard and for the control, 0.04 after alignment, 0.27 for sigma, 0.004 for W.

    python recipes/linear_mode_connectivity.py
    python recipes/linear_mode_connectivity.py --config recipes/configs/mnist_mlp.yaml --data_dir DIR
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from shared import Ticks, fit, mean_and_deviation, publish, quiet, run_jobs, run_script, save_json, table

import lightning_symmetry as ls

Kind = Literal["standard", "rebasin", "sigma", "w", "control"]
LABELS = {
    "standard": "Standard",
    "rebasin": "Git Re-Basin",
    "sigma": "sigma-Asym",
    "w": "W-Asym",
    "control": "W masks, small kappa",
}
# Table 1: test loss barrier at the midpoint, at least 5 pairs.
PAPER = {
    "MLP (MNIST)": {"standard": "0.188 ± .12", "rebasin": "-0.006 ± .00", "sigma": "0.117 ± .01", "w": "-0.012 ± .00"},
    "ResNet (CIFAR-10)": {
        "standard": "3.287 ± .32",
        "rebasin": "2.041 ± .21",
        "sigma": "2.521 ± .46",
        "w": "0.934 ± .72",
    },
    "ResNet 8x width (CIFAR-10)": {
        "standard": "2.640 ± .24",
        "rebasin": "0.509 ± .45",
        "sigma": "1.492 ± .15",
        "w": "0.031 ± .05",
    },
    "GNN (ogbn-arXiv)": {
        "standard": "1.475 ± .24",
        "rebasin": "0.269 ± .02",
        "sigma": "0.901 ± .11",
        "w": "0.095 ± .03",
    },
}


@dataclass
class Setting:
    """Train pairs of networks, measure the segments between them, print the table and draw the figure.

    Args:
        kinds: Kinds of networks; "rebasin" is the standard pairs after alignment.
        pairs: Pairs of each kind. Networks of pair p have the training seeds seed + 2 p and seed + 2 p + 1, and the
            asymmetry seed seed + p.
        seed: First seed.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        network: Network.
        width: Width of the MLP's hidden layers or the GNN, multiplier for the ResNet.
        preset: Asymmetry preset of W-asymmetric networks.
        overrides: Asymmetry settings of single layers, after the preset's.
        sigma_scale: Scale of FiGLU's F in sigma-asymmetric networks.
        control_kappa: Standard deviation of the control's constants.
        epochs: Epochs of each training.
        batch_size: Batch size; graphs are trained as a whole.
        learning_rate: Peak learning rate of AdamW.
        sigma_learning_rate: The same for sigma-asymmetric networks; default as for the others.
        weight_decay: Weight decay of AdamW.
        warmup_epochs: Epochs until the peak learning rate.
        warmup_start: First learning rate as a fraction of the peak.
        warmup_shape: Shape of the warm-up.
        align: How Git Re-Basin matches the units.
        num_points: Points on the segment.
        batch_norm: Running statistics on the segment.
        exchanges: Pairs of units of each layer that are exchanged to measure how asymmetric a network is in practice
            (on up to 1,000 test samples); 0 for none.
        devices: Devices of each training; more than one runs the trainings one after the other.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for TensorBoard logs, weights, results and the figure.
        paper: Row of the paper's Table 1 to print beside.
    """

    kinds: list[Kind] = field(default_factory=lambda: ["standard", "rebasin", "sigma", "w", "control"])
    pairs: int = 3
    seed: int = 0
    data: Literal[
        "digits", "digits_graph", "mnist", "fashion_mnist", "cifar10", "cifar100", "cora", "citeseer", "arxiv"
    ] = "digits"
    data_dir: str = "data"
    network: Literal["mlp", "resnet20", "gnn"] = "mlp"
    width: int = 256
    preset: str = "mlp-digits"
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    sigma_scale: float = 1.0
    control_kappa: float = 0.02
    epochs: int = 40
    batch_size: int = 64
    learning_rate: float = 1e-3
    sigma_learning_rate: float | None = None
    weight_decay: float = 0.01
    warmup_epochs: int = 0
    warmup_start: float = 0.01
    warmup_shape: Literal["linear", "exponential"] = "linear"
    align: Literal["weights", "activations"] = "weights"
    num_points: int = 25
    batch_norm: Literal["keep", "recompute", "repair"] = "keep"
    exchanges: int = 20
    devices: int = 1
    workers: int | None = None
    out_dir: str = "runs/linear_mode_connectivity"
    paper: str = "MLP (MNIST)"


def make_data(setting: Setting) -> pl.LightningDataModule:
    """Return the data module."""
    if setting.data == "digits":
        return ls.DigitsData(setting.batch_size)
    if setting.data == "digits_graph":
        return ls.DigitsGraph()
    if setting.data in ("cora", "citeseer"):
        return ls.PlanetoidData({"cora": "Cora", "citeseer": "CiteSeer"}[setting.data], setting.data_dir)
    if setting.data == "arxiv":
        return ls.ArxivData(setting.data_dir)
    return ls.VisionData(setting.data, setting.data_dir, setting.batch_size)


def make_network(setting: Setting, data: Any) -> torch.nn.Module:
    """Return the standard network for the data."""
    if setting.network == "gnn":
        return ls.GNN(data.num_features, data.num_classes, setting.width)
    channels, height, width = data.input_shape
    if setting.network == "mlp":
        return ls.MLP(channels * height * width, (setting.width,) * 3, data.num_classes)
    return ls.ResNet20(width=setting.width, num_classes=data.num_classes, in_channels=channels)


def asymmetry(setting: Setting, kind: Kind) -> dict[str, Any] | None:
    """Return the arguments of ``asymmetrize`` for a kind of network."""
    if kind in ("standard", "rebasin"):
        return None
    if kind == "sigma":
        return {"method": "sigma", "scale": setting.sigma_scale}
    overrides = {pattern: dict(values) for pattern, values in setting.overrides.items()}
    if kind == "control":
        for pattern in {**ls.PRESETS[setting.preset].get("overrides", {}), **overrides}:
            overrides[pattern] = {**overrides.get(pattern, {}), "kappa": setting.control_kappa}
        return {"preset": setting.preset, "overrides": overrides, "kappa": setting.control_kappa}
    return {"preset": setting.preset, "overrides": overrides}


def train(
    setting: Setting,
    kind: Kind,
    folder: Path,
    seed: int,
    asymmetry_seed: int,
    callbacks: list[pl.Callback],
) -> pl.LightningModule:
    """Train one network, save its weights and return it."""
    pl.seed_everything(seed, verbose=False)
    data = make_data(setting)
    data.prepare_data()
    data.setup("fit")
    net = make_network(setting, data)
    rate = setting.sigma_learning_rate if kind == "sigma" else None
    training: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=rate or setting.learning_rate, weight_decay=setting.weight_decay)
    }
    if setting.warmup_epochs:
        training["scheduler"] = partial(
            ls.warmup, steps=setting.warmup_epochs, start=setting.warmup_start, shape=setting.warmup_shape
        )
    transform = asymmetry(setting, kind)
    if transform is None:
        module = ls.SupervisedModule(net, **training)
    else:
        module = ls.AsymmetricModule(net, **transform, asymmetry_seed=asymmetry_seed, **training)
    fit(module, data, folder, setting.epochs, callbacks, setting.devices)
    return module


def train_pair(setting: Setting, kind: Kind, pair: int, tick: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Train a pair of networks and measure the segments between them on test and training data.

    Standard networks have a second result, after alignment, where the setting asks for it.
    """
    quiet()
    seeds = setting.seed + 2 * pair, setting.seed + 2 * pair + 1
    folder = Path(setting.out_dir) / kind / f"pair{pair}"
    run = partial(train, setting, kind, asymmetry_seed=setting.seed + pair)
    first = run(folder=folder / "a", seed=seeds[0], callbacks=[Ticks(tick)])
    paths = {
        (result, split): ls.LinearInterpolation(
            first,
            setting.num_points,
            split,
            setting.batch_norm,
            setting.align if result == "rebasin" else None,
            name=f"{'aligned' if result == 'rebasin' else 'interpolation'}_{split}",
            progress=False,
        )
        for result in measured(setting, kind)
        for split in ("test", "train")
    }
    run(folder=folder / "b", seed=seeds[1], callbacks=[Ticks(tick), *paths.values()])
    asymmetry = effective_asymmetry(setting, first.net) if setting.exchanges else None
    results = []
    for name in measured(setting, kind):
        result = {split: paths[name, split].result.to_dict() for split in ("test", "train")}
        result.update(kind=name, pair=pair, seeds=seeds, distance=paths[name, "test"].distance)
        result["effective_asymmetry"] = asymmetry
        if (alignment := paths[name, "test"].alignment) is not None:
            result["alignment"] = {"before": alignment.before, "after": alignment.after, "seconds": alignment.seconds}
        results.append(result)
    save_json(folder / "result.json", results)
    return results


def effective_asymmetry(setting: Setting, net: torch.nn.Module) -> float:
    """Return the mean absolute change of the test loss when two hidden units are exchanged, constants staying put."""
    data = make_data(setting)
    data.setup("test")
    batches, count = [], 0
    for batch in data.eval_dataloader("test"):
        batches.append(batch)
        count += len(batch[1]) if isinstance(batch, tuple | list) else 1000
        if count >= 1000:
            break
    graph = hasattr(batches[0], "edge_index")
    found = ls.effective_asymmetry(
        net,
        batches,
        pairs=setting.exchanges,
        step=ls.graph_step("test_mask") if graph else ls.supervised_step,
        progress=False,
    )
    return sum(found.mean.values()) / len(found.mean)


def measured(setting: Setting, kind: Kind) -> list[Kind]:
    """Return the kinds of results that training a pair of a kind gives."""
    wanted = ["standard", "rebasin"] if kind == "standard" else [kind]
    return [result for result in wanted if result in setting.kinds]


def end_points(results: list[dict[str, Any]], split: str) -> list[float]:
    """Return the accuracies in percent of all trained networks."""
    curves = [result[split]["metrics"]["accuracy"] for result in results]
    return [100 * value for curve in curves for value in (curve[0], curve[-1])]


def summarise(setting: Setting, results: list[dict[str, Any]]) -> str:
    """Return Table 1's row with the paper's values beside, distances and train/test gaps."""
    rows = []
    for kind in setting.kinds:
        mine = [result for result in results if result["kind"] == kind]
        test, train = end_points(mine, "test"), end_points(mine, "train")
        rows.append(
            [
                LABELS[kind],
                mean_and_deviation([r["test"]["midpoint_barrier"] for r in mine]),
                PAPER[setting.paper].get(kind, "-"),
                mean_and_deviation([r["train"]["midpoint_barrier"] for r in mine]),
                mean_and_deviation(test, 1),
                f"{min(test):.1f}",
                mean_and_deviation([a - b for a, b in zip(train, test, strict=True)], 1),
                f"{sum(r['distance'] for r in mine) / len(mine):.2e}",
                "-" if not setting.exchanges else f"{sum(r['effective_asymmetry'] for r in mine) / len(mine):.1e}",
            ]
        )
    header = [
        "network",
        "test barrier",
        f"paper, {setting.paper}",
        "train barrier",
        "test accuracy %",
        "lowest %",
        "train - test %",
        "distance/parameter",
        "exchange of units",
    ]
    return table(header, rows)


def draw(setting: Setting, results: list[dict[str, Any]]) -> Figure:
    """Draw figure 3's panel: loss along the segment, mean and standard deviation over pairs."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for ax, split in zip(figure.subplots(1, 2), ("test", "train"), strict=True):
        for kind in setting.kinds:
            curves = [(r[split]["alphas"], r[split]["loss"]) for r in results if r["kind"] == kind]
            alphas = torch.tensor(curves[0][0])
            loss = torch.tensor([curve for _, curve in curves])
            mean, deviation = loss.mean(0), loss.std(0, correction=0)
            (line,) = ax.plot(alphas, mean, label=LABELS[kind])
            ax.fill_between(alphas, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set(
            xlabel=r"$\alpha$: from network a (0) to network b (1)",
            ylabel=f"{split} loss",
            title=f"{setting.network} on {setting.data}, {split}",
        )
        ax.set_ylim(bottom=0)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(setting.kinds))
    return figure


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all pairs."""
    quiet()
    if setting.paper not in PAPER:
        raise ValueError(f"Expected `paper` to be one of {sorted(PAPER)} but got {setting.paper!r}.")
    workers = setting.workers
    if workers is None:
        alone = torch.cuda.is_available() or setting.devices > 1
        workers = 0 if alone else min(len(os.sched_getaffinity(0)), len(setting.kinds) * setting.pairs)
    make_data(setting).prepare_data()
    trained = list(dict.fromkeys("standard" if kind == "rebasin" else kind for kind in setting.kinds))
    jobs = [{"setting": setting, "kind": kind, "pair": pair} for pair in range(setting.pairs) for kind in trained]
    label = f"{2 * len(jobs)} networks on {setting.data}"
    found = run_jobs(train_pair, jobs, 2 * setting.epochs * len(jobs), workers, label)
    results = [result for pair in found for result in pair]
    text, figure, out = summarise(setting, results), draw(setting, results), Path(setting.out_dir)
    publish(out, "linear_mode_connectivity", figure, {"table": text}, {"setting": asdict(setting), "results": results})
    print(
        f"\nMidpoint barrier, {setting.network} on {setting.data}, {setting.pairs} pairs, mean ± deviation:\n\n{text}\n"
    )
    if setting.data not in setting.paper.lower():
        print(f"The paper's column is for {setting.paper}: other data than here.")
    print(f"Figure: {out / 'linear_mode_connectivity.png'}\nTensorBoard: tensorboard --logdir {out}")
    return results


if __name__ == "__main__":
    run_script(main, Setting)
