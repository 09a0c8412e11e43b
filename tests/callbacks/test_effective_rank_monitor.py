"""Effective ranks are logged when they are due, and spectra drawn."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import Regression, Rows, fit, network
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_symmetry import asymmetrize
from lightning_symmetry.callbacks import EffectiveRankMonitor, SpectralFactorization


def dense_effective_rank(weight: torch.Tensor) -> float:
    weight = weight.detach().double()
    return float(torch.linalg.matrix_norm(weight, "nuc") / torch.linalg.matrix_norm(weight, 2))


def test_effective_ranks_are_logged_by_step():
    module, logger, monitor = Regression(), Rows(), EffectiveRankMonitor(every_n_steps=4)
    callbacks = SpectralFactorization(at_step=7, rank=3), monitor
    fit(module, *callbacks, steps=12, logger=logger, accumulate_grad_batches=2)
    rows = {row["step"]: row for row in logger.rows if "effective_rank/mean" in row}
    assert list(rows) == [0, 4, 8, 12]
    start = network()
    for index in (0, 2, 4):
        name = f"effective_rank/net.{index}"
        assert rows[0][name] == pytest.approx(dense_effective_rank(start[index].weight), rel=1e-6)
        assert rows[12][name] == pytest.approx(dense_effective_rank(weight_of(module.net[index])), rel=1e-4)
    assert rows[8]["effective_rank/net.2"] < 3 < rows[4]["effective_rank/net.2"]
    values = [value for key, value in rows[12].items() if key.startswith("effective_rank/net.")]
    assert rows[12]["effective_rank/mean"] == pytest.approx(sum(values) / 3)


def weight_of(layer: nn.Module) -> torch.Tensor:
    return layer.canonical_weight() if hasattr(layer, "canonical_weight") else layer.weight


def test_histograms_and_one_figure(tmp_path):
    monitor = EffectiveRankMonitor(every_n_steps=5, layers=["net.[02]"])
    fit(Regression(), SpectralFactorization(at_step=6), monitor, steps=10, logger=TensorBoardLogger(tmp_path))
    (folder,) = tmp_path.glob("*/version_0")
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload()
    tags = events.Tags()
    assert sorted(tags["histograms"]) == ["singular_values/net.0", "singular_values/net.2"]
    assert [event.step for event in events.Histograms("singular_values/net.0")] == [0, 5, 10]
    assert tags["images"] == ["singular_values"]
    assert len(events.Images("singular_values")) == 1
    assert "effective_rank/net.4" not in tags["scalars"]


def test_nothing_else_is_changed():
    modules = [Regression(nn.Sequential(*network(), nn.Dropout(0.5))) for _ in range(2)]
    for module, callbacks in zip(modules, ([], [EffectiveRankMonitor(1)]), strict=True):
        torch.manual_seed(1)
        fit(module, *callbacks, steps=5, logger=Rows())
    assert modules[0].losses == modules[1].losses


def test_other_kinds_of_layers():
    net = nn.Sequential(asymmetrize(network(), n_fix=2, kappa=1.0), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1))
    module, logger = Regression(nn.Sequential(net, nn.Flatten())), Rows()
    fit(module, EffectiveRankMonitor(), steps=1, logger=logger)
    assert sum(key.startswith("effective_rank/") for key in logger.rows[0]) == 5


def test_a_weight_that_is_not_finite_is_left_out_and_warned_of():
    module, logger = Regression(), Rows()
    with torch.no_grad():
        module.net[2].weight[0, 0] = torch.nan
    with pytest.warns(UserWarning, match=r"leaves out net.2: their weights are not finite"):
        fit(module, EffectiveRankMonitor(), steps=1, logger=logger)
    assert "effective_rank/net.2" not in logger.rows[0]
    assert "effective_rank/net.0" in logger.rows[0]


def test_a_resumed_run_knows_the_spectra_of_the_start(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="end", every_n_train_steps=5)
    monitor = EffectiveRankMonitor(every_n_steps=5)
    fit(Regression(), monitor, saver, steps=5, enable_checkpointing=True)
    resumed = EffectiveRankMonitor(every_n_steps=5)
    fit(Regression(), resumed, steps=10, ckpt_path=tmp_path / "end.ckpt")
    first, again = monitor.state_dict()["first"], resumed.state_dict()["first"]
    assert all(torch.equal(values, again[name]) for name, values in first.items())


@pytest.mark.parametrize(
    ("arguments", "message"), [({"every_n_steps": 0}, "at least 1 but got 0"), ({"layers": ["head"]}, "'head'")]
)
def test_refusals(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(Regression(), EffectiveRankMonitor(**arguments), steps=1)
