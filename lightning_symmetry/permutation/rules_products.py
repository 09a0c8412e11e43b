"""Rules of matrix products, convolutions, attention and recurrent cells."""

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
    plain_term,
    restrict,
    take,
    tie,
)
from lightning_symmetry.permutation.reshape import reshape
from lightning_symmetry.permutation.rules import Axes, AxesOf, rule
from lightning_symmetry.permutation.terms import factor, tree, unify

_WORKSPACE = "it is a workspace for gradients"


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


@rule("convolution", "_convolution", "convolution_overrideable")
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
    lead: list[Letter] = list(range(channel))
    positions: list[Letter] = list(range(channel + 1, x.ndim))
    if _maps_positions(weight, stride_, padding, output_padding):
        spatial = []
    else:
        freeze_axes([*inputs[channel + 1 :], *kernel[2:]], "it is the space of a convolution")
        inputs = tie(inputs, range(channel + 1, x.ndim))
        spatial = new_axes(outputs[0].shape[channel + 1 :], "it is the space of a convolution")
    through = positions if not spatial else []  # a kernel of one entry maps each position by itself
    seen = [*lead, "i", *(through or [None] * space)]
    first, second = ("i", "o") if transposed else ("o", "i")
    if groups == 1:
        operands = [(inputs, seen), (kernel, [first, second, *[None] * space])]
        if bias is not None:
            operands.append((axes_of(bias), ["o"]))
        return [[*meet(operands, [*lead, "o", *through]), *spatial]]
    inputs = tie(inputs, [dim for dim in range(x.ndim) if dim != channel])
    inside, rows, shared = (plain_term(axis) for axis in (inputs[channel], kernel[0], kernel[1]))
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
        unify(made, plain_term(axes_of(bias)[0]))
    around = meet([(tie(inputs, [channel]), seen)], [*lead, *through])
    return [[*around[:channel], Axis(made), *around[channel:], *spatial]]


def _maps_positions(weight: Tensor, stride: Any, padding: Any, output_padding: Any) -> bool:
    """Whether a convolution is a linear map of the channels at each position."""
    return (
        weight.shape[2:].numel() == 1
        and all(step == 1 for step in stride)
        and not any(padding)
        and not any(output_padding or [])
    )


def scaled_dot_product(
    axes_of: AxesOf,
    outputs: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    **rest: Any,
) -> list[Axes]:
    """Rule of fused attention: queries, keys and values over the same batch and heads, or heads in equal parts."""
    q, k, v = (axes_of(tensor) for tensor in (query, key, value))
    lead: list[Letter] = list(range(query.ndim - 2))
    shared: list[Letter] = list(lead)
    if query.shape[:-2] != key.shape[:-2]:  # several heads of queries share one of keys and values
        *batch, heads, length, width = query.shape
        q = reshape(q, [*batch, key.shape[-3], heads // key.shape[-3], length, width])
        lead.append("part")
    if dropout_p:
        freeze_axes([*q, *k, *v], "attention drops entries at random")
    operands = [(q, [*lead, "t", "k"]), (k, [*shared, "s", "k"]), (v, [*shared, "s", "v"])]
    mask = attn_mask if attn_mask is not None else attn_bias
    if mask is not None and mask.numel() > 1:
        axes = axes_of(mask)
        if len(lead) > len(shared) and mask.ndim > 2:
            heads = mask.shape[-3]
            sizes = [key.shape[-3], query.shape[-3] // key.shape[-3]] if heads > 1 else [1, 1]
            axes = reshape(axes, [*mask.shape[:-3], *sizes, *mask.shape[-2:]])
        letters = [*lead, "t", "s"]
        operands.append((axes, letters[len(letters) - len(axes) :]))
    if is_causal:
        freeze_axes([q[-2], k[-2]], "attention is causal along it")
    joined = meet(operands, [*lead, "t", "v"])
    joined = reshape(joined, [*query.shape[:-1], value.shape[-1]])
    made = [joined]
    for output in outputs[1:]:
        known = restrict(joined[:-1])
        same = [axis.size for axis in known] == list(output.shape)
        made.append(known if same else new_axes(output.shape, "it comes out of fused attention"))
    return made


@rule("_trilinear")
def _trilinear(
    axes_of: AxesOf,
    outputs: Any,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    without_a: Sequence[int],
    without_b: Sequence[int],
    without_c: Sequence[int],
    summed: Sequence[int],
    *args: Any,
) -> list[Axes]:
    ndim = a.ndim + len(without_a)
    operands = [
        (axes_of(tensor), [dim for dim in range(ndim) if dim not in lacking])
        for tensor, lacking in ((a, without_a), (b, without_b), (c, without_c))
    ]
    return [meet(operands, [dim for dim in range(ndim) if dim not in summed])]


@rule("_cdist_forward")
def _cdist(axes_of: AxesOf, outputs: Any, a: Tensor, b: Tensor, *args: Any) -> list[Axes]:
    letters: list[Letter] = [("b", k) for k in range(max(a.ndim, b.ndim) - 2)]
    left = [*letters[len(letters) - (a.ndim - 2) :], "m", "k"]
    right = [*letters[len(letters) - (b.ndim - 2) :], "n", "k"]
    return [meet([(axes_of(a), left), (axes_of(b), right)], [*letters, "m", "n"])]


@rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _fused_cell(
    axes_of: AxesOf, outputs: Sequence[Tensor], ours: Tensor, theirs: Tensor, state: Tensor, *biases: Tensor | None
) -> list[Axes]:
    """Gates one after the other, each with the units of the state."""
    width = state.shape[-1]
    operands = [(axes_of(state), ["n", "h"])]
    for tensor in (ours, theirs, *biases):
        if tensor is not None:
            axes = axes_of(tensor)
            for start in range(0, tensor.shape[-1], width):
                part = take(axes, tensor.ndim - 1, start, width)
                operands.append((part, ["n", "h"][2 - tensor.ndim :]))
    new = meet(operands, ["n", "h"])
    return [new if output.shape == state.shape else new_axes(output.shape, _WORKSPACE) for output in outputs]
