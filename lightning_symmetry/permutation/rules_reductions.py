"""Rules of reductions, pooling and looking up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_symmetry.permutation.axes import (
    Axis,
    freeze_axes,
    meet,
    new_axes,
    replace_axis,
)
from lightning_symmetry.permutation.rules import RULES, Axes, AxesOf, Rule, dims_of, pointwise, rule
from lightning_symmetry.permutation.terms import fresh


@rule(
    "sum",
    "mean",
    "amax",
    "amin",
    "prod",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "logsumexp",
    "any",
    "all",
    "nansum",
    "count_nonzero",
)
def _reduce(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dims: Any = None, *args: Any, **kwargs: Any
) -> list[Axes]:
    gone = set(dims_of(kwargs.get("dim", dims) if not isinstance(dims, bool) else None, x.ndim))
    keep = outputs[0].ndim == x.ndim
    out = [None if dim in gone else dim for dim in range(x.ndim) if keep or dim not in gone]
    joined = meet([(axes_of(x), range(x.ndim))], out)
    return [joined for _ in outputs]


@rule("linalg_vector_norm", "norm")
def _norm(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, order: Any = 2, dims: Any = None, *args: Any, **kwargs: Any
) -> list[Axes]:
    return _reduce(axes_of, outputs, x, dims)


@rule("max", "min", "median", "nanmedian", "mode", "aminmax")
def _extremum(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    if args and isinstance(args[0], Tensor):
        return pointwise(axes_of, outputs, [x, args[0]])
    if args and len(outputs) > 1:  # the positions that come out too are those of this order
        freeze_axes([axes_of(x)[args[0] % x.ndim]], "the position of an extremum along it is used")
    dim = args[0] if args else kwargs.get("dim")
    return _reduce(axes_of, outputs, x, dim)


@rule("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "argmax", "argmin", "argsort", "sort", "topk")
def _ordered(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    reason = "its order matters to a cumulative function, a sort or a position"
    freeze_axes(axes_of(x), reason)
    return [new_axes(output.shape, reason) for output in outputs]


def pooling(space: int) -> Rule:
    """Return the rule of pooling and resampling over so many trailing axes."""

    def apply(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
        lead = x.ndim - space
        axes = axes_of(x)
        freeze_axes(axes[lead:], "it is the space of a pooling")
        joined = meet([(axes, range(x.ndim))], range(lead))
        return [[*joined, *new_axes(output.shape[lead:], "it is the space of a pooling")] for output in outputs]

    return apply


for _name, _space in {"1d": 1, "2d": 2, "3d": 3}.items():
    _pools = ["max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "reflection_pad", "replication_pad"]
    _scales = [
        f"upsample_{kind}" for kind in ("nearest", "_nearest_exact", "linear", "bilinear", "bicubic", "trilinear")
    ]
    for _kind in [*_pools, *_scales]:
        for _form in (f"{_kind}{_name}", f"_{_kind}{_name}", f"{_kind}{_name}_with_indices"):
            RULES[_form] = pooling(_space)


@rule("embedding")
def _embedding(axes_of: AxesOf, outputs: Any, weight: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    freeze_axes(axes_of(weight)[:1], "its positions are looked up")
    return [[*axes_of(index), axes_of(weight)[1]]]


@rule("index_select")
def _index_select(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: int, index: Tensor) -> list[Axes]:
    dim %= x.ndim
    freeze_axes([axes_of(x)[dim], *axes_of(index)], "its positions are looked up")
    new = Axis(fresh(outputs[0].shape[dim], "its positions are looked up"))
    return [replace_axis(axes_of(x), dim, new)]


@rule("index", "_unsafe_index")
def _index(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, indices: Sequence[Tensor | None]) -> list[Axes]:
    indices = [*indices, *[None] * (x.ndim - len(indices))]
    places = [place for place, index in enumerate(indices) if index is not None]
    axes, out = axes_of(x), outputs[0]
    if any(indices[place].dtype in (torch.bool, torch.uint8) for place in places):
        raise NotImplementedError
    width = max(indices[place].ndim for place in places)
    for place in places:
        freeze_axes([axes[place], *axes_of(indices[place])], "its positions are looked up")
    kept = [place for place in range(x.ndim) if place not in places]
    rest = meet([(axes, range(x.ndim))], kept)
    together = places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    return [[*rest[:first], *new_axes(out.shape[first : first + width], "its positions are looked up"), *rest[first:]]]


@rule("gather")
def _gather(axes_of: AxesOf, outputs: Any, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> list[Axes]:
    return [_along(axes_of, x, dim, [index], index)]


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(
    axes_of: AxesOf, outputs: Any, x: Tensor, dim: int, index: Tensor, src: Any = None, *args: Any, **kwargs: Any
) -> list[Axes]:
    return [_along(axes_of, x, dim, [index, *([src] if isinstance(src, Tensor) else [])], x)]


@rule("index_add", "index_copy", "index_reduce")
def _index_add(
    axes_of: AxesOf, outputs: Any, x: Tensor, dim: int, index: Tensor, src: Tensor, *args: Any, **kwargs: Any
) -> list[Axes]:
    freeze_axes(axes_of(index), "its positions are looked up")
    return [_along(axes_of, x, dim, [src], x)]


def _along(axes_of: AxesOf, x: Tensor, dim: int, others: Sequence[Tensor], result: Tensor) -> Axes:
    """Meet tensors on all axes but ``dim``, along which positions are looked up."""
    if x.ndim == 0:
        return []
    dim %= x.ndim
    reason = "its positions are looked up"
    tensors = [x, *(other for other in others if other.ndim == x.ndim)]
    operands = []
    for tensor in tensors:
        axes = axes_of(tensor)
        freeze_axes([axes[dim]], reason)
        # Indices may cover a part of an axis only: the first positions.
        part = [d for d in range(x.ndim) if d != dim and tensor.shape[d] != x.shape[d]]
        freeze_axes([axes_of(t)[d] for d in part for t in (x, tensor)], reason)
        operands.append((axes, [None if d == dim or d in part else d for d in range(x.ndim)]))
    joined = meet(operands, [None if d == dim else d for d in range(x.ndim)])
    return [
        axis if axis.size == size else Axis(fresh(size, reason))
        for axis, size in zip(joined, result.shape, strict=True)
    ]


@rule("unfold", "im2col")
def _unfold(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: Any, *args: Any) -> list[Axes]:
    if not isinstance(dim, int):
        raise NotImplementedError
    dim %= x.ndim
    freeze_axes([axes_of(x)[dim]], "it is unfolded")
    sizes = outputs[0].shape
    axes = replace_axis(axes_of(x), dim, Axis(fresh(sizes[dim], "it is unfolded")))
    return [[*axes, Axis(fresh(sizes[-1], "it is unfolded"))]]
