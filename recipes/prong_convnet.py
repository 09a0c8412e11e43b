"""Figure 4 of Natural Neural Networks: training a convolutional network with PRONG and with other optimizers.

All train with the waterfall schedule, which divides the learning rate where the validation error stops to improve.
Every method gets the same number of learning rates and of updates; the one with the lowest validation error at the end
counts, and the test set has no part in that. Seconds are CPU seconds of one thread (on an accelerator: of the clock),
without the time to evaluate. Finished trainings lie in the folder of the results and are not repeated.

Expected on the default (handwritten digits, seed 0, 140 CPU seconds, half of that on 2 free cores): training loss after
600 updates 1.9e-4 for SGD, 1.3e-4 for RMSprop, 3.8e-5 with batch norm, 3.1e-5 for PRONG, 6.7e-5 for PRONG+; SGD's is
reached after 560, 240, 200 and 240 updates; test error 3.3, 2.8, 0.6, 0.8 and 0.0 % of 360 images.

    python recipes/prong_convnet.py
    python recipes/prong_convnet.py --config recipes/configs/cifar10_prong.yaml --data_dir DIR
    python recipes/prong_convnet.py --config recipes/configs/imagenet_prong.yaml --data_dir DIR
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from prong_convnet_course import Course
from prong_convnet_networks import inception
from prong_convnet_results import LABELS, best_rates, draw, summarise
from shared import (
    UsageError,
    check_batch_size,
    make_trainer,
    publish,
    quiet,
    run_jobs,
    run_script,
    settings_of_a_training,
    stored,
    worker_count,
)
from torchmetrics.classification import MulticlassHammingDistance

import lightning_symmetry as ls

Method = Literal["momentum", "rmsprop", "batch_norm", "prong", "prong_plus"]
# What has no influence on a single training of given method, learning rate and seed.
OF_THE_SEARCH = {"methods", "learning_rates", "adaptive_rates", "seeds", "seed", "num_workers", "workers", "out_dir"}


@dataclass
class Setting:
    """Train the network with each method and learning rate, and compare the best of each.

    Args:
        methods: Optimizers, all with momentum; "batch_norm" is SGD on the network with batch norm before its
            activations, "prong_plus" PRONG on that network.
        learning_rates: Learning rates of SGD, batch norm, PRONG and PRONG+.
        adaptive_rates: Those of RMSprop, as many.
        momentum: Momentum.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation and order of the data.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        image_size: Side to which images are resized, for ``imagefolder``.
        crop: Side of the window that is cut out of images, at random for training; default: whole images.
        val_fraction: Fraction of the training images that is held out for validation (of all images, for the digits).
        num_workers: Processes that read images from disk; 0 for images in memory.
        network: Network.
        width: Channels of the first stage of the VGG.
        stages: Stages of the VGG.
        convs: Convolutions in a stage of the VGG.
        batch_size: Batch size, of all devices together.
        steps: Updates of each training.
        val_every: Updates between two evaluations.
        patience: Evaluations on end without improvement after which the learning rate is divided by ten.
        improvement: Relative improvement of the validation error that is asked for.
        train_images: Training images, at most, on which the training loss is measured.
        every_n_steps: Updates between two reparametrisations (T).
        num_samples: Images for the statistics (N_s); each of their pixels is a sample.
        eps: Damping of the whitening; well below the variance of the activations, or nothing is whitened.
        devices: Devices of each training; more than one runs the trainings one after the other.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for results and figures.
    """

    methods: list[Method] = field(default_factory=lambda: list(LABELS))
    learning_rates: list[float] = field(default_factory=lambda: [0.3, 0.1, 0.03, 0.01, 0.003])
    adaptive_rates: list[float] = field(default_factory=lambda: [3e-3, 1e-3, 3e-4, 1e-4, 3e-5])
    momentum: float = 0.9
    seeds: int = 1
    seed: int = 0
    data: Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder"] = "digits"
    data_dir: str = "data"
    image_size: int | None = None
    crop: int | None = None
    val_fraction: float = 0.2
    num_workers: int = 0
    network: Literal["vgg", "inception"] = "vgg"
    width: int = 16
    stages: int = 2
    convs: int = 2
    batch_size: int = 64
    steps: int = 600
    val_every: int = 40
    patience: int = 4
    improvement: float = 0.01
    train_images: int = 10_000
    every_n_steps: int = 100
    num_samples: int = 64
    eps: float = 0.01
    devices: int = 1
    workers: int | None = None
    out_dir: str = "runs/prong_convnet"


def make_data(setting: Setting) -> Any:
    """Return the data module."""
    batch_size = setting.batch_size // setting.devices
    if setting.data == "digits":
        return ls.DigitsData(batch_size, val_fraction=setting.val_fraction)
    return ls.VisionData(
        setting.data,
        setting.data_dir,
        batch_size,
        val_fraction=setting.val_fraction,
        num_workers=setting.num_workers,
        image_size=setting.image_size,
        crop=setting.crop,
    )


def make_network(setting: Setting, norm: bool, num_classes: int, in_channels: int) -> torch.nn.Module:
    """Return the network, with or without batch norm before its activations."""
    if setting.network == "inception":
        return inception(num_classes, norm)
    return ls.VGG(setting.width, setting.stages, setting.convs, num_classes, in_channels, norm)


def make_module(setting: Setting, method: Method, rate: float, data: Any) -> ls.SupervisedModule:
    """Return what is trained: the network, cross entropy, the method's optimizer, and the error as a metric."""
    kind = torch.optim.RMSprop if method == "rmsprop" else torch.optim.SGD
    norm = method in ("batch_norm", "prong_plus")
    return ls.SupervisedModule(
        make_network(setting, norm, data.num_classes, data.input_shape[0]),
        optimizer=partial(kind, lr=rate, momentum=setting.momentum),
        metrics={"error": MulticlassHammingDistance(data.num_classes, average="micro")},  # 1 - accuracy
    )


