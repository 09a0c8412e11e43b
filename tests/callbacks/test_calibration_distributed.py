"""Two processes measure what one does, each sample once, though their sampler repeats some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrated import Validated
from distributed import launch
from tiny_modules import loader, trainer

from lightning_symmetry.callbacks import Calibration

SCRIPT = """
import sys
from dataclasses import asdict

import torch
from lightning.pytorch import seed_everything
from calibrated import Validated
from tiny_modules import loader, trainer

from lightning_symmetry.callbacks import Calibration

folder = sys.argv[1]
for own in (False, True):
    seed_everything(1, verbose=False)
    callback, module = Calibration(epochs=(1,), predictor="" if own else None), Validated(own=own)
    run = trainer(callback, strategy="ddp", devices=2, max_epochs=1)
    run.fit(module, loader("train"), [loader("test", batch_size=4), loader("val", batch_size=3)])
    fitted = {key: asdict(value) for key, value in callback.result.items()}
    run.test(module, loader("test", batch_size=3), verbose=False)
    saved = {
        "net": module.state_dict(),
        "fitted": fitted,
        "tested": asdict(callback.result["test"]),
        "logged": run.callback_metrics,
        "accuracy": callback.accuracy_at,
        "ranks": run.world_size,
    }
    torch.save(saved, f"{folder}/{own}_{run.global_rank}.pt")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Results of a distributed script, by kind of module and rank."""
    folder = tmp_path_factory.mktemp("ddp")
    launch(SCRIPT, folder, timeout=150)
    return folder


@pytest.mark.parametrize("own", [False, True], ids=["a submodule", "the module itself"])
def test_processes_agree_with_one(runs, own):
    module, callback = Validated(own=own), Calibration()
    ranks = [torch.load(runs / f"{own}_{rank}.pt", weights_only=False) for rank in range(2)]
    module.load_state_dict(ranks[0]["net"])
    run = trainer(callback)
    run.validate(module, [loader("test"), loader("val")], verbose=False)
    (logged,) = run.test(module, loader("test"), verbose=False)
    for rank in ranks:
        assert rank["ranks"] == 2
        for key, values in {**rank["fitted"], "test": rank["tested"]}.items():
            expected = callback.result[key]
            assert values["count"] == expected.count
            assert values["num_samples"] == expected.num_samples
            for name in ("confidence", "hits", "ece", "mce", "nll", "brier", "accuracy"):
                value, wanted = values[name], getattr(expected, name)
                assert value == pytest.approx(wanted, rel=1e-6, nan_ok=True), (key, name)
        assert float(rank["logged"]["calibration/test_ece"]) == pytest.approx(logged["calibration/test_ece"], rel=1e-6)
        assert rank["accuracy"] == {1: pytest.approx(callback.result["val/dataloader_idx_0"].accuracy)}
