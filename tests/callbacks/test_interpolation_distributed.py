"""Several processes share the positions of a segment, and end with the result of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import launch
from tiny_modules import CLASSES, Plain, assert_same, by_hand, deep_mlp, loader, mlp, supervised
from torchmetrics.classification import MulticlassAccuracy

from lightning_symmetry import PathResult

SCRIPT = """
import sys

import torch
from lightning.pytorch import seed_everything
from tiny_modules import Plain, TinyData, deep_mlp, frozen, mlp, supervised, trainer

from lightning_symmetry import LinearInterpolation
from lightning_symmetry.landscape import Segment

folder = sys.argv[1]


positions = []  # those that this process evaluates
move_to = Segment.move_to


def watched(segment, alpha):
    positions.append(alpha)
    return move_to(segment, alpha)


Segment.move_to = watched


def fit(name, module, **kwargs):
    positions.clear()
    callback = LinearInterpolation(num_points=kwargs.pop("num_points", 5), progress=False, **kwargs)
    run = trainer(callback, strategy="ddp", devices=3)
    start = frozen(module.net)
    run.fit(module, datamodule=TinyData())
    torch.save(
        {
            "start": start.state_dict(),
            "end": module.net.state_dict(),
            "loss": callback.result.loss,
            "accuracy": callback.result.metrics.get("accuracy"),
            "alphas": callback.result.alphas,
            "num_samples": callback.result.num_samples,
            "positions": positions,
            "ranks": run.world_size,
        },
        f"{folder}/{name}_{run.global_rank}.pt",
    )


seed_everything(1, verbose=False)
fit("supervised", supervised(mlp()), split="test")
fit("shuffled", Plain(mlp()), split="train")
fit("few", supervised(mlp()), split="val", num_points=2)
fit("repaired", supervised(deep_mlp()), split="val", batch_norm="repair")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Results of a distributed script, by name and rank."""
    folder = tmp_path_factory.mktemp("ddp")
    launch(SCRIPT, folder, timeout=120)
    return folder


@pytest.mark.parametrize(
    ("name", "build", "split"),
    [("supervised", supervised, "test"), ("shuffled", Plain, "train"), ("few", supervised, "val")],
)
def test_processes_agree_with_one(runs, name, build, split):
    ranks = [torch.load(runs / f"{name}_{rank}.pt") for rank in range(3)]
    start, end = build(mlp(seed=3)).net, build(mlp(seed=3)).net
    start.load_state_dict(ranks[0]["start"])
    end.load_state_dict(ranks[0]["end"])
    metrics = {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
    expected = by_hand(start, end, split, len(ranks[0]["alphas"]), metrics=metrics)
    for rank in ranks:
        assert rank["ranks"] == 3
        result = PathResult(rank["alphas"], rank["loss"], {}, rank["num_samples"])
        assert_same(result, expected)
        assert rank["num_samples"] == len(loader(split).dataset)
        if rank["accuracy"] is not None:
            torch.testing.assert_close(rank["accuracy"], expected.metrics["accuracy"], rtol=1e-6, atol=1e-6)


def test_processes_repair_as_one_does(runs):
    ranks = [torch.load(runs / f"repaired_{rank}.pt") for rank in range(3)]
    start, end = deep_mlp(), deep_mlp()
    start.load_state_dict(ranks[0]["start"])
    end.load_state_dict(ranks[0]["end"])
    expected = by_hand(start, end, "val", batch_norm="repair", train_loader=loader("train"))
    for rank in ranks:
        assert_same(PathResult(rank["alphas"], rank["loss"], {}, rank["num_samples"]), expected)


@pytest.mark.parametrize(("name", "shares"), [("supervised", [[0, 0.75], [0.25, 1], [0.5]]), ("few", [[0], [1], []])])
def test_each_process_evaluates_its_share(runs, name, shares):
    for rank, share in enumerate(shares):
        assert torch.load(runs / f"{name}_{rank}.pt")["positions"] == share
