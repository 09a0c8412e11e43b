"""Align a reference with the module that a Trainer has trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_symmetry.permutation import Alignment, align, trace_permutations
from lightning_symmetry.permutation.activations import first_of_batch
from lightning_symmetry.surgery import plain_copy

AlignBy = Literal["weights", "activations"]
MOST_BATCHES = 100  # to match activations on


def example_for(
    module: pl.LightningModule,
    trainer: pl.Trainer,
    method: AlignBy,
    loader: Iterable[Any],
    transfer: Callable[[Any], Any],
) -> Any:
    """Return what the module's ``forward`` is called with.

    That is its ``example_input_array``, but to match activations, or where there is none, the first batch's input.

    Raises:
        MisconfigurationException: If there is neither.
    """
    example = module.example_input_array
    if method == "weights" and example is not None:  # not the work of the batch transfer hooks, which expect batches
        return trainer.precision_plugin.convert_input(move_data_to_device(example, trainer.strategy.root_device))
    for item in loader:
        return first_of_batch(transfer(item)[0])
    raise MisconfigurationException("There is no batch to trace the module's permutation symmetries with.")


def check_alignable(module: pl.LightningModule, method: AlignBy, example: Any) -> None:
    """Check that a module has units which can be permuted.

    Raises:
        MisconfigurationException: If it cannot be traced, or nothing in it can be permuted.
    """
    try:
        spec = trace_permutations(plain_copy(module, keep_affine=True), example)
    except ValueError as error:
        called = {
            "weights": "`forward` is called with the module's `example_input_array`, or with the first part of a batch "
            "where it has none: set it to what `forward` takes.",
            "activations": "`forward` is called with the first part of a batch; where it does not take that, choose "
            "align='weights', which needs the module's `example_input_array` only.",
        }
        raise MisconfigurationException(
            f"The permutation symmetries of {type(module).__name__} cannot be traced: {error} {called[method]}"
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
) -> Alignment | None:
    """Permute a reference so that it comes close to the trained module; every rank has the permutations of the first.

    Args:
        reference: A plain module of the same architecture.
        trained: The module to come close to.
        trainer: Its trainer.
        method: ``"weights"`` or ``"activations"``, those on the first 100 batches.
        loader: Batches of training data.
        transfer: Brings an item of the loader to the device.
        progress: Whether to show a progress bar.

    Returns:
        The alignment; None, with a warning, if a run has diverged: nothing is similar to numbers that are not finite.

    Raises:
        ValueError: If the constants of the two differ.
    """
    for module, title in ((reference, "reference"), (trained, "trained module")):
        for name, parameter in module.named_parameters():
            if not bool(parameter.isfinite().all()):
                rank_zero_warn(f"The reference is not aligned: {name} of the {title} is not finite, it has diverged.")
                return None
    batches = list(islice(loader, trainer.fast_dev_run or MOST_BATCHES)) if method == "activations" else loader
    found = align(
        reference,
        to=plain_copy(trained, keep_affine=True),
        method=method,
        example_input=example_for(trained, trainer, method, batches, transfer),
        dataloader=batches if method == "activations" else None,
        inputs=lambda item: first_of_batch(transfer(item)[0]),
        progress=progress,
    )
    if trainer.world_size > 1:
        shared = {key: getattr(found, key) for key in ("permutations", "before", "after", "sweeps")}
        found = dataclasses.replace(found, **trainer.strategy.broadcast(shared))
        found.network.load_state_dict(found.spec.apply(reference.state_dict(), found.permutations))
    return found
