"""Run a network on an example, leaving it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def call(net: nn.Module, example_input: Any) -> Any:
    """Call ``net`` with a tensor, a tuple of positional or a dictionary of named arguments."""
    if isinstance(example_input, Mapping):
        return net(**example_input)
    if isinstance(example_input, tuple | list):
        return net(*example_input)
    return net(example_input)


def example_of(net: nn.Module, example_input: Any) -> Any:
    """Return the example input; by default the network's ``example_input_array``, in its type and on its device.

    Raises:
        ValueError: If there is neither.
    """
    if example_input is not None:
        return example_input
    example_input = getattr(net, "example_input_array", None)
    if example_input is None:
        raise ValueError(
            f"{type(net).__name__} has no `example_input_array`: give `example_input`, a tensor or a tuple or "
            "dictionary of arguments that the network can be called with."
        )
    like = next((p for p in net.parameters() if p.is_floating_point()), None)
    return example_input if like is None else _like(example_input, like)


def _like(value: Any, like: Tensor) -> Any:
    """Bring the tensors of an example to the device, and real-valued ones to the type, of a parameter."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, Mapping):
        return {key: _like(part, like) for key, part in value.items()}
    return tuple(_like(part, like) for part in value) if isinstance(value, tuple | list) else value


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, without gradients; modes and random state are as before afterwards."""
    modes = {module: module.training for module in net.modules()}
    devices = {parameter.device for parameter in net.parameters() if parameter.device.type == "cuda"}
    net.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def without_attention_fast_path() -> Iterator[None]:
    """Keep attention and transformer layers from their fused evaluation path."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def device_of(net: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer."""
    return next((tensor.device for tensor in [*net.parameters(), *net.buffers()]), torch.device("cpu"))
