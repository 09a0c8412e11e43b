"""The coordinates that an optimizer steps in: U and c of whitened layers, and whether they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_symmetry.whitening.applied import Applied
from lightning_symmetry.whitening.collect import whitened_layers
from lightning_symmetry.whitening.fisher_operator import Coefficients
from lightning_symmetry.whitening.layer import HasWhitening

Coordinates = Mapping[str, Coefficients | None]  # U and c by layer name; None: canonical


class Looking:
    """Follows the coordinates of some layers.

    Args:
        names: Names of layers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._raw: dict[str, tuple[Tensor | None, ...] | None] = {}
        self._present: dict[str, Coefficients | None] = {}

    def look(self, module: nn.Module) -> Coordinates:
        """Return the coordinates in which an optimizer steps now: U and c of whitened layers, on the CPU."""
        layers = whitened_layers(module)
        for name in self._names:
            raw = _raw(layers.get(name))
            if name not in self._raw or not _same(raw, self._raw[name]):
                self._raw[name] = raw
                matrix = None if raw is None else layers[name].whitening_matrix()
                self._present[name] = None if matrix is None else tuple(t.detach().cpu() for t in matrix)
        return dict(self._present)


def coordinates_differ(a: Coordinates, b: Coordinates) -> bool:
    """Whether two systems of coordinates differ by more than rounding."""
    for name, old in a.items():
        new = b.get(name)
        if old is new:
            continue
        if old is None or new is None:
            return True
        if any(x.shape != y.shape or (x - y).abs().max() > 1e-9 * x.abs().max() for x, y in zip(old, new, strict=True)):
            return True
    return False


def _raw(layer: HasWhitening | None) -> tuple[Tensor | None, ...] | None:
    """Return what a layer's coefficients are made of; None where they change nothing."""
    if layer is None:
        return None
    state = layer.whitening_state()
    raw = tuple(state[name] for name in Applied._fields)
    return None if Applied(*raw).is_identity else raw


def _same(a: tuple[Tensor | None, ...] | None, b: tuple[Tensor | None, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True))
