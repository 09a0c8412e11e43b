"""Run a network once and follow how the axes of its parameters are tied together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_symmetry.permutation import rules_reductions, rules_shapes  # noqa: F401 (they register rules)
from lightning_symmetry.permutation.axes import Axis, freeze_axes, new_axes
from lightning_symmetry.permutation.functions import NORMS, PRODUCTS, RESHAPES, UNTAGGED, function_name
from lightning_symmetry.permutation.rules import RULES, pointwise
from lightning_symmetry.permutation.rules_products import scaled_dot_product
from lightning_symmetry.permutation.terms import atoms
from lightning_symmetry.surgery import call, evaluating

_READS_VALUES = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2"}
_CONSTANT = "it is a constant that is neither parameter nor buffer"


class DynamicNetworkError(ValueError):
    """The network's computation depends on the values that flow through it."""


@dataclasses.dataclass
class Call:
    """One operation of the traced forward pass.

    Attributes:
        name: Its name.
        module: The innermost module that was running.
        axes: The axes of each tensor that came out.
        flows: Whether that depends on the network's input.
        produced: Whether it made new units: a product with a weight, or a sum of two activations.
    """

    name: str
    module: str
    axes: list[list[Axis]]
    flows: bool
    produced: bool


@dataclasses.dataclass
class Trace:
    """What one forward pass showed.

    Attributes:
        axes: The axes of each tensor of the state dict.
        frozen_by: Operations without a rule, with the modules in which they froze something.
        calls: The operations in order.
        normalised: Weights whose product is directly normalised, each with the kind of normalisation.
    """

    axes: dict[str, list[Axis]]
    frozen_by: dict[str, list[str]]
    calls: list[Call]
    normalised: list[tuple[str, str]]


