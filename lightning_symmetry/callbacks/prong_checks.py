"""What PRONG refuses, each with what to do instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_symmetry.callbacks.refusals import AVERAGING
from lightning_symmetry.whitening.explicit import ExplicitWhitenedLayer
from lightning_symmetry.whitening.layer import HasWhitening


def check_arguments(
    every_n_steps: int, num_samples: int, eps: float, mode: str, ema: float | None, coordinates: str, plus: bool
) -> None:
    """Check the arguments of :class:`~lightning_symmetry.callbacks.prong.PRONG`.

    Raises:
        MisconfigurationException: If one is out of range.
    """
    if every_n_steps < 1:
        raise MisconfigurationException(f"Expected `every_n_steps` to be at least 1 but got {every_n_steps}.")
    if num_samples < 2:
        raise MisconfigurationException(f"Expected `num_samples` to be at least 2 but got {num_samples}.")
    if not (eps > 0 and math.isfinite(eps)):
        raise MisconfigurationException(f"Expected `eps` to be positive and finite but got {eps}.")
    if mode not in ("full", "diagonal", "center"):
        raise MisconfigurationException(f"Expected `mode` to be 'full', 'diagonal' or 'center' but got {mode!r}.")
    if ema is not None and not 0 < ema < 1:
        raise MisconfigurationException(f"Expected `ema` to lie between 0 and 1 but got {ema}.")
    if coordinates not in ("auto", "canonical", "explicit"):
        raise MisconfigurationException(
            f"Expected `coordinates` to be 'auto', 'canonical' or 'explicit' but got {coordinates!r}."
        )
    if plus and mode == "center":
        raise MisconfigurationException(
            "PRONG(plus=True) rescales whitened units, but mode='center' whitens none. Use 'full' or 'diagonal'."
        )


def check_module(module: pl.LightningModule) -> None:
    """Check that statistics can be taken from the module's training step.

    Raises:
        MisconfigurationException: If it steps its optimizers itself, or fetches its batches itself.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"PRONG runs the training step of {type(module).__name__} once more to take its statistics, but with "
            "manual optimization that would step the optimizers. Use automatic optimization, or whiten() and "
            "reparametrize() of lightning_symmetry in the training step."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "PRONG takes its statistics from batches, but this training step takes a `dataloader_iter`."
        )


def takes_explicit(optimizers: Sequence[Optimizer], coordinates: str) -> bool:
    """Return whether V and d are to be the parameters, and warn where they should be but are not."""
    others = [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, torch.optim.SGD)]
    if others and coordinates == "canonical":
        rank_zero_warn(
            f"{others[0]} acts on each entry of the weights by itself, and so not in whitened coordinates: it sees "
            "preconditioned gradients, but does not follow PRONG. Use coordinates='auto', or SGD."
        )
    return coordinates == "explicit" or (coordinates == "auto" and bool(others))


def check_coefficients(coefficients: Mapping[str, Mapping[str, Any]], layers: Mapping[str, HasWhitening]) -> None:
    """Check that coefficients of a checkpoint are for the layers of this run.

    Raises:
        MisconfigurationException: If a layer is not whitened, or in other coordinates.
    """
    for name, state in coefficients.items():
        if name not in layers or ("weight" in state) != isinstance(layers[name], ExplicitWhitenedLayer):
            raise MisconfigurationException(
                f"The checkpoint has whitening coefficients for {name}, which is not whitened in this run, or not "
                "in the same coordinates: resume with the `skip`, `overrides`, `coordinates` and optimizer that "
                "it was written with, or with weights only."
            )


def check_explicit(trainer: pl.Trainer, layers: Sequence[Any]) -> None:
    """Check that nothing but the optimizer touches parameters that are V and d.

    Raises:
        MisconfigurationException: If weights are averaged, or optimizer states are spread over ranks.
    """
    if not layers:
        return
    averaging = [c for c in trainer.callbacks if isinstance(c, AVERAGING)]
    if averaging:
        raise MisconfigurationException(
            f"{type(averaging[0]).__name__} averages parameters, but with this optimizer those are in whitened "
            "coordinates, which change. Use SGD, or coordinates='canonical'."
        )
    if any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            "ZeroRedundancyOptimizer spreads its states over the ranks, so that momentum cannot be carried through a "
            "change of coordinates. Use a plain optimizer, or coordinates='canonical'."
        )


def warn_once(failed: Mapping[str, str], warned: set[str]) -> None:
    """Warn of the layers that keep their coefficients, of each the first time; ``warned`` grows."""
    new = {name: reason for name, reason in failed.items() if name not in warned}
    if new:
        warned.update(new)
        listed = "; ".join(f"{name} ({reason})" for name, reason in new.items())
        rank_zero_warn(f"PRONG left {len(new)} layer(s) with the coefficients that they had: {listed}.")
