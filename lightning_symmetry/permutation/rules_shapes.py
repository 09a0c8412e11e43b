"""Rules of views, copies, slices, concatenations and new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_symmetry.permutation.axes import (
    Axis,
    cat,
    freeze_axes,
    new_axes,
    replace_axis,
    reshape,
    select,
    stride,
    take,
    tie,
)
from lightning_symmetry.permutation.rules import Axes, AxesOf, dims_of, pointwise, rule
from lightning_symmetry.permutation.terms import UNIT, fresh


@rule("alias", "detach", "clone", "lift_fresh", "lift_fresh_copy", "_to_copy", "contiguous", "positive", "to")
def _same(axes_of: AxesOf, outputs: Any, x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    return [axes_of(x)]


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_copy", "_reshape_copy")
def _reshape(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    if outputs[0].numel() != x.numel():  # seen as another dtype
        freeze_axes(axes_of(x), "it is viewed as another dtype")
        return [new_axes(outputs[0].shape, "it is viewed as another dtype")]
    return [reshape(axes_of(x), outputs[0].shape)]


@rule("squeeze", "unsqueeze", "squeeze_copy", "unsqueeze_copy")
def _squeeze(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any) -> list[Axes]:
    long = iter([axis for axis in axes_of(x) if axis.size != 1])
    return [[Axis(UNIT) if size == 1 else next(long) for size in outputs[0].shape]]


@rule("permute", "permute_copy")
def _permute(axes_of: AxesOf, outputs: Any, x: Tensor, dims: Sequence[int]) -> list[Axes]:
    axes = axes_of(x)
    return [[axes[dim] for dim in dims]]


@rule("transpose", "t", "swapaxes", "numpy_T", "transpose_copy", "t_copy", "mT")
def _transpose(axes_of: AxesOf, outputs: Any, x: Tensor, first: int = -2, second: int = -1) -> list[Axes]:
    axes = list(axes_of(x))
    if x.ndim > 1:
        axes[first], axes[second] = axes[second], axes[first]
    return [axes]


@rule("expand", "expand_copy")
def _expand(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    axes = [Axis(UNIT)] * (outputs[0].ndim - x.ndim) + axes_of(x)
    return [
        [axis if axis.size == size else Axis(fresh(size)) for axis, size in zip(axes, outputs[0].shape, strict=True)]
    ]


@rule("repeat")
def _repeat(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, repeats: Sequence[int]) -> list[Axes]:
    axes = [Axis(UNIT)] * (outputs[0].ndim - x.ndim) + axes_of(x)
    interleaved = [part for axis, count in zip(axes, repeats, strict=True) for part in (Axis(fresh(count)), axis)]
    return [reshape(interleaved, outputs[0].shape)]


@rule("select", "select_copy")
def _select(axes_of: AxesOf, outputs: Any, x: Tensor, dim: int, index: int) -> list[Axes]:
    return [select(axes_of(x), dim % x.ndim, index % x.shape[dim])]


@rule("slice", "narrow", "slice_copy")
def _slice(
    axes_of: AxesOf,
    outputs: Sequence[Tensor],
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> list[Axes]:
    axes, dim = axes_of(x), dim % x.ndim
    index = slice(start, end, step)
    if step != 1:
        return [stride(axes, dim, index)]
    first, _, _ = index.indices(x.shape[dim])
    return [take(axes, dim, first, outputs[0].shape[dim])]


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def _split(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, sections: Any, dim: int = 0, **kwargs: Any
) -> list[Axes]:
    axes, dim, start = axes_of(x), dim % x.ndim, 0
    found = []
    for output in outputs:
        found.append(take(axes, dim, start, output.shape[dim]))
        start += output.shape[dim]
    return found


@rule("unbind")
def _unbind(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: int = 0) -> list[Axes]:
    axes = axes_of(x)
    return [select(axes, dim % x.ndim, index) for index in range(len(outputs))]


@rule("cat", "concat")
def _cat(axes_of: AxesOf, outputs: Sequence[Tensor], tensors: Sequence[Tensor], dim: int = 0) -> list[Axes]:
    tensors = [tensor for tensor in tensors if tensor.ndim == outputs[0].ndim]  # an old form allows empty vectors
    return [cat([axes_of(tensor) for tensor in tensors], dim % outputs[0].ndim)]


@rule("stack")
def _stack(axes_of: AxesOf, outputs: Sequence[Tensor], tensors: Sequence[Tensor], dim: int = 0) -> list[Axes]:
    dim %= outputs[0].ndim
    operands = []
    for tensor in tensors:
        axes = list(axes_of(tensor))
        axes.insert(dim, Axis(UNIT))
        operands.append(axes)
    return [cat(operands, dim)]


@rule("flip")
def _flip(axes_of: AxesOf, outputs: Any, x: Tensor, dims: Any) -> list[Axes]:
    where = dims_of(dims, x.ndim)
    axes = tie(axes_of(x), where)
    freeze_axes([axes[dim] for dim in where], "it is shifted or flipped")
    return [axes]


@rule("roll")
def _roll(axes_of: AxesOf, outputs: Any, x: Tensor, shifts: Any, dims: Any = ()) -> list[Axes]:
    return _flip(axes_of, outputs, x, dims)


@rule("constant_pad_nd")
def _pad(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, pad: Sequence[int], value: Any = 0) -> list[Axes]:
    axes = axes_of(x)
    for place in range(len(pad) // 2):
        dim = x.ndim - 1 - place
        before, after = pad[2 * place : 2 * place + 2]
        if before < 0 or after < 0:
            axes = take(axes, dim, max(0, -before), axes[dim].size + min(0, before) + min(0, after))
            before, after = max(before, 0), max(after, 0)
        if before or after:
            rows = [replace_axis(axes, dim, Axis(fresh(size))) for size in (before, after)]
            parts = [rows[0]] * bool(before) + [axes] + [rows[1]] * bool(after)
            axes = cat(parts, dim)
    return [axes]


@rule("pixel_shuffle")
def _pixel_shuffle(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, factor_: int) -> list[Axes]:
    *lead, channels, height, width = x.shape
    axes = reshape(axes_of(x), [*lead, channels // factor_**2, factor_, factor_, height, width])
    n = len(lead)
    axes = [*axes[: n + 1], axes[n + 3], axes[n + 1], axes[n + 4], axes[n + 2]]
    return [reshape(axes, outputs[0].shape)]


@rule(
    *("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "empty_strided", "new_empty_strided"),
)
def _uniform(axes_of: AxesOf, outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Axes]:
    return [new_axes(output.shape) for output in outputs]


@rule("fill", "zero")
def _fill(axes_of: AxesOf, outputs: Any, x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    return [axes_of(x)]


@rule("copy")
def _copy(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, source: Tensor, *args: Any) -> list[Axes]:
    return pointwise(axes_of, outputs, [x, source])
