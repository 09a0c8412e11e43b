"""How a network's state lies in a row of a zoo: names, shapes, places and roles."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_symmetry.surgery import HasConstants, constants_of

Role = Literal["parameter", "buffer", "counter", "constant"]


@dataclass(frozen=True)
class ZooEntry:
    """One tensor of a ``state_dict``.

    Attributes:
        name: Its key.
        shape: Its shape.
        dtype: Its dtype in the network, such as ``"float32"``.
        role: ``"parameter"`` and ``"buffer"`` (floating point) stand in the rows. ``"counter"`` is an integer such as
            ``num_batches_tracked``, which the manifest holds for each network. ``"constant"`` is the same in all
            networks and held once: masks and constants of asymmetric layers, every other boolean, integer or sparse
            tensor.
        offset: Where it begins in a row; None if it is not there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    offset: int | None = None

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        """Where it stands in a row.

        Raises:
            ValueError: If it stands in none.
        """
        if self.offset is None:
            raise ValueError(f"{self.name} is a {self.role}: it does not stand in the rows of weights.")
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class ZooLayout:
    """How the state of each network of a zoo is laid out, in the order of its ``state_dict``.

    Attributes:
        entries: All tensors; those with the role ``"parameter"`` or ``"buffer"`` stand one after the other in a row
            of P numbers.
    """

    entries: tuple[ZooEntry, ...]

    @classmethod
    def of(cls, network: nn.Module) -> ZooLayout:
        """Return the layout of a network.

        Args:
            network: The network.

        Returns:
            The layout.

        Raises:
            ValueError: If the ``state_dict`` holds what is neither real nor boolean, or has no floating point at all.
        """
        parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        constants, entries, offset = constants_of(network), [], 0
        for name, value in network.state_dict().items():
            if not isinstance(value, Tensor) or value.is_complex() or value.is_quantized:
                kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"A zoo holds real and boolean tensors, but {name} of the network is {kind}.")
            role = _role(value, name in parameters, name in constants)
            stands = role in ("parameter", "buffer")
            dtype = str(value.dtype).removeprefix("torch.")
            entries.append(ZooEntry(name, tuple(value.shape), dtype, role, offset if stands else None))
            offset += value.numel() if stands else 0
        if offset == 0:
            raise ValueError(f"{type(network).__name__} has no weights to put in a zoo.")
        return cls(tuple(entries))

    @classmethod
    def from_json(cls, entries: list[dict[str, Any]]) -> ZooLayout:
        """Return the layout that :meth:`to_json` described."""
        return cls(tuple(ZooEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries))

    def to_json(self) -> list[dict[str, Any]]:
        """Return a description made of lists, dictionaries, strings and numbers."""
        return [{**asdict(entry), "shape": list(entry.shape)} for entry in self.entries]

    def having(self, *roles: Role) -> tuple[ZooEntry, ...]:
        """Return the entries with one of these roles, in order."""
        return tuple(entry for entry in self.entries if entry.role in roles)

    @cached_property
    def in_rows(self) -> tuple[ZooEntry, ...]:
        """The entries that stand in a row: parameters and floating point buffers."""
        return self.having("parameter", "buffer")

    @cached_property
    def num_features(self) -> int:
        """P, the length of a row."""
        return sum(entry.numel for entry in self.in_rows)

    def unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        """Return rows as tensors by name.

        Args:
            weights: Rows, shape ``(..., P)``.

        Returns:
            For each parameter and floating point buffer a view of shape ``(..., *shape)``.

        Raises:
            ValueError: If the last axis is not P long.
        """
        if weights.shape[-1:] != (self.num_features,):
            raise ValueError(f"Expected rows of {self.num_features} weights, but got shape {tuple(weights.shape)}.")
        return {e.name: weights[..., e.place].reshape(weights.shape[:-1] + e.shape) for e in self.in_rows}

    def difference(self, other: ZooLayout, left: str, right: str) -> str | None:
        """Return what differs from another layout, naming both sides; None if they are equal.

        Args:
            other: The other layout.
            left: What to call this one.
            right: What to call the other.
        """
        if self == other:
            return None
        mine, theirs = ({entry.name: entry for entry in layout.entries} for layout in (self, other))
        for here, there, side, lacking in ((mine, theirs, left, right), (theirs, mine, right, left)):
            if missing := [name for name in here if name not in there]:
                return f"{side} has {missing[0]} ({len(missing)} tensors in all), {lacking} does not"
        for name, entry in mine.items():
            for field in ("shape", "dtype", "role"):
                if getattr(entry, field) != getattr(theirs[name], field):
                    return (
                        f"{name} has {field} {getattr(entry, field)} in {left}, "
                        f"but {getattr(theirs[name], field)} in {right}"
                    )
        return f"{left} and {right} hold the same tensors in another order"


def _role(value: Tensor, is_parameter: bool, is_constant: bool) -> Role:
    if is_constant or value.layout != torch.strided or value.dtype == torch.bool:
        return "constant"
    if value.is_floating_point():
        return "parameter" if is_parameter else "buffer"
    return "counter" if value.numel() == 1 else "constant"


def fixed_entries(network: nn.Module, layout: ZooLayout) -> Tensor:
    """Return which numbers of a row are constants of asymmetric layers.

    Args:
        network: The network.
        layout: Its layout.

    Returns:
        Booleans of shape (P,).
    """
    fixed = torch.zeros(layout.num_features, dtype=torch.bool)
    places = {entry.name: entry.place for entry in layout.in_rows}
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, HasConstants) and hasattr(module, "trainable_entries"):
            fixed[places[f"{name}.weight".lstrip(".")]] = ~module.trainable_entries().flatten().cpu()
    return fixed
