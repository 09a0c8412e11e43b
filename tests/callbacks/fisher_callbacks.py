"""Callbacks that measure the small regression network, and its rows."""

from __future__ import annotations

from typing import Any

from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning
from lightning_symmetry.callbacks.prong import PRONG

LAYERS = ["net.0", "net.2"]


def callback(**kwargs: Any) -> FisherConditioning:
    settings = {"layers": LAYERS, "every_n_steps": 2, "likelihood": "mse", "num_samples": 40, "progress": False}
    return FisherConditioning(**{**settings, **kwargs})


def prong(**kwargs: Any) -> PRONG:
    return PRONG(**{"every_n_steps": 4, "num_samples": 8, "eps": 0.01, **kwargs})


def of(history: list[dict[str, Any]], layer: str) -> list[dict[str, Any]]:
    return [row for row in history if row["layer"] == layer]
