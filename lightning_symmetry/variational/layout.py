"""Which layers of a network have a posterior of which settings, and the same ones for another network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from lightning_symmetry.surgery import module_names, uncompiled
from lightning_symmetry.surgery.layout import Layout, restructure
from lightning_symmetry.variational.candidates import LAYERS, base_of, plain_kind
from lightning_symmetry.variational.convert import to_mean
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.settings import Posterior


def layout_of(net: nn.Module) -> Layout:
    """Return the settings of each variational layer by its first name, in plain types.

    Args:
        net: The network.

    Returns:
        ``{name: {"rank", "diagonal", "variance", "prior", "mode", "scale"}}``; empty for a deterministic network.
    """
    found = {names[0]: module for module, names in module_names(net).items() if isinstance(module, VariationalLayer)}
    return {name: _settings_of(layer) for name, layer in found.items()}


def apply_layout(net: nn.Module, layout: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a network exactly the variational layers of a layout, and deterministic ones elsewhere, in place.

    The means keep their values; factors and logarithms of variances are to be loaded afterwards.

    Args:
        net: The network; one that has that layout stays as it is, values included.
        layout: The layout, as :func:`layout_of` gives it.

    Raises:
        ValueError: If the network has no such layers; it is then as it was.
    """
    if layout_of(net) == layout:
        return
    restructure(net, layout, to_mean, _build)


def _settings_of(layer: VariationalLayer) -> dict[str, Any]:
    settings = {**asdict(layer.posterior), "mode": layer.mode}
    return {key: float(value) if isinstance(value, float) else value for key, value in settings.items()}  # no NumPy's


def _build(name: str, layer: nn.Module, settings: Mapping[str, Any]) -> VariationalLayer:
    kind = LAYERS.get(plain_kind(layer))
    if kind is None:
        raise ValueError(f"The checkpoint has a posterior for {name!r}, but it is a {type(layer).__name__}.")
    return kind.from_layer(base_of(layer), Posterior(**settings), name=uncompiled(name))
