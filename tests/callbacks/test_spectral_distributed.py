"""Two processes train as one on the whole batch; their factors and moments are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import launch
from spectral_runs import Mixed, Regression, fit, network, whole_batches

from lightning_symmetry.callbacks import SpectralFactorization

SCRIPT = """
import os
import sys

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from spectral_runs import Regression, Vanish, assert_in_order, fit, shares
from test_spectral_distributed import NETS, SETTINGS

from lightning_symmetry.callbacks import SpectralFactorization

folder = sys.argv[1]
rank = int(os.environ.get("LOCAL_RANK", 0))
SHARED = {"devices": 2, "use_distributed_sampler": False}


def states(run):
    return [v for state in run.optimizers[0].state.values() for v in state.values() if v is not None]


for name, (net, optimizer, strategy, settings) in SETTINGS.items():
    module, callback = Regression(NETS[net](), optimizer), SpectralFactorization(at_step=4, **settings)
    saver = ModelCheckpoint(folder, filename=name + "{step}", save_top_k=-1, every_n_train_steps=5)
    shared = {**SHARED, "strategy": strategy}
    run = fit(module, callback, saver, steps=10, data=shares(rank), enable_checkpointing=True, **shared)
    assert_in_order(run, module)
    measured = callback.measured
    values = list(module.state_dict().values())
    result = {"values": values, "states": states(run), "losses": module.losses, "measured": measured}
    torch.save({**result, "report": str(callback.report)}, f"{folder}/{name}_{rank}.pt")

    resumed = Regression(NETS[net](), optimizer)
    again = fit(
        resumed, SpectralFactorization(at_step=4, **settings), steps=10, data=shares(rank)[5:],
        ckpt_path=f"{folder}/{name}step=5.ckpt", **shared,
    )
    values = list(resumed.state_dict().values())
    torch.save({"values": values, "states": states(again)}, f"{folder}/{name}_again_{rank}.pt")

module = Regression()
before = list(module.parameters())
try:
    callbacks = Vanish(), SpectralFactorization(at_step=3)
    fit(module, *callbacks, steps=10, data=shares(rank), strategy="ddp", **SHARED)
except Exception as error:
    assert "cannot factorise" in str(error), error
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    open(f"{folder}/refused_{rank}", "w").close()
"""

NETS = {"linear": network, "mixed": lambda: torch.manual_seed(0) and Mixed()}
SETTINGS = {
    "momentum": ("linear", "momentum", "ddp", {"rank": 0.5, "min_saving": -1}),
    "adamw": ("linear", "adamw", "ddp", {"rank": 2}),
    "random": ("linear", "fused", "ddp", {"rank": 0.25, "init": "random", "seed": 3}),
    "mixed": ("mixed", "momentum", "ddp_find_unused_parameters_true", {"rank": 0.5, "min_saving": -1}),
    "unused": (
        "linear",
        "adamw",
        "ddp_find_unused_parameters_true",
        {"rank": "energy:0.8", "moments": "reset", "min_saving": -1},
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    launch(SCRIPT, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_are_as_one(runs, name):
    net, optimizer, _, settings = SETTINGS[name]
    ranks = [torch.load(runs / f"{name}_{rank}.pt") for rank in range(2)]
    for key in ("values", "states"):
        assert all(map(torch.equal, ranks[0][key], ranks[1][key]))
    assert ranks[0]["report"] == ranks[1]["report"]
    module, callback = Regression(NETS[net](), optimizer), SpectralFactorization(at_step=4, **settings)
    fit(module, callback, steps=10, data=whole_batches())
    for ours, alone in zip(ranks[0]["values"], module.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-3, atol=1e-5)
    losses = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(module.losses, rel=1e-3)
    for rank in ranks:
        assert rank["measured"] == pytest.approx(callback.measured, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_is_exact_on_every_rank(runs, name):
    for rank in range(2):
        whole, again = (torch.load(runs / f"{name}_{which}{rank}.pt") for which in ("", "again_"))
        for key in ("values", "states"):
            assert all(map(torch.equal, whole[key], again[key]))


@pytest.mark.slow
def test_what_cannot_be_factorised_is_refused_on_every_rank(runs):
    assert all((runs / f"refused_{rank}").exists() for rank in range(2))
