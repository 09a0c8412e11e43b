"""What each operation of a traced network does to the axes of its operands: the register of rules.

A rule takes the call's arguments, whose tensors are known by their axes, and returns the axes of each tensor that comes
out. Elementwise functions need no rule of their own. An operation without a rule is decomposed, and frozen where that
does not help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_symmetry.permutation.axes import Axis, meet

Axes = list[Axis]
AxesOf = Callable[[Tensor], Axes]
Rule = Callable[..., list[Axes]]
RULES: dict[str, Rule] = {}
"""Rules by the name of the operation, without namespace, overload and the underscore of in-place forms."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule ``rule(axes_of, outputs, *args, **kwargs) -> axes of each output tensor``."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def pointwise(axes_of: AxesOf, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Axes]:
    """Rule of elementwise functions with broadcasting."""
    ndim = max(tensor.ndim for tensor in tensors)
    operands = [(axes_of(tensor), range(ndim - tensor.ndim, ndim)) for tensor in tensors]
    joined = meet(operands, range(ndim))
    return [joined for _ in outputs]


def dims_of(dims: Any, ndim: int) -> list[int]:
    """Return dimensions counted from the front; all of them for None or none."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)] if ndim else []
