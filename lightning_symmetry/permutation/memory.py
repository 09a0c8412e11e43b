"""Which tensors of a traced network share memory, what is known of it, and how to put it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from lightning_symmetry.permutation.axes import Axis, freeze_axes, new_axes

_ALIASED = "its memory is also seen by a tensor that is not in the state dict"


@dataclass
class Stored:
    """What is known of a piece of memory, and so of all tensors that are views of it.

    Attributes:
        real: Whether its values depend on parameters or on real-valued inputs.
        flows: Whether they depend on an input.
        axes: Axes of tensors that cover it.
        kept: Whether it belongs to the network or its caller and must be as before afterwards.
        ref: Keeps the identity of the memory from being used again.
        copy: What it held before it was first written to.
    """

    real: bool = False
    flows: bool = False
    axes: list[Axis] = field(default_factory=list)
    kept: bool = False
    ref: Any = None
    copy: Tensor | None = None


class Memory:
    """The memory of all tensors of a forward pass."""

    def __init__(self) -> None:
        self._strided: dict[int, Stored] = {}
        self._other: Any = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> Stored:
        """Return what is known of the memory of a tensor."""
        if tensor.layout != torch.strided:
            return self._other.setdefault(tensor, Stored())
        storage = tensor.untyped_storage()
        stored = self._strided.get(storage._cdata)
        if stored is None:
            stored = self._strided[storage._cdata] = Stored(ref=StorageWeakRef(storage))
        return stored

    def keep(self, tensor: Tensor, axes: list[Axis], flows: bool) -> None:
        """Note a tensor of the network or an input."""
        stored = self.of(tensor)
        stored.real |= tensor.is_floating_point() or tensor.is_complex()
        stored.flows |= flows
        stored.axes += axes
        stored.kept = True

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy what is about to be overwritten and must be as before afterwards."""
        for tensor in tensors:
            stored = self.of(tensor)
            if stored.kept and stored.copy is None and tensor.layout == torch.strided:
                whole = _whole(tensor)
                stored.copy = whole.clone()
                stored.ref = whole

    def restore(self) -> None:
        """Put back what was overwritten."""
        with torch.no_grad():
            for stored in self._strided.values():
                if stored.copy is not None:
                    stored.ref.copy_(stored.copy)


def _whole(tensor: Tensor) -> Tensor:
    """Return all the memory of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def state_axes(state: Mapping[str, Tensor], others: Sequence[Tensor]) -> dict[int, list[Axis]]:
    """Return the axes of each tensor of a state dict, by identity.

    Tensors that are views of the same entries in the same layout have the same axes. Those that overlap otherwise, or
    with one of ``others``, are frozen.
    """
    axes: dict[int, list[Axis]] = {}
    layouts: dict[tuple, list[Axis]] = {}
    spans: dict[int, list[tuple[int, int, Tensor]]] = {}
    for tensor in state.values():
        if id(tensor) in axes:
            continue
        if tensor.layout != torch.strided or not tensor.numel():
            axes[id(tensor)] = new_axes(tensor.shape)
            continue
        start = tensor.storage_offset() * tensor.itemsize
        end = start + tensor.itemsize * (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        address = tensor.untyped_storage()._cdata
        layout = (address, start, tensor.dtype, tensor.shape, tensor.stride())
        axes[id(tensor)] = layouts.setdefault(layout, new_axes(tensor.shape))
        spans.setdefault(address, []).append((start, end, tensor))
    for pieces in spans.values():
        for (start, end, one), (other_start, other_end, other) in combinations(pieces, 2):
            if start < other_end and other_start < end and axes[id(one)] is not axes[id(other)]:
                freeze_axes(
                    [*axes[id(one)], *axes[id(other)]], "it shares memory with another tensor in another layout"
                )
    for tensor in others:
        if tensor.layout == torch.strided and id(tensor) not in axes:
            for _, _, aliased in spans.get(tensor.untyped_storage()._cdata, ()):
                freeze_axes(axes[id(aliased)], _ALIASED)
    return axes


@contextmanager
def attributes_kept(net: nn.Module) -> Iterator[None]:
    """Put parameters and buffers that a forward pass has replaced by others back in their places."""
    modules = [module for module in net.modules() if not isinstance(module, torch.jit.ScriptModule)]
    places = [(kind, dict(kind)) for module in modules for kind in (module._parameters, module._buffers)]
    try:
        yield
    finally:
        for kind, before in places:
            if kind.keys() != before.keys() or any(kind[name] is not before[name] for name in before):
                kind.clear()
                kind.update(before)


def reader(check: Callable[[str, Sequence[Tensor]], None]) -> torch.overrides.TorchFunctionMode:
    """Return a mode that has values checked that leave PyTorch unseen by its dispatcher."""
    return _Reader(check)


class _Reader(torch.overrides.TorchFunctionMode):
    _READS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)

    def __init__(self, check: Callable[[str, Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS:
            self._check(func.__name__, args[:1])
        return func(*args, **(kwargs or {}))
