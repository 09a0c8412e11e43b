"""Tables 1 to 3, 5, 6, 8, 9 and figure 2 of Exploring Low Rank Training of Deep Neural Networks: images.

Networks of which each layer is a product of two factors, ``W = U V^T``, against the dense network: how the factors are
initialised, whether L2 decays each factor or Frobenius decay their product, whether there was some dense training
before, and what half the step size does. All of a seed begin with the same dense weights and see the same batches.
Finished trainings lie in the folder of the results and are not repeated.

Expected on the default (handwritten digits, WRN-10-1, seed 0, 110 CPU seconds, half of that on 2 free cores): test
accuracy about 98 to 99 % of 360 images, as the dense network; effective rank at the end about 5.5 with L2 and 6.5 with
Frobenius decay, 22 dense; from a dense network the loss has a ridge on the way to one that was factorised from scratch,
and hardly any to one that was pre-trained. recipes/README.md has larger runs.

    python recipes/low_rank_vision.py
    python recipes/low_rank_vision.py --config recipes/configs/cifar100_wrn.yaml --data_dir DIR
    python recipes/low_rank_vision.py --config recipes/configs/imagenet_resnet50.yaml --data_dir DIR
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from low_rank_results import Quality, report
from low_rank_training import (
    Cell,
    Decay,
    Init,
    Start,
    Task,
    compare,
    half_step_cells,
    warmup_then_cosine,
)
from shared import check_batch_size, quiet, run_script
from torch import nn
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import resnet50

import lightning_symmetry as ls

QUALITY = Quality("test_accuracy", "test accuracy %", 100.0, 2)
# Layers that stay dense: the first one has few inputs, the last one few outputs.
DENSE = {"wrn": ["net.stem", "net.head"], "resnet50": ["net.conv1", "net.fc"]}


@dataclass
class Setting:
    """Train the network with each initialisation, decay, start and rank, and compare with the dense one.

    Args:
        inits: Initialisations of the factors.
        decays: Decay of each factor ("l2") or of their product ("frobenius").
        starts: Factors from the beginning ("scratch"), or after dense training ("pretrained").
        ranks: Shares of the full rank.
        widths: Widths of the wide residual network (multiplier of 16, 32, 64 channels); ignored by ResNet-50.
        half_steps: Whether to train with half the step size as well: the first rank and width, spectral initialisation.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation and order of the data.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        image_size: Side to which images are resized; default: as they are.
        crop: Side of the window that is cut out of images, at random for training; default: whole images.
        num_workers: Processes that read images from disk; 0 for images in memory.
        network: A wide residual network or torchvision's ResNet-50.
        depth: Depth of the wide residual network.
        scheme: The two convolutions that become of one.
        pretrain: Share of the updates with dense layers, where there is a pre-training.
        epochs: Epochs of each training, the dense ones among them.
        batch_size: Batch size, of all devices together.
        learning_rate: Peak learning rate of SGD; it falls to zero along a cosine.
        warmup: Updates until the peak.
        momentum: Momentum, Nesterov's.
        weight_decay: Decay of matrices, or of the products.
        batch_norm: Running statistics on the segment between low-rank and dense network.
        every_n_steps: Updates between two measurements of the effective ranks.
        devices: Devices of each training; more than one runs the trainings one after the other.
        precision: Precision of the Trainer.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for results and figures.
    """

    inits: list[Init] = field(default_factory=lambda: ["random", "spectral", "spectral_ones"])
    decays: list[Decay] = field(default_factory=lambda: ["l2", "frobenius"])
    starts: list[Start] = field(default_factory=lambda: ["scratch", "pretrained"])
    ranks: list[float] = field(default_factory=lambda: [0.25])
    widths: list[int] = field(default_factory=lambda: [1])
    half_steps: bool = True
    seeds: int = 1
    seed: int = 0
    data: Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder"] = "digits"
    data_dir: str = "data"
    image_size: int | None = None
    crop: int | None = None
    num_workers: int = 0
    network: Literal["wrn", "resnet50"] = "wrn"
    depth: int = 10
    scheme: Literal["kxk-1x1", "1xk-kx1"] = "kxk-1x1"
    pretrain: float = 0.2
    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 0.1
    warmup: int = 0
    momentum: float = 0.9
    weight_decay: float = 5e-3
    batch_norm: Literal["keep", "recompute"] = "recompute"
    every_n_steps: int = 50
    devices: int = 1
    precision: str = "32-true"
    workers: int | None = None
    out_dir: str = "runs/low_rank_vision"


def make_data(setting: Setting) -> Any:
    """Return the data module."""
    batch_size = setting.batch_size // setting.devices
    if setting.data == "digits":
        return ls.DigitsData(batch_size)
    return ls.VisionData(
        setting.data,
        setting.data_dir,
        batch_size,
        num_workers=setting.num_workers,
        image_size=setting.image_size,
        crop=setting.crop,
    )


def make_network(setting: Setting, data: Any, width: int) -> nn.Module:
    """Return the dense network."""
    if setting.network == "resnet50":
        return resnet50(num_classes=data.num_classes)
    return ls.WideResNet(setting.depth, width, data.num_classes, data.input_shape[0])


def make_task(setting: Setting) -> Task:
    """Return what the trainings share."""
    return Task(
        make_data=partial(make_data, setting),
        make_network=partial(make_network, setting),
        optimizer=partial(torch.optim.SGD, lr=setting.learning_rate, momentum=setting.momentum, nesterov=True),
        weight_decay=setting.weight_decay,
        decoupled=False,
        limits={"max_epochs": setting.epochs, "devices": setting.devices, "precision": setting.precision},
        schedule=partial(warmup_then_cosine, warmup=setting.warmup),
        pretrain=setting.pretrain,
        skip=DENSE[setting.network],
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": MulticlassAccuracy(num_classes=None, average="micro")},
        scheme=setting.scheme,
        batch_norm=setting.batch_norm,
        every_n_steps=setting.every_n_steps,
    )


def cells(setting: Setting) -> list[Cell]:
    """Return what is trained beside the dense networks."""
    found = [
        Cell(init, decay, start, rank, width)
        for width, rank, decay, start, init in product(
            setting.widths, setting.ranks, setting.decays, setting.starts, setting.inits
        )
    ]
    return [*found, *half_step_cells(setting)]


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all trainings."""
    quiet()
    check_batch_size(setting)
    data = make_data(setting)
    data.prepare_data()
    updates = setting.epochs * -(-len(data.train_dataloader().dataset) // setting.batch_size)
    results = compare(make_task, setting, cells(setting), updates, f"{setting.network} on {setting.data}")
    if rank_zero_only.rank == 0:  # of several devices' processes
        report(setting, results, QUALITY, f"{setting.network} on {setting.data}", "low_rank_vision")
    return results


if __name__ == "__main__":
    run_script(main, Setting)
