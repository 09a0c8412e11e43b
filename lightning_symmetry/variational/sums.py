"""Sums over many entries in float64, whatever their type: Gram matrices, squares, variances."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

_ENTRIES = 131072  # of a block of columns that is widened to float64 at once: it stays in the cache
_NARROW = 64  # columns whose products are summed in float32


class LayerSums(torch.autograd.Function):
    """For each of some layers a sum over its tensors, given how many belong to each and then all tensors."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the tensors."""
        ctx.counts, *tensors = inputs
        ctx.save_for_backward(*tensors)


class Grams(LayerSums):
    r"""For each of some layers the sum of ``rows @ rows.T`` in float64 over its tensors of K long rows, in any type.

    Rows that have become almost parallel have a Gram matrix whose determinant is lost in float32. Widening a block of
    columns at a time costs little memory; the gradient, ``(dG + dG^T) rows``, is one product in the type of the rows.
    On the CPU, where products in float64 are slow, those of float32 serve, summed in float64, if they show that rows
    are far from parallel: their relative error is then 1e-8 at most, that of the logarithm of the determinant as well.

    Gradients are no views of other tensors, so that autograd adds what comes later, the gradient of the likelihood, to
    them in place.
    """

    @staticmethod
    def forward(counts: tuple[int, ...], *tensors: Tensor) -> Tensor:
        """Return the matrices, of shape ``(layers, K, K)``, given how many of the tensors belong to each layer."""
        with torch.autocast(tensors[0].device.type, enabled=False):
            grams = iter([_gram(rows.flatten(1)) for rows in tensors])
            return torch.stack([sum(islice(grams, count)) for count in counts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors; differentiable a second time."""
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad + grad.mT, _mapped)


class SquaredNorms(LayerSums):
    """For each of some layers the sum of squares of its tensors' entries in float64.

    Close to the prior nearly all of it cancels in the divergence.
    """

    @staticmethod
    def forward(counts: tuple[int, ...], *tensors: Tensor) -> Tensor:
        """Return the sums, of shape ``(layers,)``, given how many of the tensors belong to each layer."""
        wide = wide_type(tensors[0].device)
        parts = [at_least_single(tensor).flatten().split(_ENTRIES) for tensor in tensors]
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=wide) for split in parts for part in split])
        lengths = iter([len(split) for split in parts])
        return torch.stack([part.sum() for part in norms.square().split([sum(islice(lengths, n)) for n in counts])])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors; differentiable a second time."""
        return _gradients(ctx, 2 * grad, lambda scale, tensor: (scale * tensor).to(tensor.dtype))


def _gradients(ctx: Any, grad: Tensor, of_tensor: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments, of tensors from their layer's part in the type to compute in."""
    tensors = ctx.saved_tensors
    types = [at_least_single(tensor).dtype for tensor in tensors]
    parts = {dtype: grad.to(dtype).unbind() for dtype in set(types)}
    layers = [layer for layer, count in enumerate(ctx.counts) for _ in range(count)]
    found = zip(tensors, types, layers, ctx.needs_input_grad[1:], strict=True)
    return None, *(of_tensor(parts[dtype][layer], x) if needed else None for x, dtype, layer, needed in found)


def _gram(rows: Tensor) -> Tensor:
    """Return ``rows @ rows.T`` in float64."""
    if (narrow := _narrow_gram(rows)) is not None:
        return narrow
    wide = wide_type(rows.device)
    blocks = [block.to(wide) for block in rows.split(max(_ENTRIES // len(rows), 1), dim=-1)]
    return sum(block @ block.mT for block in blocks)


def _mapped(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return ``matrix @ rows`` in the shape and type of the rows."""
    product = matrix @ at_least_single(rows.flatten(1))
    return torch.ops.aten._unsafe_view(product, rows.shape).to(rows.dtype)


def _narrow_gram(rows: Tensor) -> Tensor | None:
    """Return the Gram matrix of many columns by products in float32; None where these may not do."""
    count, columns = rows.shape
    known = rows.device.type == "cpu" and rows.dtype == torch.float32 and not torch.compiler.is_compiling()
    if not known or count == 1 or columns < _ENTRIES // count:
        return None
    size = max(_NARROW, 4 * count)
    whole = columns // size * size
    blocks = rows[:, :whole].unflatten(1, (-1, size)).transpose(0, 1)
    rest = rows[:, whole:].double()
    gram = torch.bmm(blocks, blocks.mT).sum(0, dtype=torch.float64) + rest @ rest.mT
    squares = gram.diagonal()
    apart = (2 * count * gram).square() < torch.outer(squares, squares)
    try:
        return gram if bool((apart | torch.eye(count, dtype=torch.bool)).all()) else None
    except RuntimeError:  # under vmap it cannot be asked
        return None


class DiagonalSums(torch.autograd.Function):
    """The sums of ``exp(a)`` and of ``a`` over entries that are not fixed, in float64; two passes for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logarithms: Tensor, trainable: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both sums."""
        wide, values = wide_type(logarithms.device), logarithms.exp()
        if trainable is not None:
            values, logarithms = torch.where(trainable, values, 0), torch.where(trainable, logarithms, 0)
        return values.sum(dtype=wide), logarithms.sum(dtype=wide)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
        """Keep the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, of_sum: Tensor, of_logarithms: Tensor) -> tuple[Tensor, None]:
        """Return the gradient; differentiable a second time."""
        logarithms, trainable = ctx.saved_tensors
        grad = torch.addcmul(of_logarithms.to(logarithms.dtype), logarithms.exp(), of_sum.to(logarithms.dtype))
        return (grad if trainable is None else torch.where(trainable, grad, 0)), None


def wide_type(device: torch.device) -> torch.dtype:
    """Return the type in which determinants and sums of many entries are computed: float64 where there is any."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_single(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if its type is narrower."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
