"""One training with low-rank factors, or with dense layers, for ``low_rank_vision.py`` and ``low_rank_language.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from shared import UsageError, clock, make_trainer, quiet, run_jobs, settings_of_a_training, stored, worker_count
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import lightning_symmetry as ls

Init = Literal["random", "spectral", "spectral_ones"]
Decay = Literal["l2", "frobenius"]
Start = Literal["scratch", "pretrained"]
# What of a recipe's setting has no influence on a single training of a given cell and seed.
OF_THE_COMPARISON = {"inits", "decays", "starts", "ranks", "widths", "half_steps", "seeds", "seed"}
OF_THE_COMPARISON |= {"num_workers", "cache_dir", "workers", "out_dir"}


@dataclass(frozen=True)
class Cell:
    """What is varied.

    Args:
        init: Initialisation of the factors; "dense" for a network without any.
        decay: Whether the optimizer decays the factors, or :class:`~lightning_symmetry.FrobeniusDecay` their products.
        start: Whether factors are there from the beginning or after some dense training.
        rank: Share of the full rank.
        step_factor: What the learning rate is multiplied with as long as there are factors.
        width: Width of the network.
    """

    init: Literal["dense"] | Init
    decay: Decay
    start: Start
    rank: float
    width: int
    step_factor: float = 1.0

    @property
    def name(self) -> str:
        """A path that tells the trainings of one comparison apart."""
        if self.init == "dense":
            return f"dense/width{self.width}"
        slow = "" if self.step_factor == 1 else f"-lr{self.step_factor:g}"
        return f"{self.init}-{self.decay}-{self.start}{slow}/rank{self.rank:g}-width{self.width}"

    @property
    def baseline(self) -> Cell:
        """The dense network of the same width; decay of the factors and of the product are the same of one matrix."""
        return Cell("dense", "l2", "scratch", 1.0, self.width)


@dataclass
class Task:
    """What all trainings of a comparison share.

    Args:
        make_data: Returns the data module.
        make_network: Returns the network for a data module and a width.
        optimizer: Called with parameter groups.
        weight_decay: Weight decay of the matrices, as L2 or as Frobenius decay.
        decoupled: Whether the optimizer's weight decay is decoupled from the gradient, as AdamW's.
        limits: The trainer's arguments that say how long to train and on what.
        schedule: Called with optimizer and number of updates.
        pretrain: Share of the updates with dense layers, where there is a pre-training.
        skip: Names of layers that stay dense.
        loss: Loss function.
        metrics: torchmetrics.
        scheme: The two convolutions that become of one.
        min_saving: Layers that would save a smaller share of their parameters stay dense.
        batch_norm: Running statistics on the segment to the dense network.
        every_n_steps: Updates between two measurements of the effective ranks.
    """

    make_data: Callable[[], Any]
    make_network: Callable[[Any, int], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    weight_decay: float
    decoupled: bool
    limits: dict[str, Any]
    schedule: Callable[[torch.optim.Optimizer, int], Any]
    pretrain: float
    skip: Sequence[str]
    loss: Callable[..., torch.Tensor]
    metrics: dict[str, Any]
    scheme: Literal["kxk-1x1", "1xk-kx1"] = "kxk-1x1"
    min_saving: float = 0.0
    batch_norm: Literal["keep", "recompute", "repair"] = "keep"
    every_n_steps: int = 100


class Course(pl.Callback):
    """Report updates to the recipe's progress bar, keep the effective ranks on the way, and time the training.

    Args:
        monitor: What measures the effective ranks; must stand before this one in the trainer.
        skip: Names of layers that do not count.
        tick: Reports finished updates.
    """

    def __init__(self, monitor: ls.EffectiveRankMonitor, skip: Sequence[str], tick: Callable[[int], Any]) -> None:
        self.monitor, self.skip, self.tick = monitor, skip, tick
        self.ranks: dict[str, list[float]] = {"step": [], "mean": []}
        self.losses: deque[torch.Tensor] = deque(maxlen=monitor.every_n_steps)
        self.seconds = 0.0
        self._ticked = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._keep(0)
        self._since = clock()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """Report, and keep what was measured."""
        self.losses.append(outputs["loss"])
        step = trainer.global_step
        if step - self._ticked >= 20:
            self.tick(step - self._ticked)
            self._ticked = step
        if step % self.monitor.every_n_steps == 0 and step > self.ranks["step"][-1]:
            self._keep(step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock, and keep what the monitor has measured at the end."""
        self.seconds = clock() - self._since
        self.tick(trainer.global_step - self._ticked)
        if trainer.global_step > self.ranks["step"][-1]:
            self._keep(trainer.global_step)

    def layers(self) -> dict[str, float]:
        """Return the effective ranks that were measured last, of the layers that count."""
        return {name: rank for name, rank in self.monitor.measured.items() if name not in self.skip}

    def _keep(self, step: int) -> None:
        ranks = self.layers().values()
        self.ranks["step"].append(step)
        self.ranks["mean"].append(sum(ranks) / len(ranks) if ranks else 0.0)


