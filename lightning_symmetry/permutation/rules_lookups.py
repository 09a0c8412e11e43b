"""Rules of looking up and writing at positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_symmetry.permutation.axes import Axis, freeze_axes, meet, new_axes, replace_axis, tie
from lightning_symmetry.permutation.rules import Axes, AxesOf, rule
from lightning_symmetry.permutation.terms import fresh

_REASON = "its positions are looked up"


@rule("embedding")
def _embedding(axes_of: AxesOf, outputs: Any, weight: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    freeze_axes(axes_of(weight)[:1], _REASON)
    return [[*axes_of(index), *meet([(axes_of(weight), ["v", "d"])], ["d"])]]


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(axes_of: AxesOf, outputs: Sequence[Tensor], weight: Tensor, *args: Any, **kwargs: Any) -> list[Axes]:
    freeze_axes(axes_of(weight)[:1], _REASON)
    for tensor in (tensor for tensor in args if isinstance(tensor, Tensor)):
        freeze_axes(axes_of(tensor), _REASON)
    (entries,) = meet([(axes_of(weight), ["v", "d"])], ["d"])
    bags = [*new_axes(outputs[0].shape[:1], _REASON), entries]
    return [bags, *(new_axes(output.shape, _REASON) for output in outputs[1:])]


@rule("index_select")
def _index_select(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, dim: int, index: Tensor) -> list[Axes]:
    dim %= x.ndim
    freeze_axes([axes_of(x)[dim], *axes_of(index)], _REASON)
    new = Axis(fresh(outputs[0].shape[dim], _REASON))
    return [replace_axis(axes_of(x), dim, new)]


@rule("index", "_unsafe_index")
def _index(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, indices: Sequence[Tensor | None]) -> list[Axes]:
    indices = [*indices, *[None] * (x.ndim - len(indices))]
    places = [place for place, index in enumerate(indices) if index is not None]
    axes, out = axes_of(x), outputs[0]
    if any(map(_is_mask, indices)):
        (place,) = places  # of a mask and other indices no rule is known
        return [_masked(axes_of, x, place, indices[place], out)]
    return [_indexed(axes_of, axes, places, indices, out.shape)]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _indexed(
    axes_of: AxesOf, axes: Axes, places: Sequence[int], indices: Sequence[Tensor | None], shape: Sequence[int]
) -> Axes:
    """Return the axes of what is looked up."""
    width = max(indices[place].ndim for place in places)
    for place in places:
        freeze_axes([axes[place], *axes_of(indices[place])], _REASON)
    kept = [place for place in range(len(axes)) if place not in places]
    rest = meet([(axes, range(len(axes)))], kept)
    together = list(places) == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    return [*rest[:first], *new_axes(shape[first : first + width], _REASON), *rest[first:]]


def _masked(axes_of: AxesOf, x: Tensor, place: int, mask: Tensor, out: Tensor) -> Axes:
    """Return the axes of the entries of a mask, one after the other."""
    covered = range(place, place + mask.ndim)
    freeze_axes([*(axes_of(x)[dim] for dim in covered), *axes_of(mask)], _REASON)
    rest = meet([(axes_of(x), range(x.ndim))], [dim for dim in range(x.ndim) if dim not in covered])
    return [*rest[:place], *new_axes(out.shape[place : place + 1], _REASON), *rest[place:]]


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(
    axes_of: AxesOf, outputs: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *args: Any
) -> list[Axes]:
    indices = [*indices, *[None] * (x.ndim - len(indices))]
    places = [place for place, index in enumerate(indices) if index is not None]
    if any(map(_is_mask, indices)):
        (place,) = places
        mask = indices[place]
        covered = range(place, place + mask.ndim)
        if values.numel() == 1:
            return [meet([(axes_of(x), range(x.ndim)), (axes_of(mask), covered)], range(x.ndim))]
        looked_up = _masked(axes_of, x, place, mask, x[(slice(None),) * place + (mask,)])
    else:
        covered = places
        shape = x[tuple(slice(None) if index is None else index for index in indices)].shape
        looked_up = _indexed(axes_of, axes_of(x), places, indices, shape)
    ndim = len(looked_up)
    meet([(looked_up, range(ndim)), (axes_of(values), range(ndim - values.ndim, ndim))], range(ndim))
    return [tie(axes_of(x), covered)]


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
    freeze_axes(axes_of(index), _REASON)
    return [_along(axes_of, x, dim, [src], x)]


def _along(axes_of: AxesOf, x: Tensor, dim: int, others: Sequence[Tensor], result: Tensor) -> Axes:
    """Meet tensors on all axes but ``dim``, along which positions are looked up."""
    if x.ndim == 0:
        return []
    dim %= x.ndim
    tensors = [x, *(other for other in others if other.ndim == x.ndim)]
    operands = []
    for tensor in tensors:
        axes = axes_of(tensor)
        freeze_axes([axes[dim]], _REASON)
        # Indices may cover a part of an axis only: the first positions.
        part = [d for d in range(x.ndim) if d != dim and tensor.shape[d] != x.shape[d]]
        freeze_axes([axes_of(t)[d] for d in part for t in (x, tensor)], _REASON)
        operands.append((axes, [None if d == dim or d in part else d for d in range(x.ndim)]))
    joined = meet(operands, [None if d == dim else d for d in range(x.ndim)])
    return [
        axis if axis.size == size else Axis(fresh(size, _REASON))
        for axis, size in zip(joined, result.shape, strict=True)
    ]


@rule("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback", "cudnn_grid_sampler")
def _grid_sampler(
    axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, grid: Tensor, *args: Any, **kwargs: Any
) -> list[Axes]:
    freeze_axes([*axes_of(x)[2:], *axes_of(grid)], _REASON)
    known = meet([(axes_of(x), range(x.ndim))], range(2))
    return [[*known, *new_axes(outputs[0].shape[2:], _REASON)]]
