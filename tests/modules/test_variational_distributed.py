"""Two processes: noise of their own, one network, and the bound that a single process has in expectation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from bayesian_modules import WIDE, Bayesian, assert_same_state, samples, trainer
from distributed import launch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from lightning_symmetry.variational import kl_divergence

SCRIPT = """
import os
import sys

import lightning.pytorch as pl
import torch
from bayesian_modules import WIDE, Bayesian, bayesian, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_variational_distributed import ELBO, REPEATS, equal, message_of, repeated, subset

folder = sys.argv[1]
rank = int(os.environ.get("LOCAL_RANK", 0))
DDP = {"devices": 2, "strategy": "ddp"}

os.environ.pop("PL_GLOBAL_SEED", None)  # nobody called seed_everything: the seed of the first process counts
module = Bayesian(num_samples_train=2, posterior=WIDE)
torch.default_generator.manual_seed(1000 + rank)
run = trainer(max_epochs=1, accumulate_grad_batches=2, **DDP)
run.fit(module, equal())
result = {"outputs": module.outputs, "seed": module._vi_seed}

pl.seed_everything(5)
module = bayesian()
saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
run = trainer(saver, max_epochs=4, enable_checkpointing=True, **DDP)
run.fit(module, loader("train"), loader("val"))
result["metrics"] = {name: float(value) for name, value in run.callback_metrics.items()}
result["state"] = module.state_dict()

resumed = bayesian()
run = trainer(max_epochs=4, **DDP)
run.fit(resumed, loader("train"), loader("val"), ckpt_path=f"{folder}/epoch=1.ckpt")
result["resumed"] = resumed.state_dict()
(result["tested"],) = run.test(resumed, loader("test"), verbose=False)

pl.seed_everything(6)
module = Bayesian(**ELBO)
run = trainer(max_epochs=1, **DDP)
run.fit(module, repeated(13))
result["losses"] = module.losses
result["elbo"] = {name: float(value) for name, value in run.callback_metrics.items()}

module = Bayesian(posterior=WIDE)
run = trainer(max_epochs=1, **DDP)
run.fit(module, subset())
result["subset"] = {name: float(value) for name, value in run.callback_metrics.items()}

result["own"] = message_of(lambda: trainer(use_distributed_sampler=False, **DDP).fit(Bayesian(), loader("train")))
torch.save(result, f"{folder}/{rank}.pt")
"""

REPEATS = 200
ELBO: dict[str, Any] = {"posterior": WIDE, "temperature": 0.5}


def equal() -> DataLoader:
    """Eight batches in each process, all of the same samples."""
    x, y = samples("train").tensors
    return DataLoader(TensorDataset(x[:1].expand(64, -1), y[:1].expand(64)), 4)


def repeated(batch_size: int) -> DataLoader:
    x, y = samples("train").tensors
    return DataLoader(TensorDataset(x.repeat(REPEATS, 1), y.repeat(REPEATS)), batch_size)


def subset() -> DataLoader:
    return DataLoader(samples("train"), 4, sampler=SubsetRandomSampler(range(11)))


def message_of(call: Any) -> str:
    try:
        call()
    except MisconfigurationException as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        launch(SCRIPT, folder, timeout=400)
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_noise_differs_between_processes_and_accumulated_batches(ranks):
    assert [rank["seed"] for rank in ranks] == [1000, 1000]
    outputs = [output for rank in ranks for output in rank["outputs"]]
    assert len(outputs) == 2 * 8 * 2
    for i, output in enumerate(outputs):
        assert not any(torch.allclose(output, other, atol=1e-3) for other in outputs[:i])


@pytest.mark.slow
def test_both_have_one_network_and_one_log(ranks):
    first, second = ranks
    assert_same_state(first["state"], second["state"])
    assert first["metrics"] == second["metrics"] and first["tested"] == second["tested"]
    metrics = first["metrics"]
    assert metrics["vi/elbo"] == pytest.approx(-metrics["vi/nll"] - metrics["vi/kl"] / 26, rel=1e-6)
    assert metrics["train/loss"] == pytest.approx(metrics["vi/nll"], rel=1e-6)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(ranks):
    for rank in ranks:
        assert_same_state(rank["resumed"], rank["state"])


@pytest.mark.slow
def test_the_bound_is_that_of_one_process(ranks):
    """The divergence to rounding of its mean in float32; the loss over 200 steps at learning rate 0 within |z| < 4."""
    pl.seed_everything(6)
    module = Bayesian(**ELBO)
    run = trainer(max_epochs=1)
    run.fit(module, repeated(26))
    single = {name: float(value) for name, value in run.callback_metrics.items()}
    for rank in ranks:
        found = rank["elbo"]
        assert found["vi/kl"] == pytest.approx(single["vi/kl"], rel=1e-5)
        assert found["vi/kl"] == pytest.approx(float(kl_divergence(module).detach()), rel=1e-5)
        assert found["vi/elbo"] == pytest.approx(-found["vi/nll"] - found["vi/kl"] / (26 * REPEATS), rel=1e-6)
    both, alone = torch.tensor([rank["losses"] for rank in ranks]).mean(0), torch.tensor(module.losses)
    assert len(both) == len(alone) == REPEATS
    assert ranks[0]["elbo"]["vi/nll"] == pytest.approx(float(both.mean()), rel=1e-5)
    error = float((both.var() / REPEATS + alone.var() / REPEATS).sqrt())
    assert abs(float(both.mean() - alone.mean())) < 4 * error
    assert error < 0.02 * float(alone.mean())


@pytest.mark.slow
def test_the_number_of_samples_is_that_of_all_processes(ranks):
    for rank in ranks:
        found = rank["subset"]
        assert found["vi/elbo"] == pytest.approx(-found["vi/nll"] - found["vi/kl"] / 11, rel=1e-6)
        assert "each process draws by itself" in rank["own"] and "num_data=" in rank["own"]