def decayed_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups in which matrices are decayed, and biases and parameters of norms are not."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def run(
    make_task: Callable[[Any], Task], setting: Any, cell: Cell, seed: int, tick: Callable[[int], Any]
) -> dict[str, Any]:
    """Train once and return what was measured; from the training's folder, where that was done before.

    Args:
        make_task: Returns what the trainings share, for the recipe's setting.
        setting: The setting.
        cell: What is varied.
        seed: Seed of the initialisation and of the order of the data.
        tick: Reports finished updates.
    """
    quiet()
    out, task = Path(setting.out_dir), make_task(setting)
    folder = out / cell.name / f"seed{seed}"
    matters = settings_of_a_training(setting, OF_THE_COMPARISON)
    settings = {"cell": asdict(cell), "seed": seed, "setting": matters}
    reference = None if cell.init == "dense" else out / cell.baseline.name / f"seed{seed}" / "last.ckpt"
    result = stored(folder / "result.json", settings, partial(train, task, cell, seed, folder, reference, tick))
    if not result["new"]:
        tick(result["steps"])
    return result


def train(
    task: Task, cell: Cell, seed: int, folder: Path, reference: Path | None, tick: Callable[[int], Any]
) -> dict[str, Any]:
    """Train one network, test it, save it, and measure the segment from the dense network to it."""
    pl.seed_everything(seed, verbose=False)
    data = task.make_data()
    data.prepare_data()
    data.setup("fit")
    frobenius = cell.decay == "frobenius"
    optimizer_decay = 0.0 if frobenius else task.weight_decay
    module = ls.SupervisedModule(
        task.make_network(data, cell.width),
        loss=task.loss,
        optimizer=lambda parameters: task.optimizer(decayed_groups(parameters, optimizer_decay)),
        scheduler=lambda optimizer: task.schedule(optimizer, int(trainer.estimated_stepping_batches)),
        interval="step",
        metrics=task.metrics,
    )
    monitor = ls.EffectiveRankMonitor(task.every_n_steps, scheme=task.scheme)
    course = Course(monitor, task.skip, tick)
    switch, path = [], []
    if reference is not None:
        switch = [
            ls.SpectralFactorization(
                at_fraction=task.pretrain if cell.start == "pretrained" else 0.0,
                rank=cell.rank,
                init=cell.init,
                lr_factor=cell.step_factor,
                moments="reset" if cell.init == "random" else "project",  # random factors have nothing of the weight
                scheme=task.scheme,
                min_saving=task.min_saving,
                skip=task.skip,
                seed=seed,
            )
        ]
        path = [ls.LinearInterpolation(reference, 11, "test", task.batch_norm, progress=False)]
    decay = [ls.FrobeniusDecay(task.weight_decay, task.decoupled, dense=True)] if frobenius else []
    trainer = make_trainer(folder, [*switch, *decay, monitor, course, *path], log_every_n_steps=10, **task.limits)
    trainer.fit(module, datamodule=data)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    return {
        "steps": trainer.global_step,
        "train_loss": torch.stack(list(course.losses)).mean().item(),
        **{name.replace("/", "_"): value for name, value in tested.items()},
        "parameters": sum(p.numel() for p in module.net.parameters()),
        "effective_rank": course.ranks["mean"][-1],
        "effective_ranks": course.layers(),
        "course": course.ranks,
        "seconds": course.seconds,
        "switch": [part.measured for part in switch],
        "path": [part.result.to_dict() | {"distance": part.distance} for part in path],
    }


def half_step_cells(setting: Any) -> list[Cell]:
    """Return the cells with half the step size, if the setting asks for them: spectral, of its first rank and width."""
    if not setting.half_steps or "spectral" not in setting.inits:
        return []
    chosen = product(setting.decays, setting.starts)
    return [Cell("spectral", decay, start, setting.ranks[0], setting.widths[0], 0.5) for decay, start in chosen]


def compare(
    make_task: Callable[[Any], Task], setting: Any, cells: Sequence[Cell], updates: int, label: str
) -> list[dict[str, Any]]:
    """Train each cell with each seed, the dense networks first, and return all results.

    Args:
        make_task: Returns what the trainings share, for the recipe's setting; a function of a module.
        setting: The setting.
        cells: What to train beside the dense networks.
        updates: Number of updates of one training.
        label: Label of the progress bars.

    Raises:
        UsageError: If there is nothing to compare, or warm-up or pre-training do not fit into a training.
    """
    if not cells or setting.seeds < 1:
        raise UsageError("There is nothing to train: give at least one of `inits`, `decays`, `starts` and `seeds`.")
    if not 0 < setting.pretrain < 1:
        raise UsageError(f"`pretrain` is a share of the updates, between 0 and 1, but got {setting.pretrain}.")
    if not 0 <= setting.warmup < updates:
        raise UsageError(f"`warmup` must be shorter than a training of {updates} updates, but got {setting.warmup}.")
    workers = worker_count(setting.workers, setting.devices)
    results = []
    dense = list(dict.fromkeys(cell.baseline for cell in cells))
    for kind, chosen in (("dense", dense), ("low rank", cells)):
        jobs = [
            {"make_task": make_task, "setting": setting, "cell": cell, "seed": setting.seed + seed}
            for seed in range(setting.seeds)
            for cell in chosen
        ]
        name = f"{len(jobs)} networks, {kind}, {label}"
        results += run_jobs(run, jobs, len(jobs) * updates, min(workers, len(jobs)), name, "update")
    return results


def warmup_then_cosine(optimizer: torch.optim.Optimizer, updates: int, warmup: int) -> Any:
    """Return a schedule that rises linearly to the optimizer's learning rate and falls to zero along a cosine.

    Args:
        optimizer: The optimizer, with its peak learning rate.
        updates: Number of updates.
        warmup: Number of them until the peak.
    """
    cosine = CosineAnnealingLR(optimizer, updates - warmup)
    if not warmup:
        return cosine
    return SequentialLR(optimizer, [LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup), cosine], [warmup])
