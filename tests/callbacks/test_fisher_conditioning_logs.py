"""What FisherConditioning logs, what it skips, where its samples come from, and what it refuses."""

from __future__ import annotations

import math
from csv import DictReader
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fisher_callbacks import LAYERS, callback, of, prong
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from prong_reference import Regression, batches, data, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_interpolation_leaves_no_trace import assert_equal
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning


def test_eigenvalues_near_zero_are_left_out_and_a_changing_rank_is_warned_of():
    torch.manual_seed(0)
    dead = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))
    fisher = callback(every_n_steps=1)
    with pytest.warns(UserWarning, match=r"rank of the Fisher block of .*net.* changes: condition numbers") as caught:
        fit(Regression(dead, lambda p: torch.optim.SGD(p, lr=0.5)), fisher, steps=6)
    assert sum("rank of the Fisher block" in str(w.message) for w in caught) == 1
    assert all(row["rank"] < 70 and row["smallest"] > 0 for row in of(fisher.history, "net.2"))


class Breaks(pl.Callback):
    def on_train_batch_end(self, run: pl.Trainer, module: Regression, *args: Any) -> None:
        if run.global_step == 2:
            with torch.no_grad():
                module.net[2].weight.fill_(math.nan)


def test_values_that_are_not_finite_are_skipped_with_one_warning():
    fisher = callback(every_n_steps=1)
    with pytest.warns(UserWarning, match=r"could not measure net.0 \(The network's outputs") as caught:
        run = fit(Regression(), Breaks(), fisher, steps=5)
    assert run.global_step == 5
    assert sum("could not measure" in str(w.message) for w in caught) == 1
    assert [row["step"] for row in of(fisher.history, "net.0")] == [0, 1]
    assert fisher.failures == 8  # two layers, after 2, 3, 4 and 5 steps


def test_a_fit_that_is_not_finite_from_the_start_goes_on():
    module = Regression()
    nn.init.constant_(module.net[0].weight, math.nan)
    fisher = callback(every_n_steps=2)
    with pytest.warns(UserWarning, match="could not measure"):
        run = fit(module, fisher, steps=3)
    assert run.global_step == 3
    assert fisher.history == []
    assert fisher.failures == 6


def test_what_is_logged(tmp_path):
    csv, board = CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")
    fisher = callback()
    fit(Regression(), prong(), fisher, steps=5, logger=[csv, board], log_every_n_steps=1)
    with open(f"{csv.log_dir}/metrics.csv") as file:
        logged = [row for row in DictReader(file) if row["fisher/net.0/condition"]]
    rows = of(fisher.history, "net.0")
    assert [int(row["step"]) for row in logged] == [row["step"] for row in rows]
    for key in ("condition", "percent", "largest", "smallest", "rank"):
        assert [float(row[f"fisher/net.0/{key}"]) for row in logged] == [row[key] for row in rows]
    events = EventAccumulator(board.log_dir).Reload()
    scalars = events.Scalars("fisher/net.2/condition")
    assert [scalar.step for scalar in scalars] == [row["step"] for row in rows]
    pictures = {f"fisher/{layer}/{moment}" for layer in LAYERS for moment in ("start", "before", "after", "end")}
    assert set(events.Tags()["images"]) == pictures | {"fisher/condition"}


def test_the_figure():
    fisher = callback()
    fit(Regression(), prong(), fisher, steps=3)
    (ax,) = fisher.plot("condition").axes
    for line, layer in zip(ax.lines, LAYERS, strict=True):
        assert line.get_label() == layer
        assert line.get_ydata().tolist() == [row["condition"] for row in of(fisher.history, layer)]
    with pytest.raises(ValueError, match="'trace'"):
        fisher.plot("trace")


def test_the_samples_are_the_first_ones_whatever_the_batches():
    inputs, targets = data().tensors
    histories = []
    for fisher, loader in [
        (callback(batch=(inputs[:20], targets[:20])), batches()),
        (callback(num_samples=20), batches()),
        (callback(num_samples=20), batches(batch_size=7)),
        (callback(num_samples=20), DataLoader(data(), 8, shuffle=True)),
    ]:
        fit(Regression(), fisher, steps=1, loader=loader)
        histories.append([row for row in fisher.history if row["step"] == 0])
    for history in histories[1:]:
        assert_equal(history, histories[0])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(list(data()))


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Stream(), 8), DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 8, False))],
)
def test_data_whose_order_would_move_is_refused(loader):
    with pytest.raises(MisconfigurationException, match="give it a `batch`"):
        fit(Regression(), callback(), steps=1, loader=loader)
    fisher = callback(batch=next(iter(batches(batch_size=40))))
    fit(Regression(), fisher, steps=1, loader=loader)
    assert len(fisher.history) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` to be at least 1 but got 0"),
        ({"num_samples": 0}, "`num_samples`"),
        ({"max_size": 0}, "`max_size`"),
        ({"damping": -1.0}, "`damping`"),
        ({"damping": math.inf}, "`damping`"),
        ({"rank_tolerance": 1.0}, "`rank_tolerance`"),
        ({"reparametrizations": "last"}, "`reparametrizations`.*'last'"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        FisherConditioning(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["head"]}, "'head'"),
        ({"layers": []}, "empty"),
        ({"likelihood": "bernoulli"}, "'bernoulli' takes probabilities"),
        ({"likelihood": "poisson"}, "'poisson'"),
        ({"max_size": 69}, r"net.2 has 70 rows, more than max_size=69.*`damping`"),
    ],
)
def test_fits(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(Regression(), callback(**arguments), steps=1)


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_shard_parameters(kind):
    run = SimpleNamespace(strategy=kind())  # they need accelerators to train
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__} shards them"):
        callback().setup(run, Regression(), "fit")


def test_two_of_them_need_different_names():
    one, two = callback(layers="net.0"), callback(layers="net.2", name="second")
    fit(Regression(), one, two, steps=2)
    assert [row["layer"] for row in two.history] == ["net.2"] * 2
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        fit(Regression(), callback(), callback(), steps=1)


def test_accumulation_counts_optimizer_steps():
    fisher = callback()
    fit(Regression(), fisher, steps=4, accumulate_grad_batches=2)
    steps = [row["step"] for row in of(fisher.history, "net.0")]
    assert steps == [0, 2, 4]
    assert all(a < b for a, b in pairwise(steps))
