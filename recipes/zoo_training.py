"""Zoos of classifiers with random hyper-parameters, for ``monotonic_interpolation.py`` and ``metanetworks.py``.

Both train the zoos that they need. As a script this trains them alone, for instance in shards on several machines:

    python recipes/zoo_training.py --config recipes/configs/cifar10_zoo.yaml --data_dir DIR --shard 0/16
    python recipes/zoo_training.py --config recipes/configs/cifar10_zoo.yaml --data_dir DIR    # when all are there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from shared import UsageError, quiet, run_script, table
from torch import Tensor

import lightning_symmetry as ls
from lightning_symmetry.metanets.population_augment import PopulationAugmentation
from lightning_symmetry.metanets.zoo_plan import parse_shard

Kind = Literal["standard", "sigma", "w", "control"]
LABELS = {"standard": "Standard", "sigma": "sigma-Asym", "w": "W-Asym", "control": "W masks, small kappa"}
FACTORY = "lightning_symmetry.metanets:zoo_classifier"
CHUNK_SIZE = {"digits": 16}
"""Networks that are trained at once: of few weights, more gain 3 %, and leave cores without work in small zoos."""
AUGMENTATION = PopulationAugmentation(flip=0.5, padding=2, cutout=4)
"""That of FFCV's CIFAR-10 script, which the paper took: mirror, shift by up to 2 pixels, cut out a square of 4x4."""
EVAL_BATCH_SIZE = 512


@dataclass
class ZooSetting:
    """Train zoos of networks with random hyper-parameters.

    Args:
        kinds: Kinds of networks; "control" has the masks of "w" and small constants.
        networks: Networks of each kind.
        seed: Seed of hyper-parameters, initialisations and orders of the data, which each kind has of its own.
        data: Data set; the classifiers are :func:`~lightning_symmetry.zoo_classifier`'s.
        data_dir: Folder of data sets that are not embedded.
        augment: Whether to mirror, shift and cut out training images, anew each time.
        norm: Normalisation in the classifiers.
        constants_seed: Seed of masks and constants, the same for all networks of a kind.
        control_kappa: Standard deviation of the control's constants.
        batch_size: Batch size.
        learning_rate: Ends of the log-uniform distribution of peak learning rates of SGD with momentum 0.9. A rate
            rises linearly from 0 over the first fifth of a training, and falls linearly to 0.
        weight_decay: Ends of the log-uniform distribution of weight decays.
        label_smoothing: Ends of the uniform distribution of label smoothing.
        epochs: Ends of the uniform distribution over numbers of epochs.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        shard: Part "i/n" of the networks to train, i from 0 to n - 1, and nothing more; the other parts in runs of
            their own, maybe on other machines. A run without it, with all parts in ``zoo_dir``, goes on with the whole.
        zoo_dir: Folder of the zoos, which other recipes can use too; default: ``zoos`` in ``out_dir``.
        out_dir: Folder for TensorBoard logs, results and figures.
    """

    kinds: list[Kind] = field(default_factory=lambda: ["standard", "sigma", "w"])
    networks: int = 30
    seed: int = 0
    data: Literal["digits", "cifar10"] = "digits"
    data_dir: str = "data"
    augment: bool = False
    norm: Literal["layer", "batch"] = "layer"
    constants_seed: int = 0
    control_kappa: float = 0.02
    batch_size: int = 16
    learning_rate: tuple[float, float] = (0.005, 0.5)
    weight_decay: tuple[float, float] = (1e-5, 1e-1)
    label_smoothing: tuple[float, float] = (0.0, 0.2)
    epochs: tuple[int, int] = (10, 40)
    workers: int | None = None
    shard: str | None = None
    zoo_dir: str | None = None
    out_dir: str = "runs/zoos"


def factory_arguments(kind: Kind, setting: ZooSetting) -> dict[str, Any]:
    """Return the arguments of :func:`~lightning_symmetry.zoo_classifier` for a kind of network."""
    same = {"data": setting.data, "norm": setting.norm, "constants_seed": setting.constants_seed}
    if kind == "control":
        return {"kind": "w", **same, "settings": {"kappa": setting.control_kappa}}
    return {"kind": kind, **same}


