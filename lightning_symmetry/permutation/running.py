"""Run a network under a dispatch mode by the same operations every time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_symmetry.surgery import call, evaluating, without_attention_fast_path


class DynamicNetworkError(ValueError):
    """The network's computation depends on the values that flow through it."""


def run_plainly(net: nn.Module, example_input: Any, mode: TorchDispatchMode) -> Any:
    """Run a network under a dispatch mode, in evaluation mode, by the same operations every time.

    Raises:
        ValueError: If the network cannot be called with the input.
    """
    stack = getattr(mode, "modules", [])
    with (
        evaluating(net),
        without_attention_fast_path(),
        _plain_recurrence(net),
        torch.compiler.set_stance("force_eager"),
        _module_names(net, stack),
        mode,
    ):
        try:
            return call(net, example_input)
        except (DynamicNetworkError, KeyboardInterrupt):
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(example_input)) or "no tensor"
            raise ValueError(
                f"{type(net).__name__} cannot be called with the example input ({shapes}), in "
                f"{(stack[-1] if stack else '') or 'the network itself'}: {error}"
            ) from error


@contextmanager
def _plain_recurrence(net: nn.Module) -> Iterator[None]:
    """Keep recurrent layers from kernels that run all time steps at once."""
    if not any(isinstance(module, nn.RNNBase) for module in net.modules()):
        yield
        return
    # Not by flags(), which refuses to run next to newer settings of precision.
    libraries = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, was in zip(libraries, enabled, strict=True):
            library.enabled = was


@contextmanager
def _module_names(net: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the running modules on a stack."""

    def leave(*_: Any) -> None:
        stack.pop()

    handles = []
    for name, module in net.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
            handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, dataclasses, graphs and other objects, in order."""
    return list(_tensors(value, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple | list | set):
        parts = value
    elif isinstance(value, type | nn.Module | FunctionType | ModuleType) or id(value) in seen:
        return
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif hasattr(value, "to_dict"):
        parts = value.to_dict().values()
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    else:
        return
    seen.add(id(value))
    for part in parts:
        yield from _tensors(part, seen)
