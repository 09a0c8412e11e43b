"""PRONG+ in the Trainer: units are rescaled after each optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_symmetry.whitening.explicit import ExplicitWhitenedLayer
from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.reparametrize import rescale_units


class UnitScaling:
    """Calls :func:`~lightning_symmetry.whitening.reparametrize.rescale_units` once for each optimizer step.

    Batches that are accumulated in a step count together, and so do those of all ranks: one sum over them for all
    layers, so that every rank has the same scaling.

    Args:
        trainer: The trainer, at the start of training.
        layers: The whitened layers.

    Raises:
        MisconfigurationException: If a layer has explicit parameters.
    """

    def __init__(self, trainer: pl.Trainer, layers: Mapping[str, HasWhitening]) -> None:
        explicit = [name for name, layer in layers.items() if isinstance(layer, ExplicitWhitenedLayer)]
        if explicit:
            raise MisconfigurationException(
                f"PRONG(plus=True) rescales canonical gradients, but the parameters of {explicit[0]} are explicit ones "
                "(V and d), whose second moments or decay would have to follow in each step. Use SGD with "
                "coordinates='auto', or plus=False on a network with batch normalisation before its activations."
            )
        self._step = trainer.global_step

    def after_batch(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Rescale units if there was an optimizer step since the last call."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            rescale_units(module, reduce=partial(trainer.strategy.reduce, reduce_op="sum"))


def plus_spread(layers: Iterable[HasWhitening]) -> float:
    r"""Return the largest :math:`|\log v|` of all units, 0 before the first reparametrisation."""
    spreads = [float(layer.units.variance.log().abs().max()) for layer in layers if layer.units is not None]
    return max(spreads, default=0.0)


def without_scaling(coefficients: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return layers' coefficients with D = 1 for good."""
    plain = {name: {k: v for k, v in state.items() if k != "units"} for name, state in coefficients.items()}
    for state in plain.values():
        if state.get("diagonal") is not None:
            state["diagonal"] = torch.ones_like(state["diagonal"])
    return plain
