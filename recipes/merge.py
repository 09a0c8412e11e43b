"""Merge two trained networks of your own: align, average, repair, and say what each step gives.

Two networks that were trained from different seeds cannot be averaged: their hidden units are in different orders. This
recipe finds the permutation symmetries of your network, permutes b to match a, averages the two, brings the statistics
of the units back (REPAIR, or batch-norm statistics taken anew) and writes a checkpoint of the same format as a's.

    python recipes/merge.py
    python recipes/merge.py --net my_package.models:MyNet --net_args '{width: 64}' --a a.ckpt --b b.ckpt --data mnist

Without arguments it trains two pairs on the handwritten digits and merges each: MLPs with layer normalisation and
residual networks with batch normalisation. Expected with seed 0, in about 90 s on 2 cores: midpoint barrier of the
test loss 0.28 -> 0.02 for the MLPs (aligned, REPAIR), 2.36 -> 0.04 for the residual networks (recomputed batch norm).
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from linear_mode_connectivity import make_data
from merge_checkpoint import Checkpoint
from merge_steps import Merge, draw
from shared import Ticks, UsageError, fit, publish, quiet, run_jobs, run_script, table
from torch import nn

import lightning_symmetry as ls
from lightning_symmetry.landscape.batches import to_device


@dataclass
class Setting:
    """Merge two networks of the same architecture, trained with cross entropy; without arguments, a demonstration.

    Args:
        net: "package.module:callable" that returns the network, or a LightningModule; the current folder is searched.
        net_args: Arguments of that callable.
        a: Lightning checkpoint or plain state dict of the network to come close to.
        b: The same of the network to permute.
        prefix: What the names of the network's weights in the checkpoints begin with; default: found.
        weights_only: Refuse checkpoints that hold other objects than tensors and plain values, which can run any code.
        data: "digits", "digits_graph", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder", "cora",
            "citeseer", "arxiv"; or "package.module:callable" that returns a LightningDataModule or a pair of loaders
            (train, test). Batches are (input, target), or graphs with masks.
        data_args: Arguments of that callable.
        data_dir: Folder of data sets that are not embedded.
        batch_size: Batch size of the demonstration's training; the named data sets are evaluated by 512.
        method: What b is aligned by; "both" takes the one with the lower training loss after merging.
        batch_norm: What is done to the average: nothing, batch-norm statistics taken anew, or REPAIR. Default:
            "recompute" with batch normalisation, else "repair".
        alpha: Position of the merged network between a (0) and b (1).
        num_points: Points on the paths of the figure.
        restarts: Descents of weight matching; default by the network's size.
        num_batches: Most training batches to take statistics from; they are held in memory.
        seed: Seed of the random orders of weight matching; the demonstration trains with seed and seed + 1.
        epochs: Epochs of the demonstration's trainings; default 40 for MLPs, 10 for residual networks.
        workers: Processes of one thread each for the demonstration's trainings, 0 for none; default: one a core.
        device: Where to run; default: a GPU where there is one.
        out: File of the merged network; default: "merged" in out_dir, with the suffix of a.
        out_dir: Folder for results, figures and TensorBoard logs.
    """

    net: str | None = None
    net_args: dict[str, Any] = field(default_factory=dict)
    a: str | None = None
    b: str | None = None
    prefix: str | None = None
    weights_only: bool = True
    data: str = "digits"
    data_args: dict[str, Any] = field(default_factory=dict)
    data_dir: str = "data"
    batch_size: int = 64
    method: Literal["weights", "activations", "both"] = "both"
    batch_norm: Literal["keep", "recompute", "repair"] | None = None
    alpha: float = 0.5
    num_points: int = 25
    restarts: int | None = None
    num_batches: int = 100
    seed: int = 0
    epochs: int | None = None
    workers: int | None = None
    device: str | None = None
    out: str | None = None
    out_dir: str = "runs/merge"


@dataclass(frozen=True)
class Demo:
    """A pair of networks to train and merge: the factory with its arguments, and the training."""

    net: str
    net_args: dict[str, Any]
    epochs: int
    learning_rate: float


DEMOS = {
    "mlp": Demo("lightning_symmetry:MLP", {"in_features": 64, "hidden": [256, 256, 256]}, 40, 1e-3),
    "resnet": Demo("lightning_symmetry:ResNet", {"blocks": 1, "norm": "batch", "width": 3, "in_channels": 1}, 10, 3e-3),
}


def find(path: str, argument: str) -> Callable[..., Any]:
    """Import "package.module:callable"."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise UsageError(f"Expected `{argument}` to be 'package.module:callable' but got {path!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise UsageError(
            f"There is no module {error.name!r} for `{argument}` (current folder: {os.getcwd()})."
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UsageError(f"{name} has no callable {attribute!r} for `{argument}`; it has {', '.join(there) or 'none'}.")
    return found


def load_networks(setting: Setting, device: torch.device) -> tuple[nn.Module, nn.Module, Checkpoint]:
    """Return the two networks, in evaluation mode, and the checkpoint of the first."""
    factory = find(setting.net, "net")
    try:
        net = factory(**setting.net_args)
    except TypeError as error:
        raise UsageError(
            f"{setting.net} cannot be called with {setting.net_args or 'no arguments'}: {error}"
        ) from error
    if not isinstance(net, nn.Module):
        raise UsageError(f"Expected {setting.net} to return a torch.nn.Module but got {type(net).__name__}.")
    first = Checkpoint.load(setting.a, net, setting.prefix, setting.weights_only)
    try:
        second = Checkpoint.load(setting.b, net, setting.prefix, setting.weights_only)
    except UsageError as error:
        raise UsageError(f"{error} The network does match {setting.a}.") from error
    nets = []
    for file in (first, second):
        nets.append(copy.deepcopy(net).eval().requires_grad_(False))
        nets[-1].load_state_dict(file.tensors())
    return nets[0].to(device), nets[1].to(device), first


def load_data(setting: Setting, device: torch.device) -> tuple[list[Any], Iterable[Any]]:
    """Return the training batches, on the device, and the test loader."""
    try:
        data = find(setting.data, "data")(**setting.data_args) if ":" in setting.data else make_data(setting)
    except ValueError as error:
        raise UsageError(f"There is no such data: {error}") from error
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data.setup("test")
        split = "test" if is_overridden("test_dataloader", data) else "val"
        plain = hasattr(data, "eval_dataloader")  # without augmentation
        train = data.eval_dataloader("train") if plain else data.train_dataloader()
        test = getattr(data, f"{split}_dataloader")()
    elif isinstance(data, tuple) and len(data) == 2:
        train, test = data
    else:
        raise UsageError(f"Expected {setting.data} to return a data module or (train, test) but got {type(data)}.")
    batches = [to_device(batch, device) for batch in islice(train, setting.num_batches)]
    if not batches:
        raise UsageError(f"The training loader of {setting.data} gave no batches.")
    return batches, test


def run(setting: Setting, title: str) -> dict[str, Any]:
    """Merge two networks, write everything and return the results."""
    if setting.net is None or setting.a is None or setting.b is None:
        raise UsageError("Give all of `--net`, `--a` and `--b`, or none for a demonstration.")
    pl.seed_everything(setting.seed, verbose=False)
    device = torch.device(setting.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    a, b, checkpoint = load_networks(setting, device)
    merge = Merge(setting, a, b, *load_data(setting, device))
    out = Path(setting.out_dir)
    target = Path(setting.out) if setting.out else out / f"merged{checkpoint.path.suffix}"
    checkpoint.save(merge.merged, target)
    rows, paths = merge.rows(), merge.paths()
    losses = table(
        ["network", "test loss", "test accuracy %"],
        [[n, f"{loss:.4f}", f"{acc:.1f}"] for n, (loss, acc) in rows.items()],
    )
    barriers = table(
        ["path from a to b", "midpoint barrier", "largest barrier"],
        [[name, f"{path.midpoint_barrier:.4f}", f"{path.max_barrier:.4f}"] for name, path in paths.items()],
    )
    figure = draw(merge, rows, paths, title)
    (out / "symmetries.txt").write_text(merge.spec.report() + "\n")
    results = {"rows": rows, "paths": {name: path.to_dict() for name, path in paths.items()}, "notes": merge.notes}
    texts = {"table": f"{losses}\n\n{barriers}", "alignment": "\n\n".join(merge.notes)}
    publish(out, "merge", figure, texts, {"setting": asdict(setting), **results})
    print(f"\n{title}\n", *merge.notes, f"\n{losses}\n\n{barriers}\n", f"Merged network: {target}", sep="\n")
    print(f"Figure: {out / 'merge.png'}\nWhat can be permuted: {out / 'symmetries.txt'}")
    print(f"TensorBoard: tensorboard --logdir {out}", flush=True)
    return results


def train_demo(setting: Setting, name: str, seed: int, tick: Callable[[int], Any]) -> None:
    """Train one network of the demonstration."""
    quiet()
    pl.seed_everything(seed, verbose=False)
    demo = DEMOS[name]
    net = find(demo.net, "net")(**demo.net_args)
    module = ls.SupervisedModule(net, optimizer=partial(torch.optim.AdamW, lr=demo.learning_rate, weight_decay=0.01))
    folder = Path(setting.out_dir) / name / ("a" if seed == setting.seed else "b")
    fit(module, make_data(setting), folder, setting.epochs or demo.epochs, [Ticks(tick)])


def command(setting: Setting) -> str:
    """Return the command line of a merge."""
    given = {name: getattr(setting, name) for name in ("net", "net_args", "a", "b", "data", "out_dir")}
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    return shlex.join(
        ["python", sys.argv[0], *(part for name, value in values.items() for part in (f"--{name}", value))]
    )


def demonstrate(setting: Setting) -> dict[str, Any]:
    """Train two pairs of networks and merge each."""
    given = {key: value for key, value in asdict(setting).items() if value != getattr(Setting(), key)}
    if bad := [key for key in ("net_args", "prefix", "data_args", "out") if key in given]:
        raise UsageError(f"`{bad[0]}` belongs to networks of your own: give `--net`, `--a` and `--b`, too.")
    if setting.data != "digits":
        raise UsageError("The demonstration is on the digits; for other data give `--net`, `--a` and `--b`.")
    workers = min(len(os.sched_getaffinity(0)), 4) if setting.workers is None else setting.workers
    jobs = [{"setting": setting, "name": name, "seed": setting.seed + i} for name in reversed(DEMOS) for i in range(2)]
    total = sum(2 * (setting.epochs or demo.epochs) for demo in DEMOS.values())
    run_jobs(train_demo, jobs, total, workers, f"{len(jobs)} networks on {setting.data}")
    results = {}
    for name, demo in DEMOS.items():
        out = Path(setting.out_dir) / name
        files = {"a": str(out / "a" / "last.ckpt"), "b": str(out / "b" / "last.ckpt")}
        mine = replace(setting, net=demo.net, net_args=demo.net_args, out_dir=str(out), **files)
        print(f"\nThe command of the next merge alone: {command(mine)}")
        results[name] = run(mine, f"{demo.net.partition(':')[2]} on {setting.data}")
    return results


def main(setting: Setting) -> dict[str, Any]:
    """Merge the user's networks, or those of the demonstration, and return the results."""
    quiet()
    if setting.net is None and setting.a is None and setting.b is None:
        return demonstrate(setting)
    return run(setting, f"{setting.net} on {setting.data}")


if __name__ == "__main__":
    run_script(main, Setting)
