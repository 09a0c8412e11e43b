"""Run a network once and follow how the axes of its parameters are tied together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_symmetry.permutation import (  # noqa: F401 (they register rules)
    rules_lookups,
    rules_norms,
    rules_reductions,
    rules_shapes,
)
from lightning_symmetry.permutation.axes import Axis, freeze_axes, meet, new_axes
from lightning_symmetry.permutation.functions import NORMS, PRODUCTS, RESHAPES, UNTAGGED, function_name
from lightning_symmetry.permutation.memory import Memory, attributes_kept, reader, state_axes
from lightning_symmetry.permutation.rules import RULES, pointwise
from lightning_symmetry.permutation.rules_products import scaled_dot_product
from lightning_symmetry.permutation.running import DynamicNetworkError, run_plainly, tensors_in
from lightning_symmetry.permutation.terms import atoms

_ATTENTION = "_scaled_dot_product"
_READS_VALUES = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "_unique2"}
_READS_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CONSTANT = "it is a constant that is neither parameter nor buffer"


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
        tied: What is permuted alike in several blocks although each could be by itself.
    """

    axes: dict[str, list[Axis]]
    frozen_by: dict[str, list[str]]
    calls: list[Call]
    normalised: list[tuple[str, str]]
    tied: list[str]


class Tracer(TorchDispatchMode):
    """Follows the axes of all tensors through the operations of a forward pass.

    Args:
        parameters: Tensors of the state dict with their names and axes.
        inputs: Tensors of the example input.
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, str, list[Axis]]], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._axes: Any = WeakIdKeyDictionary()
        self._source: Any = WeakIdKeyDictionary()  # the parameter that a tensor is, but for its shape
        self._producer: Any = WeakIdKeyDictionary()  # the weight whose product a tensor is
        self.memory = Memory()
        self.used: set[int] = set()
        self.modules: list[str] = []
        self.frozen_by: dict[str, list[str]] = {}
        self.calls: list[Call] = []
        self.normalised: list[tuple[str, str]] = []
        self.tied: list[str] = []
        self._depth = 0
        for tensor, name, axes in parameters:
            self._axes[tensor] = axes
            self._source[tensor] = name
            self.memory.keep(tensor, axes, flows=False)
        for tensor in inputs:
            self._axes[tensor] = new_axes(tensor.shape, "it belongs to the input")
            self.memory.keep(tensor, self._axes[tensor], flows=True)

    @property
    def where(self) -> str:
        """Name of the module that is running."""
        return (self.modules[-1] if self.modules else "") or "the network itself"

    def axes_of(self, tensor: Tensor) -> list[Axis]:
        """Return the axes of a tensor; those of one that was not seen before are frozen, and all that it shows."""
        self.used.add(id(tensor))
        axes = self._axes.get(tensor)
        if axes is None:
            axes = self._axes[tensor] = new_axes(tensor.shape, _CONSTANT)
            freeze_axes(self.memory.of(tensor).axes, "it is read through a view that was made unseen")
        return axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and follow the axes through it."""
        kwargs = kwargs or {}
        name, in_place = operation(func)
        about = _about(func)
        self.memory.write(about.written(name, args, kwargs))
        targets = {key: value for key, value in kwargs.items() if key in about.out}
        rest = {key: value for key, value in kwargs.items() if key not in about.out}
        tensors = tensors_in((args, rest))
        if about.reads:
            self.check_values(name, _read(name, args, tensors))
        known = name in RULES or about.elementwise or name.startswith(_ATTENTION)
        if not (known or in_place or targets) and tensors:
            out = self._decompose(func, args, kwargs)
            if out is not NotImplemented:
                if self._depth == 0:
                    made = tensors_in(out)
                    flows = any(self.memory.of(tensor).flows for tensor in made)
                    self.calls.append(Call(name, self.where, [self.axes_of(t) for t in made], flows, False))
                return out
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        made = self._apply(func, name, outputs, tensors, args, rest)
        if targets:
            made = [self._written_to(axes, output) for axes, output in zip(made, outputs, strict=True)]
        real = any([self.memory.of(tensor).real for tensor in tensors])
        flows = any([self.memory.of(tensor).flows for tensor in tensors])
        for output, axes in zip(outputs, made, strict=True):
            self._axes[output] = axes
            stored = self.memory.of(output)
            stored.real |= real
            stored.flows |= flows
            stored.axes = stored.axes or axes
        self._note(name, about.elementwise, outputs, tensors, made, args)
        return out

    def _apply(
        self, func: Any, name: str, outputs: list[Tensor], tensors: list[Tensor], args: Any, kwargs: Any
    ) -> list[list[Axis]]:
        """Return the axes of what an operation has made; where its rule fails, all is frozen, which is correct."""
        made = None
        try:
            if name.startswith(_ATTENTION):
                names = [argument.name for argument in func._schema.arguments]
                made = scaled_dot_product(self.axes_of, outputs, **dict(zip(names, args, strict=False)), **kwargs)
            elif name == "as_strided" and _keeps_layout(*args):
                made = [self.axes_of(args[0])]
            elif name in RULES:
                made = RULES[name](self.axes_of, outputs, *args, **kwargs)
            elif _about(func).elementwise:
                made = pointwise(self.axes_of, outputs, tensors) if tensors else [new_axes(o.shape) for o in outputs]
        except Exception:  # an overload or a case for which the rule was not made
            made = None
        if made is not None and [[a.size for a in axes] for axes in made] == [list(o.shape) for o in outputs]:
            return made
        reason = f"{name} in {self.where} cannot be seen through"
        free = [freeze_axes(self.axes_of(tensor), reason) for tensor in tensors]
        if any(free):
            self.frozen_by.setdefault(name, []).append(self.where)
        return [new_axes(output.shape, reason) for output in outputs]

    def _written_to(self, axes: list[Axis], target: Tensor) -> list[Axis]:
        """Return the axes of a result that is written into a tensor, perhaps a view of another."""
        before = self.axes_of(target)
        return meet([(axes, range(len(axes))), (before, range(len(axes)))], range(len(axes)))

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation as the simpler ones that it stands for, if it does."""
        from torch._decomp import decomposition_table

        simpler = decomposition_table.get(func)
        self._depth += 1
        try:
            with self:
                return func.decompose(*args, **kwargs) if simpler is None else simpler(*args, **kwargs)
        except Exception:  # the operation itself says what is wrong, or runs where its decomposition does not
            return NotImplemented
        finally:
            self._depth -= 1

    def check_values(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Check that values that the network reads do not depend on its parameters or real-valued inputs.

        Raises:
            DynamicNetworkError: If they do.
        """
        if any([self.memory.of(tensor).real for tensor in tensors]):
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
        flowing = [tensor for tensor in tensors if self.memory.of(tensor).flows]
        produced = name in PRODUCTS or name.startswith(_ATTENTION) or (name == "add" and len(flowing) > 1)
        if self._depth == 0:
            self.calls.append(Call(name, self.where, made, bool(flowing), produced and bool(flowing)))
        if not flowing:
            if name in RESHAPES and tensors[0] in self._source:
                for output in outputs:
                    self._source[output] = self._source[tensors[0]]
            return
        if name == "convolution" and args[8] > 1 and args[1].shape[1] > 1:
            self.tied.append(f"{self.where}: the channels within each of its {args[8]} groups of inputs")
        if name in NORMS and flowing[0] in self._producer:
            self.normalised.append((self._producer[flowing[0]], NORMS[name]))
        function = function_name(name, elementwise, args, len(flowing), [t in self._source for t in tensors])
        if function is not None:
            for atom in {atom for axes in made for axis in axes for term in axis.terms for atom in atoms(term)}:
                if atom.size > 1:
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
    state = {name: tensor for name, tensor in net.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    for name, tensor in state.items():
        if isinstance(tensor, UninitializedTensorMixin):
            raise ValueError(
                f"{name} has no shape yet: call {type(net).__name__} once before its symmetries are traced."
            )
    hidden = [(buffer, name) for name, buffer in net.named_buffers() if name not in state]
    axes = state_axes(state, [buffer for buffer, _ in hidden])
    for name, tensor in state.items():
        if name in frozen:
            freeze_axes(axes[id(tensor)], frozen[name])
        elif not tensor.is_floating_point() and not tensor.is_complex():
            freeze_axes(axes[id(tensor)], "it holds no real numbers")
    known = {id(tensor): (tensor, name, axes[id(tensor)]) for name, tensor in reversed(state.items())}
    constants = [(b, n, new_axes(b.shape, "it is not in the state dict")) for b, n in hidden if id(b) not in axes]
    tracer = Tracer([*known.values(), *constants], tensors_in(example_input))
    with attributes_kept(net):
        try:
            with reader(tracer.check_values):
                output = run_plainly(net, example_input, tracer)
        finally:
            tracer.memory.restore()
    results = tensors_in(output)
    if not results:
        raise ValueError(f"{type(net).__name__} returned no tensor but {type(output).__name__}.")
    for result in results:
        freeze_axes(tracer.axes_of(result), "it belongs to the output")
    used = {id(axes[tensor]) for tensor in tracer.used if tensor in axes}
    for own in axes.values():
        if id(own) not in used:
            freeze_axes(own, "the network does not use it with this input")
    seen = {name: axes[id(tensor)] for name, tensor in state.items()}
    blockwise = [name for name, own in seen.items() if any(axis.settled().parents for axis in own)]
    tied = [*tracer.tied, *(f"{name}: the entries within blocks of another of its axes" for name in blockwise)]
    return Trace(seen, tracer.frozen_by, tracer.calls, tracer.normalised, tied)


def operation(func: Any) -> tuple[str, bool]:
    """Return the name of an operation, and whether it works in place."""
    name = func._schema.name.partition("::")[2]
    in_place = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if in_place else name), in_place


