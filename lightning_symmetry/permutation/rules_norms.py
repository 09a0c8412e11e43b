"""Rules of normalisations and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_symmetry.permutation.axes import Axis, meet, new_axes, plain_term, restrict, tie
from lightning_symmetry.permutation.rules import Axes, AxesOf, rule
from lightning_symmetry.permutation.terms import UNIT, factor


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, shape: Sequence[int], *rest: Any) -> list[Axes]:
    first = x.ndim - len(shape)
    axes = tie(axes_of(x), range(first, x.ndim))
    operands = [(axes, range(x.ndim))]
    operands += [(axes_of(p), range(first, x.ndim)) for p in rest if isinstance(p, Tensor)]
    joined = meet(operands, range(x.ndim))
    return [joined, *([*restrict(joined[:first]), *[Axis(UNIT)] * len(shape)] for _ in outputs[1:])]


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit",
    "_batch_norm_no_update",
    "batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "native_batch_norm_legit_functional",
)
def _batch_norm(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *rest: Any, **kwargs: Any) -> list[Axes]:
    axes = tie(axes_of(x), [dim for dim in range(x.ndim) if dim != 1])
    operands: list[Any] = [(axes, range(x.ndim))]
    operands += [(axes_of(p), [1]) for p in rest if isinstance(p, Tensor)]
    joined = meet(operands, range(x.ndim))
    channels = [Axis(plain_term(joined[1]))]
    return [joined, *(channels if output.numel() else new_axes(output.shape) for output in outputs[1:])]


@rule("native_group_norm", "group_norm")
def _group_norm(
    axes_of: AxesOf,
    outputs: Sequence[Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_samples: int,
    channels: int,
    space: int,
    groups: int,
    *args: Any,
) -> list[Axes]:
    axes = tie(axes_of(x), range(1, x.ndim))
    operands: list[Any] = [(axes, range(x.ndim))]
    operands += [(axes_of(p), [1]) for p in (weight, bias) if p is not None]
    joined = meet(operands, range(x.ndim))
    for term in joined[1].terms:
        factor(term, groups)
    return [joined, *(new_axes(output.shape, "it is a statistic of groups") for output in outputs[1:])]


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def _softmax(axes_of: AxesOf, outputs: Any, x: Tensor, dim: int = -1, *args: Any) -> list[Axes]:
    return [tie(axes_of(x), [dim % x.ndim]) if x.ndim else []]
