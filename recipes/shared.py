"""What several recipes do: many trainings over worker processes with one progress bar, tables, and figures."""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing as mp
import os
import queue
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from matplotlib.figure import Figure
from tqdm.auto import tqdm


class UsageError(ValueError):
    """Something that the user gave does not fit; scripts show it without traceback."""


def run_script(main: Callable[[Any], Any], setting: type) -> None:
    """Call a recipe with the setting of its command line; what the user gave wrong is said in a line."""
    atexit.register(leave_process_group)
    try:
        main(auto_cli(setting, as_positional=False))
    except UsageError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None


def leave_process_group() -> None:
    """Destroy the process group, if there is one.

    A process that leaves with its gloo group in place may abort while the interpreter shuts down, its work done
    (pytorch/pytorch#190489); Lightning destroys groups of NCCL only.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def check_batch_size(setting: Any) -> None:
    """Refuse a batch that cannot be divided among the devices.

    Raises:
        UsageError: If it cannot.
    """
    if setting.batch_size % setting.devices:
        raise UsageError(f"`batch_size` {setting.batch_size} is no multiple of `devices` {setting.devices}.")


class Ticks(Callback):
    """Report each finished epoch to the recipe's progress bar."""

    def __init__(self, tick: Callable[[int], Any]) -> None:
        self.tick = tick

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report one epoch."""
        self.tick(1)


def quiet() -> None:
    """Keep Lightning's notices, which every one of many small trainings repeats, out of the progress bar."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    messages = (
        ".*does not have many workers.*",
        ".*torch.jit.*",
        ".*number of training batches.*",
        ".*treespec, LeafSpec.*",
    )
    for message in messages:
        warnings.filterwarnings("ignore", message)


def fit(
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    folder: Path,
    epochs: int,
    callbacks: list[Callback],
    devices: int = 1,
) -> None:
    """Train a module, log to TensorBoard, and save its weights as ``last.ckpt`` in the folder."""
    trainer = make_trainer(folder, callbacks, max_epochs=epochs, devices=devices, log_every_n_steps=10)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)


def make_trainer(folder: Path, callbacks: list[Callback], **limits: Any) -> pl.Trainer:
    """Return a quiet trainer that logs to TensorBoard, saves no checkpoints, and does not validate by default."""
    return pl.Trainer(
        logger=TensorBoardLogger(folder.parent, folder.name, version="", default_hp_metric=False),
        callbacks=callbacks,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # the test split stands in for validation, and is measured at the end, where there is no other
        **{"limit_val_batches": 0, **limits},
    )


def worker_count(setting: int | None, devices: int = 1) -> int:
    """Return the number of worker processes: by default one a core, none where a training has other devices."""
    if setting is not None:
        return setting
    return 0 if torch.cuda.is_available() or devices > 1 else len(os.sched_getaffinity(0))


def settings_of_a_training(setting: Any, without: set[str]) -> dict[str, Any]:
    """Return what of a recipe's setting a single training depends on.

    That is all but what is ``without`` influence. The folder of data counts, except for the embedded digits: subsets
    and versions of a data set go by the same name.
    """
    values = {name: value for name, value in asdict(setting).items() if name not in without}
    if folder := values.pop("data_dir", None):
        values["data_dir"] = None if setting.data == "digits" else str(Path(folder).resolve())
    return values


def clock() -> float:
    """Return CPU seconds of this process; seconds of the clock on an accelerator."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def run_jobs(
    function: Callable[..., Any],
    jobs: Sequence[dict[str, Any]],
    total: int,
    workers: int,
    description: str,
    unit: str = "epoch",
) -> list[Any]:
    """Call ``function(**job, tick=...)`` for each job and return the results in order.

    Args:
        function: A function of a module, so that worker processes find it.
        jobs: Arguments of the calls.
        total: Number of ticks of all jobs together.
        workers: Processes of one thread each; 0 runs the jobs one after the other in this process.
        description: Label of the progress bar.
        unit: What a tick is.
    """
    with tqdm(total=total, desc=description, unit=unit, smoothing=0.05) as bar:
        if workers == 0:
            return [function(**job, tick=bar.update) for job in jobs]
        context = mp.get_context("spawn")
        with context.Manager() as manager, ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
            ticks = manager.Queue()
            futures = [pool.submit(function, **job, tick=ticks.put) for job in jobs]
            try:
                _follow(futures, ticks, bar)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return [future.result() for future in futures]


def _start_worker() -> None:
    torch.set_num_threads(1)
    quiet()


def _follow(futures: list[Future[Any]], ticks: Any, bar: tqdm) -> None:
    """Move the bar until all jobs are done; raise the first error at once."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.3, return_when=FIRST_COMPLETED)
        try:
            while True:
                bar.update(ticks.get_nowait())
        except queue.Empty:
            pass
        for future in done:
            future.result()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def mean_and_deviation(values: Sequence[float], digits: int = 3) -> str:
    """Return ``mean ± standard deviation`` of a sample; the mean alone of a single value."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if len(values) == 1:
        return f"{tensor.item():.{digits}f}"
    return f"{tensor.mean():.{digits}f} ± {tensor.std():.{digits}f}"


@rank_zero_only
def save_json(path: Path, content: Any) -> None:
    """Write a result in one go, so that a reader never sees half a file; of several devices' processes, the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)


def stored(path: Path, settings: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return ``settings | make()``, from the file where it was made with the same settings before.

    An interrupted search goes on where it was. ``new`` in the result says whether it was made now.
    """
    settings = json.loads(json.dumps(settings))  # tuples are lists in a file
    if path.exists():
        content = json.loads(path.read_text())
        if {name: content.get(name) for name in settings} == settings:
            return content | {"new": False}
    content = settings | make()
    save_json(path, content)
    return content | {"new": True}


@rank_zero_only
def publish(out: Path, name: str, figure: Figure, texts: dict[str, str], content: Any) -> None:
    """Write a recipe's results, its figure as PNG, and figure and texts for TensorBoard, into a folder."""
    save_json(out / "results.json", content)
    figure.savefig(out / f"{name}.png", dpi=150)
    logger = TensorBoardLogger(out, "summary", version="")
    for title, text in texts.items():
        logger.experiment.add_text(title, text)
    logger.experiment.add_figure(name, figure)
    logger.finalize("success")