class Tracer(TorchDispatchMode):
    """Follows the axes of all tensors through the operations of a forward pass.

    Args:
        parameters: Tensors of the state dict with their names and axes.
        inputs: Tensors of the example input.
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, str, list[Axis]]], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._axes: Any = WeakIdKeyDictionary()
        self._real: Any = WeakIdKeyDictionary()  # depends on parameters or on real-valued inputs
        self._flows: Any = WeakIdKeyDictionary()  # depends on an input
        self._source: Any = WeakIdKeyDictionary()  # the parameter that a tensor is, but for its shape
        self._producer: Any = WeakIdKeyDictionary()  # the weight whose product a tensor is
        self._storages: dict[int, list[Axis]] = {}
        self.used: set[int] = set()
        self.modules: list[str] = []
        self.frozen_by: dict[str, list[str]] = {}
        self.calls: list[Call] = []
        self.normalised: list[tuple[str, str]] = []
        self._depth = 0
        for tensor, name, axes in parameters:
            self._know(tensor, axes, flows=False)
            self._source[tensor] = name
            if tensor.numel() and tensor.layout == torch.strided:
                self._storages.setdefault(tensor.untyped_storage().data_ptr(), []).extend(axes)
        for tensor in inputs:
            self._know(tensor, new_axes(tensor.shape, "it belongs to the input"), flows=True)

    def _know(self, tensor: Tensor, axes: list[Axis], flows: bool) -> None:
        self._axes[tensor] = axes
        self._real[tensor] = tensor.is_floating_point() or tensor.is_complex()
        self._flows[tensor] = flows

    @property
    def where(self) -> str:
        """Name of the module that is running."""
        return (self.modules[-1] if self.modules else "") or "the network itself"

    def axes_of(self, tensor: Tensor) -> list[Axis]:
        """Return the axes of a tensor; those of one that was not seen before are frozen."""
        self.used.add(id(tensor))
        axes = self._axes.get(tensor)
        if axes is None:
            axes = self._axes[tensor] = new_axes(tensor.shape, _CONSTANT)
            if tensor.layout == torch.strided and tensor.numel():
                aliased = self._storages.get(tensor.untyped_storage().data_ptr(), [])
                freeze_axes(aliased, "it is read through a view that was made before the forward pass")
        return axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and follow the axes through it."""
        kwargs = kwargs or {}
        name, in_place = operation(func)
        tensors = tensors_in((args, kwargs))
        if name in _READS_VALUES or (name == "index" and _has_boolean(args[1])):
            self._check_values(name, tensors)
        elementwise = torch.Tag.pointwise in func.tags or name in UNTAGGED
        if not (name in RULES or elementwise or in_place or name.startswith("_scaled_dot_product")) and tensors:
            out = self._decompose(func, args, kwargs)
            if out is not NotImplemented:
                if self._depth == 0:
                    made = tensors_in(out)
                    flows = any(self._flows.get(tensor, False) for tensor in made)
                    self.calls.append(Call(name, self.where, [self.axes_of(t) for t in made], flows, False))
                return out
        if name == "as_strided" and _keeps_layout(*args):
            name, tensors = "alias", tensors[:1]
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        made = self._apply(name, elementwise, outputs, tensors, args, kwargs)
        for output, axes in zip(outputs, made, strict=True):
            self._axes[output] = axes
            self._real[output] = any(self._real.get(tensor, False) for tensor in tensors)
            self._flows[output] = any(self._flows.get(tensor, False) for tensor in tensors)
        self._note(name, elementwise, outputs, tensors, made, args)
        return out

    def _apply(
        self, name: str, elementwise: bool, outputs: list[Tensor], tensors: list[Tensor], args: Any, kwargs: Any
    ) -> list[list[Axis]]:
        rule = RULES.get(name)
        if rule is None and name.startswith("_scaled_dot_product"):
            rule = scaled_dot_product
        try:
            if rule is not None:
                return rule(self.axes_of, outputs, *args, **kwargs)
            if elementwise:
                return pointwise(self.axes_of, outputs, tensors) if tensors else [new_axes(o.shape) for o in outputs]
        except NotImplementedError:
            pass
        reason = f"{name} in {self.where} cannot be seen through"
        free = [freeze_axes(self.axes_of(tensor), reason) for tensor in tensors]
        if any(free):
            self.frozen_by.setdefault(name, []).append(self.where)
        return [new_axes(output.shape, reason) for output in outputs]

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation as the simpler ones that it stands for, if it does."""
        from torch._decomp import decomposition_table

        simpler = decomposition_table.get(func)
        self._depth += 1
        try:
            with self:
                return func.decompose(*args, **kwargs) if simpler is None else simpler(*args, **kwargs)
        finally:
            self._depth -= 1

    def _check_values(self, name: str, tensors: list[Tensor]) -> None:
        if any(self._real.get(tensor, False) for tensor in tensors):
            raise DynamicNetworkError(
                f"The network reads values that depend on its parameters or its input ({name.strip('_')} in "
                f"{self.where}), so that its computation may change with them: one forward pass does not show its "
                "symmetries. Take such a branch out of `forward`, or trace the parts by themselves."
            )

    def _note(
        self,
        name: str,
        elementwise: bool,
        outputs: list[Tensor],
        tensors: list[Tensor],
        made: list[list[Axis]],
        args: Any,
    ) -> None:
        """Remember what matters besides the axes: functions that act along them, new units, normalisations."""
        flowing = [tensor for tensor in tensors if self._flows.get(tensor, False)]
        produced = name in PRODUCTS or name.startswith("_scaled_dot_product") or (name == "add" and len(flowing) > 1)
        if self._depth == 0:
            self.calls.append(Call(name, self.where, made, bool(flowing), produced and bool(flowing)))
        if not flowing:
            if name in RESHAPES and tensors[0] in self._source:
                for output in outputs:
                    self._source[output] = self._source[tensors[0]]
            return
        if name in NORMS and flowing[0] in self._producer:
            self.normalised.append((self._producer[flowing[0]], NORMS[name]))
        function = function_name(name, elementwise, args, len(flowing), [t in self._source for t in tensors])
        if function is not None:
            for atom in {atom for axes in made for axis in axes for term in axis.terms for atom in atoms(term)}:
                atom.functions.add(function)
        weights = [self._source[t] for t in tensors if t in self._source and t.ndim > 1]
        for output in outputs:
            if name in PRODUCTS and weights:
                self._producer[output] = weights[0]
            elif name in RESHAPES and flowing[0] in self._producer:
                self._producer[output] = self._producer[flowing[0]]


def trace(net: nn.Module, example_input: Any, frozen: Mapping[str, str]) -> Trace:
    """Run ``net`` once in evaluation mode and follow its axes.

    Args:
        net: The network; it is left as it was.
        example_input: A tensor, or a tuple or dictionary of arguments.
        frozen: Tensors of the state dict that may not be permuted, each with the reason.

    Raises:
        DynamicNetworkError: If the computation depends on the values that flow through it.
        ValueError: If the network cannot be called with the example input.
    """
    state: dict[str, Tensor] = net.state_dict(keep_vars=True)
    axes: dict[int, list[Axis]] = {}
    parameters = []
    for name, tensor in state.items():
        if id(tensor) not in axes:
            axes[id(tensor)] = new_axes(tensor.shape)
            parameters.append((tensor, name, axes[id(tensor)]))
        if name in frozen:
            freeze_axes(axes[id(tensor)], frozen[name])
        elif not tensor.is_floating_point() and not tensor.is_complex():
            freeze_axes(axes[id(tensor)], "it holds no real numbers")
    others = [
        (b, n, new_axes(b.shape, "it is not in the state dict")) for n, b in net.named_buffers() if n not in state
    ]
    tracer = Tracer([*parameters, *others], tensors_in(example_input))
    output = run_plainly(net, example_input, tracer)
    results = tensors_in(output)
    if not results:
        raise ValueError(f"{type(net).__name__} returned no tensor but {type(output).__name__}.")
    for result in results:
        freeze_axes(tracer.axes_of(result), "it belongs to the output")
    for tensor, _, own in parameters:
        if id(tensor) not in tracer.used:
            freeze_axes(own, "the network does not use it with this input")
    return Trace({name: axes[id(t)] for name, t in state.items()}, tracer.frozen_by, tracer.calls, tracer.normalised)


def run_plainly(net: nn.Module, example_input: Any, mode: TorchDispatchMode) -> Any:
    """Run a network under a dispatch mode, in evaluation mode, by the same operations every time.

    Raises:
        ValueError: If the network cannot be called with the input.
    """
    stack = getattr(mode, "modules", [])
    with evaluating(net), _plain_attention(), torch.compiler.set_stance("force_eager"), _module_names(net, stack), mode:
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
def _plain_attention() -> Iterator[None]:
    """Keep transformer layers from their fused evaluation path."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _module_names(net: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the running modules on a stack."""

    def leave(*_: Any) -> None:
        stack.pop()

    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, dataclasses and graphs, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tensors_in(vars(value))
    return tensors_in(value.to_dict()) if hasattr(value, "to_dict") else []


def operation(func: Any) -> tuple[str, bool]:
    """Return the name of an operation, and whether it works in place."""
    name = func._schema.name.partition("::")[2]
    in_place = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if in_place else name), in_place


def _keeps_layout(x: Tensor, size: Sequence[int], strides: Sequence[int], offset: int | None = None) -> bool:
    """Whether ``as_strided`` shows the same entries at the same places (it may rename strides of single entries)."""
    same = all(n == 1 or new == old for n, new, old in zip(size, strides, x.stride(), strict=False))
    return list(size) == list(x.shape) and same and offset in (None, x.storage_offset())


def _has_boolean(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
