"""Small samples of three classes, and a quiet trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 5, 3
SIZES = {"train": 26, "val": 14, "test": 11}


def samples(split: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(SIZES[split], FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def loader(split: str, shuffle: bool = False, batch_size: int = 8) -> DataLoader:
    return DataLoader(samples(split), batch_size=batch_size, shuffle=shuffle)


def trainer(*callbacks: pl.Callback, max_epochs: int = 2, **kwargs: Any) -> pl.Trainer:
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(max_epochs=max_epochs, callbacks=list(callbacks), **{**settings, **kwargs})
