"""Multiply-adds of layers before and after."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.conv import LowRankConv2d
from lightning_symmetry.low_rank.embedding import LowRankEmbedding
from lightning_symmetry.low_rank.projections import PROJECTIONS
from lightning_symmetry.surgery import call, evaluating, without_attention_fast_path

Shape = tuple[int, ...]
Call = tuple[tuple[Shape, ...], Shape]
"""The shapes of the inputs (query, key and value of attention) and of the output of one call of a layer."""


def watch_calls(net: nn.Module, layers: Mapping[str, nn.Module], example_input: Any) -> dict[str, list[Call]]:
    """Run a network once and note the shapes at its layers; modes and random state are as before afterwards.

    Args:
        net: The network.
        layers: The layers by name.
        example_input: A tensor, or a tuple or dictionary of arguments of ``net``.

    Returns:
        The calls of each layer that was called.
    """
    calls: dict[str, list[Call]] = defaultdict(list)

    def hook(name: str, arguments: tuple[str, ...]) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = {**dict(zip(arguments, args, strict=False)), **kwargs}
            output = output[0] if isinstance(output, tuple) else output
            calls[name].append((tuple(tuple(given[key].shape) for key in arguments), tuple(output.shape)))

        return note

    handles = []
    for name, layer in layers.items():
        arguments = ("query", "key", "value") if isinstance(layer, nn.MultiheadAttention) else ("input",)
        handles.append(layer.register_forward_hook(hook(name, arguments), with_kwargs=True))
    try:
        with evaluating(net), without_attention_fast_path():
            call(net, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return dict(calls)


def batch_size(example_input: Any) -> int:
    """Return the size of the first axis of the first tensor of an example input; 1 where there is none."""
    if isinstance(example_input, Tensor):
        return max(1, len(example_input)) if example_input.ndim else 1
    values = example_input.values() if isinstance(example_input, Mapping) else example_input or ()
    return next((batch_size(value) for value in values if isinstance(value, Tensor)), 1)


def one_position(layer: nn.Module) -> Call:
    """Return a call with one row, pixel of the output or look-up."""
    if isinstance(layer, nn.MultiheadAttention):
        return ((1, layer.embed_dim), (1, layer.kdim), (1, layer.vdim)), (1, layer.embed_dim)
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        pixels = (1,) * len(layer.kernel_size)
        return ((layer.in_channels, *layer.stride),), (layer.out_channels, *pixels)
    return ((1,) if isinstance(layer, nn.Embedding) else (1, layer.in_features),), (1, layer.weight.shape[0])


def dense_multiply_adds(layer: nn.Module, seen: Call) -> int:
    """Return those of a plain layer's weights in one call. A look-up needs none; scores of attention do not count."""
    inputs, output = seen
    if isinstance(layer, nn.MultiheadAttention):
        sizes = layer.embed_dim, layer.kdim, layer.vdim, layer.embed_dim
        return sum(_rows(shape) * layer.embed_dim * size for shape, size in zip(_sources(inputs), sizes, strict=True))
    if isinstance(layer, nn.Embedding):
        return 0
    if isinstance(layer, nn.Linear):
        return _rows(inputs[0]) * layer.weight.numel()
    return math.prod(output) // layer.out_channels * layer.weight.numel()


def factored_multiply_adds(new: nn.Module, seen: Call) -> int:
    """Return those of a factorised layer's weights in one call, in the order that it takes."""
    inputs, output = seen
    if isinstance(new, LowRankMultiheadAttention):
        rows = dict(zip(PROJECTIONS, map(_rows, _sources(inputs)), strict=True))
        return sum(rows[key] * sum(p.numel() for p in part.parameters()) for key, part in new.projections().items())
    product = new.rank * new.dense_size
    if isinstance(new, LowRankEmbedding):
        return min(math.prod(inputs[0]) * new.right.numel(), product)
    if isinstance(new, LowRankConv2d):
        pixels = math.prod(output) // new.out_channels
        first = pixels
        if new.scheme == "1xk-kx1":  # the first convolution runs along the rows of the input
            first = pixels // output[-2] * inputs[0][-2]
        factored = pixels * new.left.numel() + first * new.right.numel()
        return min(factored, product + pixels * new.dense_size)
    rows = _rows(inputs[0])
    return min(rows * (new.left.numel() + new.right.numel()), product + rows * new.dense_size)


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


def _sources(inputs: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the shapes that go into the projections of queries, keys, values and output."""
    query, key, value = inputs
    return query, key, value, query
