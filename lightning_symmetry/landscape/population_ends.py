"""The networks at the ends of many segments: given one by one, or as stacked states."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_symmetry.landscape.segment import Segment
from lightning_symmetry.surgery import check_constants, constants_of

State = Mapping[str, Tensor]
EndsLike = Sequence[nn.Module] | State | tuple[State, State]


class Ends:
    """Networks of one architecture with the same constants, by number.

    Args:
        network: The architecture and the constants.
        ends: The networks; or their stacked parameters and buffers by name, each of shape ``(K, *shape)``, in one
            dictionary or as the two that ``torch.func.stack_module_state`` returns. Constants may be missing.
        name: What to call them in errors.

    Raises:
        ValueError: If one of them differs from ``network`` in architecture or constants, or a stacked state is not
            whole; the message names both sides.
        TypeError: If they are neither networks nor tensors.
    """

    def __init__(self, network: nn.Module, ends: EndsLike, name: str) -> None:
        self._name = name
        self._networks: Sequence[nn.Module] | None = None
        if isinstance(ends, Mapping):
            self._stack = dict(ends)
        elif isinstance(ends, tuple) and len(ends) == 2 and all(isinstance(part, Mapping) for part in ends):
            self._stack = {**ends[0], **ends[1]}
        else:
            self._networks = ends
            self._length = len(ends)
            for place, end in enumerate(ends):
                _check_network(network, end, f"{name}[{place}]")
            return
        self._network = copy.deepcopy(network)
        self._check_stack()

    def __len__(self) -> int:
        return self._length

    @torch.no_grad()
    def __getitem__(self, place: int) -> nn.Module:
        """Return a network, which of a stacked state holds until the next one is asked for."""
        if self._networks is not None:
            return self._networks[place]
        for name, tensor in _tensors(self._network).items():
            if name in self._stack:
                tensor.copy_(self._stack[name][place])
        return self._network

    def _check_stack(self) -> None:
        tensors, constants = _tensors(self._network), constants_of(self._network)
        if wrong := [name for name, value in self._stack.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"Expected tensors in the stacked `{self._name}` but got {wrong[0]} of another type.")
        if missing := [name for name in tensors if name not in self._stack and name not in constants]:
            raise ValueError(_differ("`network`", f"the stacked `{self._name}`", missing))
        if unknown := [name for name in self._stack if name not in tensors]:
            raise ValueError(_differ(f"the stacked `{self._name}`", "`network`", unknown))
        lengths = {len(value) if value.ndim else 0 for value in self._stack.values()}
        self._length = min(lengths, default=0)
        for name, value in self._stack.items():
            if value.shape != (self._length, *tensors[name].shape):
                raise ValueError(
                    f"Expected {name} of the stacked `{self._name}` to have the shape of `network`'s after the number "
                    f"of networks, {(self._length, *tensors[name].shape)}, but got {tuple(value.shape)}."
                )
        given = {name: value for name, value in constants.items() if name in self._stack}
        for place in range(self._length):
            here = {name: self._stack[name][place] for name in given}
            check_constants(given, here, "`network`", f"`{self._name}` {place}")


def _check_network(network: nn.Module, end: nn.Module, name: str) -> None:
    if not isinstance(end, nn.Module):
        raise TypeError(f"Expected networks or one stacked state, but {name} is of type {type(end).__name__}.")
    check_constants(constants_of(network), constants_of(end), "`network`", name)
    try:
        Segment(network, end)
    except ValueError as error:
        raise ValueError(f"{name} (b) is not of the architecture of `network` (a). {error}") from error


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _differ(side: str, other: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"The networks differ in architecture: {side} has {', '.join(names[:3])}{more}, {other} does not."
