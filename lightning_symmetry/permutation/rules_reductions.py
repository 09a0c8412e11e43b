"""Rules of reductions, pooling, patches and orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_symmetry.permutation.axes import (
    Axis,
    freeze_axes,
    meet,
    new_axes,
    replace_axis,
)
from lightning_symmetry.permutation.reshape import reshape
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


@rule("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "argmax", "argmin")
def _ordered(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
) -> list[Axes]:
    reason = "its order matters to a cumulative function, a sort or a position"
    if x.ndim == 0 or dim is None:
        freeze_axes(axes_of(x), reason)
        return [new_axes(output.shape, reason) for output in outputs]
    dim %= x.ndim
    freeze_axes([axes_of(x)[dim]], reason)
    rest = meet([(axes_of(x), range(x.ndim))], [None if d == dim else d for d in range(x.ndim)])
    made = []
    for output in outputs:
        place = new_axes(output.shape[dim : dim + 1], reason) if output.ndim == x.ndim else []
        made.append([*rest[:dim], *place, *rest[dim + 1 :]])
    return made


@rule("sort", "argsort")
def _sort(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: int = -1, *args: Any, **kwargs: Any
) -> list[Axes]:
    return _ordered(axes_of, outputs, x, kwargs.get("dim", dim))


@rule("topk", "kthvalue")
def _topk(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any
) -> list[Axes]:
    return _ordered(axes_of, outputs, x, dim)


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
        for _form in (f"{_kind}{_name}", f"_{_kind}{_name}", f"{_kind}{_name}_with_indices", f"_{_kind}{_name}_aa"):
            RULES[_form] = pooling(_space)


@rule("unfold")
def _unfold(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: int, *args: Any) -> list[Axes]:
    dim %= x.ndim
    freeze_axes([axes_of(x)[dim]], "it is unfolded")
    sizes = outputs[0].shape
    axes = replace_axis(axes_of(x), dim, Axis(fresh(sizes[dim], "it is unfolded")))
    return [[*axes, Axis(fresh(sizes[-1], "it is unfolded"))]]


@rule("im2col")
def _im2col(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any) -> list[Axes]:
    reason = "it is the space of patches"
    axes, channel = axes_of(x), x.ndim - 3
    freeze_axes(axes[channel + 1 :], reason)
    known = meet([(axes, range(x.ndim))], range(channel + 1))
    entries, patches = outputs[0].shape[-2:]
    inside = new_axes([entries // x.shape[channel], patches], reason)
    return [reshape([*known, *inside], outputs[0].shape)]


@rule("col2im")
def _col2im(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any) -> list[Axes]:
    reason = "it is the space of patches"
    *lead, channels, height, width = outputs[0].shape
    axes = reshape(axes_of(x), [*lead, channels, x.shape[-2] // channels, x.shape[-1]])
    freeze_axes(axes[-2:], reason)
    known = meet([(axes, range(len(axes)))], range(len(axes) - 2))
    return [[*known, *new_axes([height, width], reason)]]


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fft(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dims: Sequence[int], *args: Any) -> list[Axes]:
    reason = "it is transformed to frequencies"
    gone = set(dims_of(dims, x.ndim))
    freeze_axes([axes_of(x)[dim] for dim in gone], reason)
    rest = meet([(axes_of(x), range(x.ndim))], [None if dim in gone else dim for dim in range(x.ndim)])
    return [[new_axes([size], reason)[0] if dim in gone else rest[dim] for dim, size in enumerate(outputs[0].shape)]]
