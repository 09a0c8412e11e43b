"""Rules of matrix products, convolutions, attention and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_symmetry.permutation.axes import (
    Axis,
    Letter,
    freeze_axes,
    meet,
    new_axes,
    tie,
)
from lightning_symmetry.permutation.rules import Axes, AxesOf, rule
from lightning_symmetry.permutation.terms import UNIT, factor, tree, unify


@rule("mm", "bmm", "matmul", "mv", "dot", "vdot")
def _matmul(axes_of: AxesOf, outputs: Sequence[Tensor], a: Tensor, b: Tensor) -> list[Axes]:
    batch = [("b", k) for k in range(max(a.ndim, b.ndim) - 2)]
    left = [*batch[len(batch) - max(0, a.ndim - 2) :], "m", "k"] if a.ndim > 1 else ["k"]
    right = [*batch[len(batch) - max(0, b.ndim - 2) :], "k", "n"] if b.ndim > 1 else ["k"]
    out = [*batch, *(["m"] if a.ndim > 1 else []), *(["n"] if b.ndim > 1 else [])]
    return [meet([(axes_of(a), left), (axes_of(b), right)], out)]


@rule("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation")
def _addmm(
    axes_of: AxesOf, outputs: Sequence[Tensor], c: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any
) -> list[Axes]:
    (product,) = _matmul(axes_of, outputs, a, b)
    ndim = len(product)
    if ndim != outputs[0].ndim:  # addbmm sums over the batch
        product = meet([(product, range(ndim))], range(1, ndim))
        ndim -= 1
    return [meet([(product, range(ndim)), (axes_of(c), range(ndim - c.ndim, ndim))], range(ndim))]


@rule("linear")
def _linear(axes_of: AxesOf, outputs: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Axes]:
    lead = list(range(x.ndim - 1))
    operands = [(axes_of(x), [*lead, "k"]), (axes_of(weight), ["o", "k"])]
    if bias is not None:
        operands.append((axes_of(bias), ["o"]))
    return [meet(operands, [*lead, "o"])]


@rule("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution")
def _convolution(
    axes_of: AxesOf,
    outputs: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride_: Any = None,
    padding: Any = None,
    dilation: Any = None,
    transposed: bool = False,
    output_padding: Any = None,
    groups: int = 1,
    *args: Any,
) -> list[Axes]:
    space = weight.ndim - 2
    channel = x.ndim - space - 1
    inputs, kernel = axes_of(x), axes_of(weight)
    freeze_axes([*inputs[channel + 1 :], *kernel[2:]], "it is the space of a convolution")
    inputs = tie(inputs, range(channel + 1, x.ndim))
    spatial = new_axes(outputs[0].shape[channel + 1 :], "it is the space of a convolution")
    lead: list[Letter] = list(range(channel))
    first, second = ("i", "o") if transposed else ("o", "i")
    if groups == 1:
        operands = [(inputs, [*lead, "i", *[None] * space]), (kernel, [first, second, *[None] * space])]
        if bias is not None:
            operands.append((axes_of(bias), ["o"]))
        return [[*meet(operands, [*lead, "o"]), *spatial]]
    inputs = tie(inputs, range(channel))
    inside = inputs[channel].without(inputs[channel].parents).table[()]
    rows, shared = kernel[0].table[()], kernel[1].table[()]
    if transposed:
        unify(inside, rows)
        made = tree(factor(rows, groups)[0], [shared])
    else:
        outer, within = factor(inside, groups)
        unify(outer, factor(rows, groups)[0])
        for term in within:
            unify(shared, term)
        made = rows
    if bias is not None:
        unify(made, axes_of(bias)[0].table[()])
    return [[*meet([(inputs, [*lead, "i", *[None] * space])], lead), Axis(made), *spatial]]


def scaled_dot_product(axes_of: AxesOf, outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Axes]:
    """Rule of fused attention: queries, keys and values over the same batch and heads."""
    q, k, v = (axes_of(tensor) for tensor in args[:3])
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias", args[3] if len(args) > 3 else None))
    lead = list(range(len(q) - 2))
    if any(a.size != b.size for a, b in zip(q[:-2], k[:-2], strict=True)):
        freeze_axes([*q, *k, *v], "its heads are shared in fused attention")
    operands = [(q, [*lead, "t", "k"]), (k, [*lead, "s", "k"]), (v, [*lead, "s", "v"])]
    if isinstance(mask, Tensor):
        letters = [*lead, "t", "s"]
        operands.append((axes_of(mask), letters[len(letters) - mask.ndim :]))
    if True in (kwargs.get("is_causal"), *args[3:]):
        freeze_axes([q[-2], k[-2]], "attention is causal along it")
    joined = meet(operands, [*lead, "t", "v"])
    made = [joined]
    for output in outputs[1:]:
        known = joined[:-1]
        same = [axis.size for axis in known] == list(output.shape)
        made.append(known if same else new_axes(output.shape, "it comes out of fused attention"))
    return made


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(axes_of: AxesOf, outputs: Sequence[Tensor], x: Tensor, shape: Sequence[int], *rest: Any) -> list[Axes]:
    first = x.ndim - len(shape)
    axes = tie(axes_of(x), range(first, x.ndim))
    operands = [(axes, range(x.ndim))]
    operands += [(axes_of(p), range(first, x.ndim)) for p in rest if isinstance(p, Tensor)]
    joined = meet(operands, range(x.ndim))
    return [joined, *([*joined[:first], *[Axis(UNIT)] * len(shape)] for _ in outputs[1:])]


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
    channels = [joined[1].without(joined[1].parents)]
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
