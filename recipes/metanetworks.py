"""Table 3 of the symmetries paper: how well is a network's accuracy told from its weights?

Trains zoos of classifiers with random hyper-parameters (standard and W-asymmetric), and on the weights of each zoo
metanetworks that predict test accuracy: those of the paper (MLP, DMC, DeepSets, StatNN), DeepSets that tell tensors
apart, and a graph metanetwork. The learning rate of each, on each zoo, is the one of the best validation R^2 of one run
(App. E.3.2); then runs with other seeds tell the mean and deviation of R^2 and Kendall's tau on the test networks. All
see the same division of a zoo.
Finished trainings lie in the folder of the results and are not repeated; a zoo that is there is not trained again.

    python recipes/metanetworks.py
    python recipes/metanetworks.py --config recipes/configs/digits_metanetworks.yaml
    python recipes/metanetworks.py --config recipes/configs/cifar10_metanetworks.yaml --data_dir DIR
    python recipes/metanetworks.py --zoos '{mine: FOLDER}'    # a zoo of your own, of any architecture
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from metanetworks_results import draw, results_table
from shared import Ticks, UsageError, make_trainer, publish, quiet, run_jobs, run_script, stored, worker_count
from torch import nn
from zoo_training import Kind, ZooSetting, train_zoos, zoo_table

import lightning_symmetry as ls
from lightning_symmetry.metanets.zoo_features import weights_digest, zoo_statistics

Name = Literal["mlp", "dmc", "deepsets", "deepsets_by_tensor", "statnn", "graph"]
# So that no worker begins a long training last:
DEAREST_FIRST = ("graph", "dmc", "deepsets", "deepsets_by_tensor", "mlp", "statnn")
EVAL_BATCH_SIZE = 128


@dataclass
class Setting(ZooSetting):
    """Train zoos, and metanetworks on each; print the table and draw the figure.

    Args:
        kinds: Kinds of networks.
        zoos: Folders of zoos that are there already, by name, instead of training some.
        metanetworks: The metanetworks.
        learning_rates: What a metanetwork's learning rate is chosen from.
        runs: Runs of each metanetwork on each zoo with the chosen rate.
        metanet_seed: Seed of the run that chooses; the others have the seeds after it.
        metanet_epochs: Epochs of each run.
        metanet_batch_size: Networks in a batch.
        metanet_decay: Weight decay of AdamW.
        splits: Shares of training, validation and test networks.
        split_seed: Seed of the division of each zoo, which is kept there.
    """

    networks: int = 200
    epochs: tuple[int, int] = (2, 8)
    kinds: list[Kind] = field(default_factory=lambda: ["standard", "w"])
    zoos: dict[str, str] = field(default_factory=dict)
    metanetworks: list[Name] = field(default_factory=lambda: list(get_args(Name)))
    learning_rates: list[float] = field(default_factory=lambda: [1e-3, 5e-3])
    runs: int = 2
    metanet_seed: int = 0
    metanet_epochs: int = 20
    metanet_batch_size: int = 32
    metanet_decay: float = 0.01
    splits: tuple[float, float, float] = (0.5, 0.25, 0.25)
    split_seed: int = 0
    out_dir: str = "runs/metanetworks"


@dataclass(frozen=True)
class Job:
    """One training of a metanetwork: on which zoo, which one, with which learning rate and seed."""

    kind: str
    metanetwork: Name
    learning_rate: float
    seed: int


def make_metanetwork(name: Name, data: ls.ZooData) -> nn.Module:
    """Return a metanetwork for the networks of a zoo, of the size of Table 9. Its outputs lie in [0, 1].

    Args:
        name: Which one; "deepsets" takes all weights as one set, as the paper does, "deepsets_by_tensor" the weights of
            each tensor as one.
        data: The zoo, as the metanetwork is given it.
    """
    if name == "mlp":
        return ls.FlatMLP(data.layout, bounded=True)
    if name == "dmc":
        return ls.DMC(data.layout, bounded=True)
    if name == "statnn":
        return ls.StatNN(data.layout, bounded=True, precomputed=True)
    if name == "graph":
        return ls.GraphMetanetwork.from_network(data.zoo.network(0), bounded=True)
    return ls.WeightDeepSets(data.layout, bounded=True, per_tensor=name == "deepsets_by_tensor")


def make_data(setting: Setting, folder: str, name: Name) -> ls.ZooData:
    """Return a zoo as a metanetwork is given it."""
    return ls.ZooData(
        folder,
        batch_size=setting.metanet_batch_size,
        splits=setting.splits,
        split_seed=setting.split_seed,
        eval_batch_size=EVAL_BATCH_SIZE,
        features="statistics" if name == "statnn" else "weights",
    )


def train(setting: Setting, job: Job, folder: str, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Train a metanetwork and return what was measured; from the training's folder, where that was done before.

    Args:
        setting: The setting.
        job: What to train.
        folder: Folder of the zoo.
        tick: Reports finished epochs.
    """
    quiet()
    out = Path(setting.out_dir) / "trainings" / f"{job.kind}-{job.metanetwork}-{job.learning_rate:g}-{job.seed}"
    data = make_data(setting, folder, job.metanetwork)
    values = asdict(setting)
    names = ("metanet_epochs", "metanet_batch_size", "metanet_decay", "splits", "split_seed")
    settings = asdict(job) | {name: values[name] for name in names} | {"zoo": weights_digest(data.zoo)}

    def make() -> dict[str, Any]:
        pl.seed_everything(job.seed, verbose=False)
        metanetwork = make_metanetwork(job.metanetwork, data)
        module = ls.WeightRegression(metanetwork, job.learning_rate, setting.metanet_decay)
        epochs = setting.metanet_epochs
        trainer = make_trainer(
            out,
            [Ticks(tick)],
            max_epochs=epochs,
            limit_val_batches=1.0,
            check_val_every_n_epoch=max(1, epochs // 5),
            log_every_n_steps=1,
        )
        trainer.fit(module, datamodule=data)
        found = trainer.validate(module, datamodule=data, verbose=False)[0]
        found |= trainer.test(module, datamodule=data, verbose=False)[0]
        predicted = torch.cat(trainer.predict(module, data.eval_dataloader("test")))
        return {
            "parameters": sum(parameter.numel() for parameter in metanetwork.parameters()),
            **{name.replace("/", "_"): float(value) for name, value in found.items()},
            "predicted": predicted.tolist(),
            "true": data.targets("test").tolist(),
        }

    result = stored(out / "result.json", settings, make)
    if not result["new"]:
        tick(setting.metanet_epochs)
    return result


def train_all(setting: Setting, folders: dict[str, str], jobs: list[Job], description: str) -> list[dict[str, Any]]:
    """Train metanetworks over the worker processes and return their results, in the order of the jobs."""
    order = sorted(range(len(jobs)), key=lambda place: DEAREST_FIRST.index(jobs[place].metanetwork))
    results = run_jobs(
        train,
        [{"setting": setting, "job": jobs[place], "folder": folders[jobs[place].kind]} for place in order],
        len(jobs) * setting.metanet_epochs,
        worker_count(setting.workers),
        description,
    )
    return [results[order.index(place)] for place in range(len(jobs))]


def best_rates(results: list[dict[str, Any]]) -> dict[tuple[str, Name], float]:
    """Return the learning rate of the best validation R^2 of each metanetwork on each zoo.

    Raises:
        UsageError: If all trainings of one diverged.
    """
    scores: dict[tuple[str, Name], dict[float, float]] = {}
    for result in results:
        pair = result["kind"], result["metanetwork"]
        scores.setdefault(pair, {})[result["learning_rate"]] = result["val_r2"]
    try:
        return {pair: ls.select_learning_rate(found) for pair, found in scores.items()}
    except ValueError as error:
        raise UsageError(f"All of `learning_rates` diverged: {error}") from None


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of the runs with the chosen learning rates."""
    quiet()
    if setting.runs < 1 or not setting.learning_rates or not setting.metanetworks:
        raise UsageError("Expected at least one run, learning rate and metanetwork.")
    if setting.zoos:
        zoos = {name: ls.Zoo.open(folder) for name, folder in setting.zoos.items()}
    else:
        zoos = train_zoos(setting)
        if zoos is None:  # a shard, and nothing more
            return []
    if "statnn" in setting.metanetworks:
        for zoo in zoos.values():
            zoo_statistics(zoo)  # now, not by each worker
    folders = {kind: str(zoo.path) for kind, zoo in zoos.items()}
    pairs = list(product(folders, setting.metanetworks))
    search = [Job(*pair, rate, setting.metanet_seed) for pair in pairs for rate in setting.learning_rates]
    searched = train_all(setting, folders, search, "learning rates")
    rates = best_rates(searched)
    seeds = range(setting.metanet_seed + 1, setting.metanet_seed + 1 + setting.runs)
    results = train_all(setting, folders, [Job(*pair, rates[pair], s) for pair in pairs for s in seeds], "runs")
    tables = {"metanetworks": results_table(results)}
    print("\n" + tables["metanetworks"])
    if not setting.zoos:
        tables["zoos"] = zoo_table(zoos)
    content = {"setting": asdict(setting), "search": searched, "results": results}
    publish(Path(setting.out_dir), "metanetworks", draw(results), tables, content)
    return results


if __name__ == "__main__":
    run_script(main, Setting)