def run(setting: Setting, method: Method, rate: float, seed: int, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train once and return the course and the test error; from the training's folder, where that was done before."""
    quiet()
    folder = Path(setting.out_dir) / method / f"lr{rate:g}" / f"seed{seed}"
    matters = settings_of_a_training(setting, OF_THE_SEARCH)
    settings = {"method": method, "rate": rate, "seed": seed, "setting": matters}
    make = partial(train, setting, method, rate, seed, folder, tick)
    result = stored(folder / "result.json", settings, make)
    if not result["new"]:
        tick(setting.steps)
    return result


def train(
    setting: Setting, method: Method, rate: float, seed: int, folder: Path, tick: Callable[[int], Any]
) -> dict[str, Any]:
    """Train once and return the course of the training and the test error at its end; infinite where it diverged."""
    pl.seed_everything(seed, verbose=False)
    data = make_data(setting)
    data.prepare_data()
    data.setup("fit")
    module = make_module(setting, method, rate, data)
    course = Course(data.eval_dataloader("train"), setting.train_images, tick)
    callbacks = [course, ls.WaterfallLR("val/error", 10, setting.improvement, setting.patience)]
    if method in ("prong", "prong_plus"):
        callbacks.insert(0, ls.PRONG(setting.every_n_steps, setting.num_samples, setting.eps))
    trainer = make_trainer(
        folder,
        callbacks,
        max_steps=setting.steps,
        val_check_interval=setting.val_every,
        check_val_every_n_epoch=None,
        devices=setting.devices,
        limit_val_batches=1.0,
        log_every_n_steps=max(1, setting.steps // 100),
    )
    trainer.fit(module, datamodule=data)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    tick(setting.steps - course.seen["points"][-1])
    if not math.isfinite(course.seen["train_loss"][-1]):
        for name in ("train_loss", "train_error", "val_error"):
            course.seen[name][-1] = math.inf
    return course.seen | {"test_error": tested["test/error"]}


def check(setting: Setting) -> None:
    """Refuse settings that cannot be run, and a validation split that is the test split."""
    check_batch_size(setting)
    if setting.steps % setting.val_every:
        raise UsageError(f"`steps` {setting.steps} is no multiple of `val_every` {setting.val_every}.")
    data = make_data(setting)
    data.prepare_data()
    if data.eval_dataloader("val").dataset is data.eval_dataloader("test").dataset:
        raise UsageError("There is no validation split, which the learning rates need: give a positive `val_fraction`.")


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all trainings."""
    quiet()
    check(setting)
    workers = worker_count(setting.workers, setting.devices)
    jobs = []
    for seed in range(setting.seed, setting.seed + setting.seeds):
        for method in setting.methods:
            rates = setting.adaptive_rates if method == "rmsprop" else setting.learning_rates
            jobs += [{"setting": setting, "method": method, "rate": rate, "seed": seed} for rate in rates]
    label = f"{len(jobs)} networks on {setting.data}"
    results = run_jobs(run, jobs, len(jobs) * setting.steps, workers, label, "update")
    if rank_zero_only.rank != 0:  # of several devices' processes
        return results
    best = best_rates(results, setting.methods)
    out, title = Path(setting.out_dir), f"{setting.network} on {setting.data}"
    text, figure = summarise(best), draw(best, title)
    publish(out, "prong_convnet", figure, {"table": text}, {"setting": asdict(setting), "results": results})
    print(f"\n{title}, {setting.seeds} seed(s), best learning rates:\n\n{text}\n")
    print(f"Figure: {out / 'prong_convnet.png'}\nTensorBoard: tensorboard --logdir {out}")
    return results


if __name__ == "__main__":
    run_script(main, Setting)
