"""Align a reference with the module that a Trainer has trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_symmetry.permutation import Alignment, align, trace_permutations
from lightning_symmetry.permutation.activations import first_of_batch

AlignBy = Literal["weights", "activations"]
MOST_BATCHES = 100  # to match activations on


def example_for(module: pl.LightningModule, loader: Iterable[Any], transfer: Callable[[Any], Any]) -> Any:
    """Return what the module's ``forward`` is called with: its ``example_input_array``, or the first batch's input.

    Raises:
        MisconfigurationException: If there is neither.
    """
    item = next(iter(loader), None)
    if module.example_input_array is not None:
        return transfer((module.example_input_array, 0, 0))[0]
    if item is None:
        raise MisconfigurationException("There is no batch to trace the module's permutation symmetries with.")
    return first_of_batch(transfer(item)[0])


def check_alignable(module: pl.LightningModule, example: Any) -> None:
    """Check that a module has units which can be permuted.

    Raises:
        MisconfigurationException: If it cannot be traced, or nothing in it can be permuted.
    """
    try:
        spec = trace_permutations(module, example)
    except ValueError as error:
        raise MisconfigurationException(
            f"The permutation symmetries of {type(module).__name__} cannot be traced: {error} `forward` is called with "
            "`example_input_array`, or with the first part of a batch; set the former where the latter does not fit."
        ) from error
    if not spec.groups:
        raise MisconfigurationException(spec.why_nothing())


def align_reference(
    reference: pl.LightningModule,
    trained: pl.LightningModule,
    trainer: pl.Trainer,
    method: AlignBy,
    loader: Iterable[Any],
    transfer: Callable[[Any], Any],
    progress: bool,
) -> Alignment:
    """Permute a reference so that it comes close to the trained module; every rank has the permutations of the first.

    Args:
        reference: A module of the same architecture.
        trained: The module to come close to.
        trainer: Its trainer.
        method: ``"weights"`` or ``"activations"``, those on the first 100 batches.
        loader: Batches of training data.
        transfer: Brings an item of the loader to the device.
        progress: Whether to show a progress bar.
    """
    batches = list(islice(loader, trainer.fast_dev_run or MOST_BATCHES)) if method == "activations" else None
    found = align(
        reference,
        to=trained,
        method=method,
        example_input=example_for(trained, batches or loader, transfer),
        dataloader=batches,
        inputs=lambda item: first_of_batch(transfer(item)[0]),
        progress=progress,
    )
    if trainer.world_size > 1:
        permutations = trainer.strategy.broadcast(found.permutations)
        found.network.load_state_dict(found.spec.apply(reference.state_dict(), permutations))
        found = dataclasses.replace(found, permutations=permutations)
    return found
