"""Find the hidden layers of a network whose units can be rescaled one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_symmetry.surgery import HasConstants, ReparametrizedLayer, tied_parameters

_CONVOLUTIONS = {nn.Conv1d: -2, nn.Conv2d: -3}
_NONE: frozenset[str] = frozenset()


@torch.no_grad()
def hidden_layers(net: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, int], list[str]]:
    """Run a network once and find its hidden layers.

    A layer is hidden if what it gives reaches the result of ``run`` through another layer with parameters only. All
    others are output layers, whatever stands between them and the result (a loss, a selection, an activation).
    Hidden layers that feed batch normalisation are not listed: it undoes any rescaling of their units.

    Args:
        net: The network, in the mode in which it is to run.
        run: Calls it and returns its outputs, or a loss.

    Returns:
        Axis of the units of each layer that can be rescaled, by name in the order of the calls, and the names of the
        hidden layers that cannot be: those in other coordinates or with constants, with tied weights or with a
        ``forward`` of their own.
    """
    origins = _Origins()
    tied = tied_parameters(net)
    called: dict[str, nn.Module] = {}
    absorbed: set[str] = set()

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            called.setdefault(name, module)
            origins.restart(output, name, unit_axis(module))

        return hook

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            absorbed.update(origins.units_along(args[0], 1))

    handles = []
    try:
        for name, module in net.named_modules():
            if _is_layer(module):
                handles.append(module.register_forward_hook(after(name)))
            if isinstance(module, _BatchNorm):
                handles.append(module.register_forward_pre_hook(before))
        with origins:
            result = run()
    finally:
        for handle in handles:
            handle.remove()
    weighted = {name: module for name, module in called.items() if _is_weighted(module)}
    outputs = frozenset().union(*map(origins.of, _tensors(result))) or frozenset(list(weighted)[-1:])
    axes: dict[str, int] = {}
    others: list[str] = []
    for name, module in weighted.items():
        if name in outputs or name in absorbed:
            continue
        axis = unit_axis(module)
        if axis is None or name in tied:
            others.append(name)
        else:
            axes[name] = axis
    return axes, others


def unit_axis(module: nn.Module) -> int | None:
    """Return the axis of the output along which the rows of the weight act, None if they cannot be rescaled."""
    if isinstance(module, ReparametrizedLayer | HasConstants) or module._parameters.get("weight") is None:
        return None
    if type(module).forward is nn.Linear.forward:
        return -1
    for kind, axis in _CONVOLUTIONS.items():
        if type(module).forward is kind.forward and type(module)._conv_forward is kind._conv_forward:
            return axis
    return None


def _is_layer(module: nn.Module) -> bool:
    """Whether what a module gives is a layer's output, however many modules it has within."""
    if _is_weighted(module) or isinstance(module, HasConstants | nn.MultiheadAttention):
        return True
    return any(p is not None for p in module._parameters.values()) and not any(module.children())


def _is_weighted(module: nn.Module) -> bool:
    return isinstance(module, ReparametrizedLayer | nn.Linear | nn.Conv1d | nn.Conv2d)


class _Origins(TorchDispatchMode):
    """The layers that each tensor comes from, through operations but through no other layer.

    Storages are followed rather than tensors, so that writing into a view counts for the whole. Weak references keep
    their numbers from being used again, though not their memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[Hashable, frozenset[str]] = {}
        self._untouched: dict[Hashable, tuple[str, tuple[int, int, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        names = _NONE.union(*map(self.of, _tensors((args, kwargs))))
        for tensor in _tensors(output):
            self._of[_storage(tensor)] = names
            if func._schema.is_mutable:
                self._untouched.pop(_storage(tensor), None)
        return output

    def restart(self, output: Any, name: str, axis: int | None) -> None:
        """Note that a layer gave ``output``, whatever its input came from."""
        for tensor in _tensors(output):
            self._of[_storage(tensor)] = frozenset([name])
            if axis is not None:
                self._untouched[_storage(tensor)] = name, _layout(tensor, axis)

    def of(self, tensor: Tensor) -> frozenset[str]:
        """Return the layers that a tensor comes from."""
        return self._of.get(_storage(tensor), _NONE)

    def units_along(self, tensor: Tensor, axis: int) -> list[str]:
        """Return the layer that gave just these values, if ``axis`` holds its units."""
        name, layout = self._untouched.get(_storage(tensor), ("", None))
        return [name] if tensor.ndim > axis and layout == _layout(tensor, axis) else []


def _layout(tensor: Tensor, axis: int) -> tuple[int, int, int]:
    return tensor.numel(), tensor.shape[axis], tensor.stride(axis)


def _storage(tensor: Tensor) -> Hashable:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except NotImplementedError:  # a sparse tensor
        return id(tensor)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
