"""Build the network of a zoo from the name of a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_symmetry.metanets.zoo_files import canonical


def described_factory(function: str | None, arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a header says about how to build a network.

    Args:
        function: ``"module:function"``, or None.
        arguments: Its keyword arguments.

    Raises:
        ValueError: If there is nothing to import, or the arguments are no JSON.
    """
    if function is None:
        if arguments:
            raise ValueError(f"Expected argument `factory` where there are factory_arguments, {dict(arguments)!r}.")
        return None
    imported(function)
    try:
        canonical(dict(arguments or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected `factory_arguments` that can be written as JSON, but got {arguments!r}.") from error
    return {"function": function, "arguments": dict(arguments or {})}


def imported(function: str) -> Callable[..., nn.Module]:
    """Return a function by its name.

    Args:
        function: ``"module:function"``.

    Raises:
        ValueError: If it cannot be imported.
    """
    module, _, name = function.partition(":")
    try:
        if not name:
            raise ImportError("there is no colon")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"Expected `factory` to be 'module:function', both importable, but got {function!r}: {error}."
        ) from error


def build(function: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Build a network on the CPU, in evaluation mode, without moving the global random state.

    Args:
        function: What builds it.
        arguments: Its keyword arguments.
    """
    with torch.random.fork_rng(devices=[]):
        return function(**arguments).cpu().eval()
