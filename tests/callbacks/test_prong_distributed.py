"""Two processes that share batches train as one on the whole batch; coefficients are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import launch
from prong_reference import Regression, Trajectory, data, deviation, fit, network, stream

from lightning_symmetry.callbacks.prong import PRONG

SCRIPT = """
import sys

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from prong_reference import Regression, Trajectory, data, fit, network, stream
from test_prong_distributed import SETTINGS, shares

from lightning_symmetry.callbacks.prong import PRONG

folder = sys.argv[1]


class Coefficients(Trajectory):
    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, run, module, *args):
        super().on_train_batch_end(run, module, *args)
        parts = [part.whitening_matrix() for part in module.modules() if hasattr(part, "whitening_matrix")]
        self.states.append([tensor.clone() for pair in parts for tensor in pair])


for name, (optimizer, arguments) in SETTINGS.items():
    prong, seen = PRONG(**arguments), Coefficients()
    module = Regression(network(), optimizer)
    rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
    saver = ModelCheckpoint(folder, filename=name + "{step}", save_top_k=-1, every_n_train_steps=4)
    run = fit(
        module, prong, seen, saver, steps=10, loader=stream(shares(rank)), strategy="ddp", devices=2,
        use_distributed_sampler=False, enable_checkpointing=True,
    )
    result = {"values": seen.values, "states": seen.states, "count": prong.num_reparametrizations,
              "failures": prong.failures, "measured": prong.measured, "world": run.world_size}
    torch.save(result, f"{folder}/{name}_{run.global_rank}.pt")

    resumed = Regression(network(3).double(), optimizer)  # else Lightning loads float64 into float32
    fit(
        resumed, PRONG(**arguments), steps=10, loader=stream(shares(rank)[8:]), strategy="ddp", devices=2,
        use_distributed_sampler=False, ckpt_path=f"{folder}/{name}step=8.ckpt",
    )
    torch.save(list(resumed.net.state_dict().values()), f"{folder}/{name}_resumed_{run.global_rank}.pt")
"""

SETTINGS = {
    "stream": (None, {"every_n_steps": 3, "num_samples": 16}),
    "more": (None, {"every_n_steps": 5, "num_samples": 26}),
    "average": (None, {"every_n_steps": 3, "num_samples": 16, "ema": 0.5}),
    "plus": (None, {"every_n_steps": 4, "num_samples": 16, "plus": True}),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), {"every_n_steps": 3, "num_samples": 16}),
    "fixed": (None, {"every_n_steps": 3, "samples": [[x[:9], y[:9]] for x, y in [data(200).tensors]]}),
}


def shares(rank: int) -> list:
    """Ten batches of 8: the share of a rank of batches of 16."""
    inputs, targets = data(160).tensors
    return [
        (x[rank * 8 : rank * 8 + 8], y[rank * 8 : rank * 8 + 8])
        for x, y in zip(inputs.split(16), targets.split(16), strict=True)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    launch(SCRIPT, folder)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_are_as_one(runs, name):
    optimizer, arguments = SETTINGS[name]
    ranks = [torch.load(runs / f"{name}_{rank}.pt") for rank in range(2)]
    prong, trajectory = PRONG(**arguments), Trajectory()
    inputs, targets = data(160).tensors
    whole = stream(list(zip(inputs.split(16), targets.split(16), strict=True)))
    fit(Regression(network(), optimizer), prong, trajectory, steps=10, loader=whole)
    unwhitened = Trajectory()
    fit(Regression(network(), optimizer), unwhitened, steps=10, loader=whole)
    assert deviation(trajectory.values, unwhitened.values) > 0.1
    for rank in ranks:
        assert rank["world"] == 2
        assert rank["failures"] == 0
        assert rank["count"] == prong.num_reparametrizations
        assert deviation(rank["values"], trajectory.values) < 1e-9
        assert rank["measured"].keys() == prong.measured.keys()
    for a, b in zip(ranks[0]["states"], ranks[1]["states"], strict=True):
        assert all(map(torch.equal, a, b))
    assert not torch.equal(ranks[0]["states"][0][-2], ranks[0]["states"][-1][-2])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_is_exact_on_every_rank(runs, name):
    if name == "more":
        pytest.skip("needs samples from before the checkpoint")
    for rank in range(2):
        whole = torch.load(runs / f"{name}_{rank}.pt")["values"][-1]
        assert all(map(torch.equal, torch.load(runs / f"{name}_resumed_{rank}.pt"), whole))
