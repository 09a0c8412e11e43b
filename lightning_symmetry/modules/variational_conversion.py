"""Which layers of a LightningModule get a posterior, and what it predicts with."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_symmetry.modules.predictor import MEASURES, predictor_of
from lightning_symmetry.variational.candidates import find_layers, why_left_alone
from lightning_symmetry.variational.convert import to_variational
from lightning_symmetry.variational.layer import VariationalLayer


def is_variational(module: nn.Module) -> bool:
    """Whether a module has variational layers."""
    return any(isinstance(part, VariationalLayer) for part in module.modules())


def makes_layers_later(cls: type, mixin: type) -> bool:
    """Whether a class may make layers after the constructor of a mixin: by one in front of it or ``configure_model``.

    Args:
        cls: The class.
        mixin: The mixin.
    """
    order = cls.__mro__
    front, behind = order[: order.index(mixin)], order[order.index(mixin) + 1 : order.index(pl.LightningModule)]
    constructs = any("__init__" in vars(base) for base in front)
    return constructs or any("configure_model" in vars(base) for base in (*front, *behind))


def convert(module: pl.LightningModule, posterior: Mapping[str, Any]) -> bool:
    """Give the layers of a module a posterior, but for those of metrics and losses; return whether there are any.

    Args:
        module: The module.
        posterior: Arguments of :func:`~lightning_symmetry.variational.to_variational`.

    Raises:
        ValueError: If one of them is none, or a pattern matches nothing.
    """
    layers = find_layers(module)
    others = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, MEASURES))
    spared = {name for name in layers if name.startswith(others)}
    if not layers.keys() - spared - why_left_alone(module, layers).keys():
        return False
    to_variational(module, **{**posterior, "skip": [*posterior.get("skip", ()), *map(glob.escape, spared)]})
    return True


def averaged_predictor(module: pl.LightningModule, name: str | None) -> nn.Module:
    """Return the submodule whose outputs are averaged.

    Args:
        module: The module.
        name: See :func:`~lightning_symmetry.modules.predictor.predictor_of`.

    Raises:
        MisconfigurationException: If there is none of that name, or it does not hold all variational layers.
    """
    found = predictor_of(module, name)
    if name is None:
        return found
    inside = set(found.modules())
    for layer_name, layer in module.named_modules():
        if isinstance(layer, VariationalLayer) and layer not in inside:
            raise MisconfigurationException(
                f"`predictor` is {name!r}, but the variational layer {layer_name!r} is not in it: its samples would "
                "not be averaged."
            )
    return found
