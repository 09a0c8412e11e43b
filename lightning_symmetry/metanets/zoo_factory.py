"""Build the network of a zoo from the name of a function."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.zoo_files import ZooHeader, canonical
from lightning_symmetry.metanets.zoo_layout import ZooLayout


def described_factory(function: str | None, arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a header says about how to build a network.

    Args:
        function: ``"module:function"``, or None.
        arguments: Its keyword arguments.

    Returns:
        ``{"function": ..., "arguments": {...}}`` as a header gives it back, with tuples as lists; None for None.

    Raises:
        ValueError: If there is nothing to import, or the arguments are no JSON.
    """
    if function is None:
        if arguments:
            raise ValueError(f"Expected argument `factory` where there are factory_arguments, {dict(arguments)!r}.")
        return None
    imported(function)
    try:
        return {"function": function, "arguments": json.loads(canonical(dict(arguments or {})))}
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected `factory_arguments` that can be written as JSON, but got {arguments!r}.") from error


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


def build(function: Callable[..., nn.Module], arguments: Mapping[str, Any], seed: int | None = None) -> nn.Module:
    """Build a network on the CPU, in evaluation mode, without moving the global random state.

    Args:
        function: What builds it.
        arguments: Its keyword arguments.
        seed: Seed of its weights; None for torch's random state as it is.
    """
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(int(seed))  # torch.manual_seed would seed other devices too
        return function(**arguments).cpu().eval()


def zoo_network(
    path: Path,
    header: ZooHeader,
    factory: Callable[[], nn.Module] | None,
    seed: int | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Build the network of a zoo, on the CPU, in evaluation mode, without moving the global random state.

    Args:
        path: Folder of the zoo.
        header: Its header.
        factory: What builds the network, called without arguments; None for the factory in the header.
        seed: Seed of its weights; None for torch's random state as it is.
        constants: What the network's constants must be; None for whatever they are.

    Raises:
        ValueError: If it is not known how to build it, or what is built is another network or has other constants.
    """
    made_by = header.factory
    if factory is not None:
        network, title = build(factory, {}, seed), "factory="
    elif made_by is not None:
        network, title = build(imported(made_by["function"]), made_by["arguments"], seed), made_by["function"]
    else:
        raise ValueError(f"{path} does not say how to build its network: Zoo.open(path, factory=...).")
    if found := header.layout.difference(ZooLayout.of(network), str(path), f"what {title} builds"):
        raise ValueError(f"{title} builds another network than that of {path}: {found}.")
    state = network.state_dict()
    for name, value in (constants or {}).items():
        if not torch.equal(state[name].to_dense(), value.to_dense()):
            raise ValueError(
                f"{path} has other constants than what {title} builds: {name} differs. Give Zoo.open a `factory` that "
                "makes networks asymmetric with the zoo's seed."
            )
    return network


def seeded_network(factory: str | Callable[..., nn.Module], seed: int, **arguments: Any) -> nn.Module:
    """Build the untrained network that belongs to a seed, on the CPU, without moving the global random state.

    Torch's random numbers on the CPU begin at ``torch.manual_seed(seed)``; those of NumPy and of Python are not
    seeded, so a factory is to draw from torch only.

    Args:
        factory: What builds it, or its name as ``"module:function"``.
        seed: Seed of its weights.
        **arguments: Keyword arguments of the factory.

    Returns:
        The network, in evaluation mode.

    Raises:
        ValueError: If the factory cannot be imported.
    """
    return build(imported(factory) if isinstance(factory, str) else factory, arguments, seed)


def factory_name(factory: str | Callable[..., nn.Module]) -> str | None:
    """Return ``"module:function"`` of what can be imported from anywhere; None for all else.

    Args:
        factory: A function, or its name.
    """
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if not module or not name or module == "__main__":  # which is another module in the next script
        return None
    try:
        return f"{module}:{name}" if imported(f"{module}:{name}") is factory else None
    except ValueError:
        return None
