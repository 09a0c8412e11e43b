"""What SpectralFactorization refuses, each with what to do instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.callbacks.refusals import AVERAGING
from lightning_symmetry.low_rank.plan import make_plan
from lightning_symmetry.modules.whole_parameters import check_whole_parameters
from lightning_symmetry.surgery.handover import Moments
from lightning_symmetry.surgery.optimizer_states import state_without_rule


def check_arguments(
    at_step: int | None, at_epoch: int | None, at_fraction: float | None, lr_factor: float, moments: str
) -> None:
    """Check the arguments of :class:`~lightning_symmetry.callbacks.spectral_factorization.SpectralFactorization`.

    Raises:
        MisconfigurationException: If one is out of range, or not exactly one of the first three is given.
    """
    times = {"at_step": at_step, "at_epoch": at_epoch, "at_fraction": at_fraction}
    given = {name: value for name, value in times.items() if value is not None}
    if len(given) != 1:
        raise MisconfigurationException(
            f"Expected exactly one of `at_step`, `at_epoch` and `at_fraction` but got {given or 'none'}."
        )
    for name in ("at_step", "at_epoch"):
        if name in given and not (isinstance(given[name], int) and given[name] >= 0):
            raise MisconfigurationException(f"Expected `{name}` to be a number of at least 0 but got {given[name]!r}.")
    if at_fraction is not None and not 0 <= at_fraction < 1:
        raise MisconfigurationException(f"Expected `at_fraction` to be in [0, 1) but got {at_fraction}.")
    if not (lr_factor > 0 and math.isfinite(lr_factor)):
        raise MisconfigurationException(f"Expected `lr_factor` to be positive and finite but got {lr_factor}.")
    if moments not in ("project", "reset"):
        raise MisconfigurationException(f"Expected `moments` to be 'project' or 'reset' but got {moments!r}.")


def check_trainer(trainer: pl.Trainer, kind: type[Callback]) -> None:
    """Check the trainer's strategy and its other callbacks.

    Args:
        trainer: The trainer.
        kind: The class of the callback.

    Raises:
        MisconfigurationException: If parameters are sharded, averaged, kept by name or whitened, or there are two such
            callbacks.
    """
    check_whole_parameters(trainer, kind.__name__)
    if sum(isinstance(callback, kind) for callback in trainer.callbacks) > 1:
        raise MisconfigurationException(
            f"Two {kind.__name__} would factorise the same network, which can be done once; leave one. `overrides` "
            "gives layers ranks of their own."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, AVERAGING):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages parameters one by one, but {kind.__name__} puts others in their "
                "place. Average in a second fit, of the factorised network."
            )
        if isinstance(callback, BaseFinetuning):
            raise MisconfigurationException(
                f"{type(callback).__name__} keeps the names of parameters, and finds them again when training is "
                f"resumed, but {kind.__name__} puts others in their place. Fine-tune in a fit of its own."
            )
        if isinstance(callback, PRONG):
            raise MisconfigurationException(
                f"PRONG keeps the network whitened for the time of the fit, and {kind.__name__} factorises plain "
                "weights. Use one of them in a fit of its own."
            )


def check_layers(
    module: pl.LightningModule,
    skip: Sequence[str],
    overrides: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> list[nn.Parameter]:
    """Check at the start of training, as far as it can be known, that there will be something to factorise.

    Returns:
        The parameters that will become factors, as far as it can be known.

    Raises:
        MisconfigurationException: If there will not, or a pattern or setting does not fit.
    """
    try:
        plan = make_plan(module, settings, skip, overrides)
        unsaved = plan.unsaved()
    except ValueError as error:
        raise cannot(module, error) from error
    reasons = {**dict.fromkeys(plan.skipped, "skipped"), **plan.reasons, **unsaved}
    if all(name in reasons for name in plan.layers):
        listed = "; ".join(f"{name} ({reasons[name]})" for name in plan.layers) or "it has no layers"
        raise cannot(module, f"nothing to convert: {listed}")
    return plan.weights()


def check_optimizers(trainer: pl.Trainer, name: str, weights: Sequence[nn.Parameter], moments: Moments) -> None:
    """Check that the optimizers can be handed over.

    Args:
        trainer: The trainer, with its optimizers.
        name: The callback's name.
        weights: The parameters that will become factors.
        moments: What becomes of their moments.

    Raises:
        MisconfigurationException: If states are spread over ranks, or kept of all parameters together, have no form
            for factors, or an optimizer only takes sparse gradients.
    """
    for optimizer in trainer.optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS) or kind == "ZeroRedundancyOptimizer":
            raise MisconfigurationException(
                f"{name} cannot hand {kind} over to new parameters: it keeps its state of all parameters together. Use "
                "an optimizer that keeps it for each parameter."
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise MisconfigurationException(
                f"SparseAdam takes sparse gradients only, but {name} gives a table two factors, one of them with dense "
                "gradients. Use an embedding without `sparse`, with another optimizer."
            )
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in weights if moments == "project" else ():
            if id(parameter) in held and (unknown := state_without_rule(optimizer, parameter)) is not None:
                raise MisconfigurationException(
                    f"{name} cannot project the moments of {kind}: it keeps {unknown!r} of each entry of a weight, "
                    "which has no known form for factors. Use moments='reset', or another optimizer."
                )


def cannot(module: pl.LightningModule, reason: object) -> MisconfigurationException:
    """Return the error of a network that cannot be factorised."""
    return MisconfigurationException(f"SpectralFactorization cannot factorise {type(module).__name__}: {reason}")


def warn_if_never(trainer: pl.Trainer, step: float, epoch: int | None) -> None:
    """Warn if training ends before the switch.

    Args:
        trainer: The trainer.
        step: The optimizer step that it waits for.
        epoch: The epoch that it waits for, if any.
    """
    last, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    if epoch is not None and epochs not in (None, -1) and epoch >= epochs:
        rank_zero_warn(f"SpectralFactorization waits for epoch {epoch}, but training ends after {epochs} epochs.")
    elif epoch is None and step >= last:
        rank_zero_warn(
            f"SpectralFactorization waits for the batch after optimizer step {step:.0f}, but training ends after "
            f"{last:.0f} steps: the network will stay dense."
        )
