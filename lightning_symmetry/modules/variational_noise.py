"""Noise of a step from a seed of its own, and the step's place, from which the seed follows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch


@contextmanager
def seeded(device: torch.device, *place: Any) -> Iterator[None]:
    """Seed the global random states of the CPU and of a device, and put them back afterwards.

    Args:
        device: The device in use; states of others stay as they are.
        *place: What the seed is drawn from, by SHA-256.
    """
    digest = hashlib.sha256("/".join(map(str, ("variational", *place))).encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    before, state = torch.get_rng_state(), None if accelerator is None else accelerator.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            accelerator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before)
        if accelerator is not None:
            accelerator.set_rng_state(state)


def finished_batches(trainer: pl.Trainer) -> int:
    """Return the number of training batches before this one in all epochs, as a checkpoint restores it."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.completed


def evaluation_place(
    trainer: pl.Trainer | None, split: str, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the indices of the loader and the batch that an evaluation step was called for.

    Args:
        trainer: The trainer, if there is one.
        split: ``"val"``, ``"test"`` or ``"predict"``.
        args: Arguments of the step.
        named: Its named arguments.
    """
    values = dict(zip(("batch", "batch_idx", "dataloader_idx"), args, strict=False)) | dict(named)
    loader, index = values.get("dataloader_idx", 0), values.get("batch_idx")
    if index is None and trainer is not None:
        loop = {"test": trainer.test_loop, "predict": trainer.predict_loop}.get(split, trainer.validate_loop)
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else loop
        index = loop.batch_progress.current.ready - 1
    return loader, index or 0
