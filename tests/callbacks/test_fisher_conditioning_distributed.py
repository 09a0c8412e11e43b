"""In two processes the first one measures; both have what it has measured."""

from __future__ import annotations

import pytest
import torch
from distributed import launch
from prong_reference import Regression, data, fit, stream

from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning
from lightning_symmetry.callbacks.prong import PRONG

SCRIPT = """
import os
import sys

import torch
from prong_reference import Regression, fit, stream
from test_fisher_conditioning_distributed import callbacks
from test_prong_distributed import shares

fisher, prong = callbacks()
rank = int(os.environ.get("LOCAL_RANK", 0))
run = fit(
    Regression(), fisher, prong, steps=6, loader=stream(shares(rank)), strategy="ddp", devices=2,
    use_distributed_sampler=False,
)
torch.save({"history": fisher.history, "world": run.world_size}, f"{sys.argv[1]}/{run.global_rank}.pt")
"""


def callbacks() -> tuple[FisherConditioning, PRONG]:
    inputs, targets = data().tensors
    fisher = FisherConditioning(["net.0", "net.2"], 3, "mse", batch=(inputs, targets), progress=False)
    return fisher, PRONG(4, 16, 0.01)


def test_two_processes_measure_what_one_does(tmp_path):
    launch(SCRIPT, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["world"] == 2
    assert first == second
    fisher, prong = callbacks()
    inputs, targets = data(160).tensors
    whole = stream(list(zip(inputs.split(16), targets.split(16), strict=True)))
    fit(Regression(), fisher, prong, steps=6, loader=whole)
    assert len(fisher.history) == len(first["history"]) == 2 * 6
    for row, other in zip(fisher.history, first["history"], strict=True):
        assert {k: other[k] for k in ("step", "layer", "reparametrization", "rank")} == {
            k: row[k] for k in ("step", "layer", "reparametrization", "rank")
        }
        assert other["condition"] == pytest.approx(row["condition"], rel=1e-6)
