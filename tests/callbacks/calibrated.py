"""A module whose validation and test steps predict, and calibration computed by hand."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_modules import Plain, TinyData, samples, trainer
from torch import Tensor, nn

from lightning_symmetry.callbacks.calibration_bins import CalibrationBins, CalibrationResult, score


class Validated(Plain):
    """Validates and tests its network, which it calls itself or by its own forward."""

    def __init__(self, net: nn.Module | None = None, own: bool = False) -> None:
        super().__init__(net)
        self.own = own

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        output = self(batch[0]) if self.own else self.net(batch[0])
        self.log("val/loss", F.cross_entropy(output, batch[1]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx)


def fit(module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    run = trainer(*callbacks, **kwargs)
    run.fit(module, datamodule=TinyData(shuffle=False))
    return run


def measured(output: Tensor, target: Tensor, num_bins: int = 15, parts: int = 1, **kwargs: Any) -> CalibrationResult:
    bins = CalibrationBins(num_bins)
    for some, classes in zip(output.tensor_split(parts), target.tensor_split(parts), strict=True):
        bins.update(score(some, classes, **kwargs))
    return bins.result()


def by_hand(probabilities: Tensor, target: Tensor, num_bins: int = 15) -> dict[str, Any]:
    """All measures of probabilities of several classes, one sample after the other, in float64."""
    edges = torch.linspace(0, 1, num_bins + 1, dtype=probabilities.dtype).double().tolist()
    rows = probabilities.double().numpy()
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for i, row in enumerate(rows):
        members[max(b for b in range(num_bins) if edges[b] <= row.max())].append(i)
    hit = rows.argmax(1) == target.numpy()
    confidence = [float(rows[m].max(1).mean()) if m else float("nan") for m in members]
    hits = [float(hit[m].mean()) if m else float("nan") for m in members]
    gaps = [abs(a - c) for a, c, m in zip(hits, confidence, members, strict=True) if m]
    weights = [len(m) / len(rows) for m in members if m]
    true = rows[np.arange(len(rows)), target.numpy()]
    with np.errstate(divide="ignore"):
        nll = float(-np.log(true).mean())
    return {
        "count": [len(m) for m in members],
        "confidence": confidence,
        "hits": hits,
        "ece": float(np.dot(gaps, weights)),
        "mce": max(gaps),
        "nll": nll,
        "brier": float(((rows - np.eye(rows.shape[1])[target.numpy()]) ** 2).sum(1).mean()),
        "accuracy": float(hit.mean()),
        "num_samples": len(rows),
        "num_classes": rows.shape[1],
    }


def assert_agrees(result: CalibrationResult, expected: dict[str, Any], tolerance: float = 2e-6) -> None:
    for key, value in expected.items():
        assert getattr(result, key) == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), key


def outputs_of(net: nn.Module, split: str) -> tuple[Tensor, Tensor]:
    net = copy.deepcopy(net).eval()
    with torch.no_grad():
        return net(samples(split).tensors[0]).softmax(1), samples(split).tensors[1]