def _keeps_layout(x: Tensor, size: Sequence[int], strides: Sequence[int], offset: int | None = None) -> bool:
    """Whether ``as_strided`` shows the same entries at the same places (it may rename strides of single entries)."""
    same = all(n == 1 or new == old for n, new, old in zip(size, strides, x.stride(), strict=False))
    return list(size) == list(x.shape) and same and offset in (None, x.storage_offset())


@dataclasses.dataclass(frozen=True)
class _About:
    """What the schema of an operation says.

    Attributes:
        elementwise: Whether it is an elementwise function.
        reads: Whether its result, or the shape of it, shows values to Python.
        writes: Names and places of the arguments that are written to.
        out: Names of those that only receive the result.
    """

    elementwise: bool
    reads: bool
    writes: tuple[tuple[int, str], ...]
    out: frozenset[str]

    def written(self, name: str, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that a call writes to."""
        if "batch_norm" in name and True in args[5:6]:  # the running statistics, which the schema may not mention
            return tensors_in(args[3:5])
        return tensors_in([args[at] if at < len(args) else kwargs.get(key) for at, key in self.writes])


@cache
def _about(func: Any) -> _About:
    name, _ = operation(func)
    arguments = list(enumerate(func._schema.arguments))
    return _About(
        torch.Tag.pointwise in func.tags or name in UNTAGGED,
        name in _READS_VALUES or not _READS_TAGS.isdisjoint(func.tags),
        tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        frozenset(a.name for _, a in arguments if a.is_out),
    )


def _read(name: str, args: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors whose values an operation shows."""
    if name == "index":
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return args[1:2] if name == "masked_select" else tensors
