"""Change a network and its optimizers wholly or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_TABLES = ("_modules", "_parameters", "_buffers")


@contextmanager
def all_or_nothing(
    net: nn.Module, optimizers: Iterable[Optimizer] = (), schedulers: Iterable[Any] = ()
) -> Iterator[None]:
    """Put everything back where it was if what happens within fails.

    That is: which modules, parameters, buffers and attributes each part of the network has; parameters, settings and
    states of the optimizers; attributes of the schedulers. Values of tensors are not copied: what happens within must
    replace them and not write into them, but for learning rates that are tensors.

    Args:
        net: The network.
        optimizers: Its optimizers.
        schedulers: Their schedulers.
    """
    optimizers = list(optimizers)
    parts = [(part, _of_module(part)) for part in net.modules()]
    groups = [(group, _of_group(group)) for optimizer in optimizers for group in optimizer.param_groups]
    states = [(optimizer.state, dict(optimizer.state)) for optimizer in optimizers]
    attributes = [(scheduler, dict(vars(scheduler))) for scheduler in schedulers]
    try:
        yield
    except BaseException:
        for part, (values, tables) in parts:
            _refill(vars(part), values)
            for name, table in tables.items():
                _refill(values[name], table)
        for group, (values, tensors) in groups:
            _refill(group, values)
            for key, tensor in tensors.items():
                group[key].copy_(tensor)
        for state, values in states:
            _refill(state, values)
        for scheduler, values in attributes:
            _refill(vars(scheduler), values)
        raise


def _of_module(part: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    return dict(vars(part)), {name: dict(vars(part)[name]) for name in _TABLES if name in vars(part)}


def _of_group(group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = {key: list(value) if isinstance(value, list) else value for key, value in group.items()}
    return values, {key: value.clone() for key, value in group.items() if isinstance(value, Tensor)}


def _refill(table: dict[Any, Any], values: dict[Any, Any]) -> None:
    table.clear()
    table.update(values)
