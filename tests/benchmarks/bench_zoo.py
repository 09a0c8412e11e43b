"""Opening a zoo of 10,000 networks, and the share of reading in an epoch over it.

Run on a quiet machine with 4 GB of free disk: ``pytest tests/benchmarks/bench_zoo.py -s --basetemp=FOLDER``.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_symmetry import (
    DMC,
    FlatMLP,
    Metanetwork,
    StatNN,
    WeightDeepSets,
    WeightRegression,
    Zoo,
    ZooData,
    ZooWriter,
)
from lightning_symmetry.metanets import zoo_classifier

NETWORKS, CHUNK, BATCHES = 10_000, 500, 6
MOST_SECONDS, MOST_READING = 0.5, 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write networks of random weights of the paper's architecture, 3.1 GB."""
    path = tmp_path_factory.mktemp("zoo") / "zoo"
    with ZooWriter(path, zoo_classifier("standard", "cifar10")) as writer:
        draw = np.random.default_rng(0)
        for start in range(0, NETWORKS, CHUNK):
            rows = draw.standard_normal((CHUNK, writer.layout.num_features), dtype=np.float32)
            accuracies = draw.random(CHUNK)
            records = [
                {"index": start + i, "accuracy": accuracy, "learning_rate": 0.1, "weight_decay": 1e-3, "epochs": 20}
                for i, accuracy in enumerate(accuracies.tolist())
            ]
            writer.append(rows, records)
    yield path
    shutil.rmtree(path)


def test_opening(folder: Path) -> None:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        zoo = Zoo.open(folder)
        times.append(time.perf_counter() - start)
    assert len(zoo) == NETWORKS
    print(f"\nopening {NETWORKS} networks: {statistics.median(times):.3f} s (median of {len(times)})")
    assert statistics.median(times) <= MOST_SECONDS


@pytest.mark.parametrize("make", [FlatMLP, DMC, WeightDeepSets, StatNN])
def test_reading_in_an_epoch(folder: Path, make: type[Metanetwork], monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of an epoch of batches of 128, as a Trainer runs it, with files in the page cache."""
    torch.set_num_threads(1)  # as the recipe's worker processes
    data = ZooData(folder, batch_size=128)
    assert data.num_features == 78_042
    metanetwork = make(data.layout)
    metanetwork.normalization.fitted.fill_(True)  # else the first epoch reads everything once more
    epochs: list[float] = []
    reading: list[float] = []
    read = Zoo.read

    def timed(zoo: Zoo, positions: object = None) -> torch.Tensor:
        start = time.perf_counter()
        found = read(zoo, positions)
        reading.append(time.perf_counter() - start)
        return found

    class Clock(pl.Callback):
        def on_train_epoch_start(self, *_: object) -> None:
            reading.clear()
            epochs.append(time.perf_counter())

        def on_train_epoch_end(self, *_: object) -> None:
            epochs[-1] = time.perf_counter() - epochs[-1]

    monkeypatch.setattr(Zoo, "read", timed)
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=BATCHES,
        callbacks=[Clock()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(WeightRegression(metanetwork), data.train_dataloader())
    share = sum(reading) / epochs[0]
    print(
        f"\n{make.__name__}: {epochs[0]:.2f} s for {BATCHES} batches of an epoch, of which reading {100 * share:.1f} %"
    )
    assert share <= MOST_READING
