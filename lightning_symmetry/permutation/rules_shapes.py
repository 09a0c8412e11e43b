"""Rules of views, copies, slices, concatenations and new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_symmetry.permutation.axes import (
    Axis,
    array_of,
    cat,
    freeze_axes,
    meet,
    new_axes,
    replace_axis,
    select,
    stride,
    take,
    tie,
)
from lightning_symmetry.permutation.reshape import reshape
from lightning_symmetry.permutation.rules import Axes, AxesOf, dims_of, pointwise, rule
from lightning_symmetry.permutation.terms import UNIT, fresh

_MOST_COPIES = 64  # of entries that are alike, that are told apart


@rule(
    *("alias", "detach", "clone", "lift_fresh", "lift_fresh_copy", "_to_copy", "contiguous", "positive", "to"),
    *("_conj", "_neg_view", "resolve_conj", "resolve_neg"),
)
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
    made: Axes = []
    for axis, size in zip(axes, outputs[0].shape, strict=True):
        made.append(axis if axis.size == size else _copies(size, made))
    return [made]


def _copies(size: int, before: Sequence[Axis]) -> Axis:
    """Return an axis along which all is alike: it may be permuted otherwise for each position of those before.

    Where these have too many positions the longest are left out: all of theirs are permuted alike.
    """
    parents: list[Axis] = []
    count = 1
    for axis in sorted(before, key=lambda axis: axis.size):
        if size > 1 and axis.size > 1 and count * axis.size <= _MOST_COPIES:
            parents.append(axis)
            count *= axis.size
    return Axis(array_of([fresh(size) for _ in range(count)], [parent.size for parent in parents]), parents)


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
    first, last, _ = index.indices(x.shape[dim])
    if step != 1 and last == x.shape[dim] and last % step == 0 and first < step:  # one of each run of `step`
        runs = reshape(axes, [*x.shape[:dim], last // step, step, *x.shape[dim + 1 :]])
        return [select(runs, dim + 1, first)]
    if step != 1:
        return [stride(axes, dim, index)]
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
    return [_unrelated(output.shape) for output in outputs]


def _unrelated(shape: Sequence[int]) -> Axes:
    """Return the axes of a tensor whose entries are all alike."""
    axes: Axes = []
    for size in shape:
        axes.append(_copies(size, axes))
    return axes


@rule("fill", "zero")
def _fill(axes_of: AxesOf, outputs: Any, x: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    return [axes_of(x)]


@rule("copy")
def _copy(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, source: Tensor, *args: Any) -> list[Axes]:
    return pointwise(axes_of, outputs, [x, source])


@rule("diagonal", "diagonal_copy")
def _diagonal(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> list[Axes]:
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    axes = axes_of(x)
    rest = [dim for dim in range(x.ndim) if dim not in (dim1, dim2)]
    if offset or x.shape[dim1] != x.shape[dim2]:
        freeze_axes([axes[dim1], axes[dim2]], "it is read along a shifted diagonal")
        kept = meet([(axes, [None if dim in (dim1, dim2) else dim for dim in range(x.ndim)])], rest)
        return [[*kept, Axis(fresh(outputs[0].shape[-1], "it is read along a shifted diagonal"))]]
    return [meet([(axes, ["d" if dim in (dim1, dim2) else dim for dim in range(x.ndim)])], [*rest, "d"])]


@rule("trace")
def _trace(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor) -> list[Axes]:
    meet([(axes_of(x), ["d", "d"])], [])
    return [[]]


@rule("view_as_real", "view_as_real_copy")
def _view_as_real(axes_of: AxesOf, outputs: Any, x: Tensor) -> list[Axes]:
    return [[*axes_of(x), Axis(fresh(2, "it holds real and imaginary parts"))]]


@rule("view_as_complex", "view_as_complex_copy")
def _view_as_complex(axes_of: AxesOf, outputs: Any, x: Tensor) -> list[Axes]:
    axes = axes_of(x)
    freeze_axes(axes[-1:], "it holds real and imaginary parts")
    return [meet([(axes, [*range(x.ndim - 1), None])], range(x.ndim - 1))]


@rule("diag_embed")
def _diag_embed(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> list[Axes]:
    first, second = sorted(dim % outputs[0].ndim for dim in (dim1, dim2))
    axes = tie(axes_of(x), [x.ndim - 1])
    if offset:
        freeze_axes(axes[-1:], "it becomes a shifted diagonal")
        rest = meet([(axes, range(x.ndim))], range(x.ndim - 1))
        rows, columns = new_axes([outputs[0].shape[first]] * 2, "it becomes a shifted diagonal")
    else:
        *rest, rows = axes
        columns = Axis(rows.table, rows.parents)
    rest.insert(first, rows)
    rest.insert(second, columns)
    return [rest]