def train_zoos(setting: ZooSetting) -> dict[Kind, ls.Zoo] | None:
    """Train, go on with or open the zoo of each kind, and say how the networks came out.

    Returns:
        The zoos; None where there is nothing more to do in this process, which trained a shard or is not the first of
        a launch.

    Raises:
        UsageError: See :func:`trained_zoo`.
    """
    if not setting.kinds:
        raise UsageError("There is nothing to train: give at least one of `kinds`.")
    zoos = {kind: trained_zoo(kind, setting) for kind in setting.kinds}
    if setting.shard is not None:
        print(
            f"\nShard {setting.shard} is trained. When all are, put their folders together in {zoo_folder(setting)} "
            "and give the same command without --shard: it merges them and goes on."
        )
        return None
    if rank_zero_only.rank != 0:
        return None
    print(f"\nThe zoos in {zoo_folder(setting)}:\n\n{zoo_table(zoos)}\n")
    return zoos


def trained_zoo(kind: Kind, setting: ZooSetting, folder: str | Path | None = None) -> ls.Zoo:
    """Train a zoo, or go on where that was stopped; one that is there with the same settings is opened.

    Args:
        kind: Kind of its networks.
        setting: The setting.
        folder: Folder of the zoos, by default the setting's; the zoo's own in it is called ``KIND-NETWORKS``.

    Returns:
        The zoo; of a setting with a shard, the shard. Networks that diverged are there, marked so.

    Raises:
        UsageError: If there is no such setting, or the folder holds a zoo that was trained with another.
    """
    shard = checked_shard(setting)
    data = image_tensors(setting.data, setting.data_dir)
    # Each kind has its own draw, as in the paper: the test between kinds is one of independent samples.
    seed = len(LABELS) * setting.seed + list(LABELS).index(kind)
    ranges = {name: getattr(setting, name) for name in ("learning_rate", "weight_decay", "label_smoothing", "epochs")}
    path = Path(folder or zoo_folder(setting)) / f"{kind}-{setting.networks}"
    try:
        return ls.train_zoo(
            FACTORY,
            data,
            ls.sample_hyperparameters(setting.networks, seed, **ranges),
            path,
            ls.PopulationSettings(batch_size=setting.batch_size, augment=AUGMENTATION if setting.augment else None),
            factory_arguments=factory_arguments(kind, setting),
            seed=seed,
            chunk_size=CHUNK_SIZE.get(setting.data),
            workers=setting.workers,
            shard=shard,
        )
    except (ls.ZooError, ValueError) as error:
        raise UsageError(f"{error}") from error


def checked_shard(setting: ZooSetting) -> tuple[int, int] | None:
    """Return the shard that is asked for, of a setting that can be trained.

    Raises:
        UsageError: If it cannot.
    """
    if setting.networks < 1:
        raise UsageError(f"There is nothing to train: `networks` is {setting.networks}.")
    check_augmentation(setting)
    try:
        return parse_shard(setting.shard)
    except ValueError as error:
        raise UsageError(f"{error}") from None


def check_augmentation(setting: Any) -> None:
    """Refuse augmentation that the data does not bear.

    Raises:
        UsageError: If it is asked for.
    """
    if setting.data == "digits" and setting.augment:
        raise UsageError("`augment` mirrors images, which digits do not bear.")


def zoo_folder(setting: ZooSetting) -> Path:
    """Return the folder of the zoos."""
    return Path(setting.zoo_dir or Path(setting.out_dir) / "zoos")


def zoo_table(zoos: Mapping[str, ls.Zoo]) -> str:
    """Return a table of how the networks of each kind came out of their training."""
    rows = []
    for kind, zoo in zoos.items():
        good = zoo.select(lambda record: record["status"] == "ok")
        counts = [f"{len(zoo)}", f"{len(zoo) - len(good)}"]
        test = 100 * good["accuracy"]
        means = [f"{100 * good['train_accuracy'].mean():.1f}", f"{test.mean():.1f}"]
        rows.append([LABELS[kind], *counts, *means, *(f"{q:.1f}" for q in np.quantile(test, [0, 0.25, 0.5, 0.75, 1]))])
    header = ["network", "trained", "diverged", "train accuracy %", "test accuracy %"]
    return table([*header, "lowest", "25 %", "median", "75 %", "highest"], rows)


@cache
def image_tensors(data: str, data_dir: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return normalised images and labels, not augmented: ``"train"`` and ``"test"``, as the data modules have them."""
    module = ls.DigitsData() if data == "digits" else ls.VisionData(data, data_dir, augment=False)
    module.prepare_data()
    module.setup("fit")
    found = {}
    for split in ("train", "test"):
        images, labels = zip(*module.eval_dataloader(split), strict=True)
        found[split] = torch.cat(images), torch.cat(labels)
    return found


def main(setting: ZooSetting) -> dict[Kind, ls.Zoo] | None:
    """Train the zoos of the setting."""
    quiet()
    return train_zoos(setting)


if __name__ == "__main__":
    run_script(main, ZooSetting)
