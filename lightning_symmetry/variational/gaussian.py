"""The divergence of a Gaussian with diagonal plus low-rank covariance from an isotropic one, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ENTRIES = 131072  # of a block of columns that is widened to float64 at once: it stays in the cache
_NARROW = 64  # columns whose products are summed in float32


class Gram(torch.autograd.Function):
    r"""The sum of ``rows @ rows.T`` in float64 over tensors of K rows each, whatever their type, with long rows.

    Rows that have become almost parallel have a Gram matrix whose determinant is lost in float32. Widening a block of
    columns at a time costs little memory; the gradient, ``(dG + dG^T) rows``, is one product in the type of the rows.
    On the CPU, where products in float64 are slow, those of float32 serve, summed in float64, if they show that rows
    are far from parallel: their relative error is then 1e-8 at most, that of the logarithm of the determinant as well.

    The gradient is no view of another tensor, so that autograd adds what comes later, the gradient of the likelihood,
    to it in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        """Return the matrix, of shape ``(K, K)``."""
        with torch.autocast(tensors[0].device.type, enabled=False):
            return torch.stack([_gram(rows.flatten(1)) for rows in tensors]).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the rows."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the rows; differentiable a second time."""
        grad = grad + grad.mT
        with torch.autocast(grad.device.type, enabled=False):
            return tuple(_mapped(grad, rows) for rows in ctx.saved_tensors)


class SquaredNorm(torch.autograd.Function):
    """The sum of squares of some tensors in float64: close to the prior nearly all of it cancels in the divergence."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        """Return the sum."""
        wide = wide_type(tensors[0].device)
        blocks = [block for tensor in tensors for block in at_least_single(tensor).flatten().split(_ENTRIES)]
        return torch.stack([torch.linalg.vector_norm(block, dtype=wide) for block in blocks]).square().sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the tensors."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients; differentiable a second time."""
        return tuple(((2 * grad).to(at_least_single(x).dtype) * x).to(x.dtype) for x in ctx.saved_tensors)


def _gram(rows: Tensor) -> Tensor:
    """Return ``rows @ rows.T`` in float64."""
    if (narrow := _narrow_gram(rows)) is not None:
        return narrow
    blocks = (block.to(wide_type(rows.device)) for block in rows.split(max(_ENTRIES // len(rows), 1), dim=-1))
    return torch.stack([block @ block.mT for block in blocks]).sum(0)


def _mapped(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return ``matrix @ rows`` in the shape and type of the rows."""
    kept = at_least_single(rows.flatten(1))
    return torch.ops.aten._unsafe_view(matrix.to(kept.dtype) @ kept, rows.shape).to(rows.dtype)


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


class Block(NamedTuple):
    """Some of the entries of a Gaussian with covariance ``diag(d) + V^T V / K``.

    Attributes:
        mean: Means, zero where an entry is fixed.
        log_variance: ``ln d``, a number for all entries or a tensor that broadcasts to the mean's shape.
        factors: V, of shape ``(K, *mean.shape)``, zero where an entry is fixed; None if K is 0. Where ``ln d`` is a
            number any shape of as many entries does.
        trainable: Booleans that broadcast to the mean's shape, false where an entry is fixed; None: all are trainable.
        size: Number of entries that are not fixed.
    """

    mean: Tensor
    log_variance: Tensor | float
    factors: Tensor | None
    trainable: Tensor | None
    size: int


def divergence(blocks: Sequence[Block], prior_variance: float | None) -> Tensor:
    r"""Return ``KL(q || N(0, p I))`` of the joint Gaussian q over all blocks; a scalar in float64.

    .. math::
        \tfrac12 \Big[ \tfrac{1}{p} \big( \textstyle\sum d + \operatorname{tr} G + \|\mu\|^2 \big) - P + P \ln p
        - \sum \ln d - \ln\det M \Big], \quad G = \tfrac1K V V^\top, \quad M = I + \tfrac1K V \operatorname{diag}(1/d)
        V^\top

    Args:
        blocks: The entries; their factors belong together and have the same K.
        prior_variance: p; None is the p with the least divergence, the mean of :math:`d + \operatorname{diag}(V^\top
            V)/K + \mu^2` over all entries.
    """
    size = sum(block.size for block in blocks)
    second, log_determinant = _moments(blocks)
    if prior_variance is None:
        return 0.5 * (size * torch.log(second / size) - log_determinant)
    return 0.5 * (second / prior_variance - size + size * math.log(prior_variance) - log_determinant)


def second_moment(blocks: Sequence[Block]) -> Tensor:
    r"""Return :math:`\sum d + \operatorname{tr} G + \|\mu\|^2`, the expected squared norm; a scalar in float64."""
    return _moments(blocks)[0]


def _moments(blocks: Sequence[Block]) -> tuple[Tensor, Tensor | float]:
    """Return the expected squared norm and the logarithm of the covariance's determinant."""
    second, log_determinant = SquaredNorm.apply(*(block.mean for block in blocks)), 0.0
    for block in blocks:
        total, logarithms = _variances(block)
        second, log_determinant = second + total, log_determinant + logarithms
    if spread := [block for block in blocks if block.factors is not None]:
        trace, inner = _products(spread)
        eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        second, log_determinant = second + trace, log_determinant + torch.linalg.slogdet(eye + inner).logabsdet
    return second, log_determinant


def _products(blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """Return ``tr V V^T / K`` and ``V diag(1/d) V^T / K`` of all entries."""
    rank, trace, inner = len(blocks[0].factors), 0.0, 0.0
    learned = [block for block in blocks if isinstance(block.log_variance, Tensor)]
    constant = [block for block in blocks if not isinstance(block.log_variance, Tensor)]
    for value in sorted({block.log_variance for block in constant}):
        gram = Gram.apply(*(block.factors for block in constant if block.log_variance == value)) / rank
        trace, inner = trace + gram.diagonal().sum(), inner + gram * math.exp(-value)
    if learned:
        factors = [at_least_single(block.factors) for block in learned]
        scales = [torch.exp(-0.5 * at_least_single(block.log_variance)) for block in learned]
        trace = trace + SquaredNorm.apply(*factors) / rank
        inner = inner + Gram.apply(*(v * scale for v, scale in zip(factors, scales, strict=True))) / rank
    return trace, inner


def at_least_single(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if its type is narrower."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def _variances(block: Block) -> tuple[Tensor | float, Tensor | float]:
    """Return the sums of d and of ``ln d`` over entries that are not fixed."""
    values = block.log_variance
    if not isinstance(values, Tensor):
        return block.size * math.exp(values), block.size * values
    values = at_least_single(values)
    if values.shape != block.mean.shape:
        values = values.expand(block.mean.shape)
    return DiagonalSums.apply(values, block.trainable)


def gaussian_kl(
    mean: Tensor, variance: Tensor | float, factors: Tensor | None = None, prior_variance: float | None = 1.0
) -> Tensor:
    r"""Return ``KL(N(mu, diag(d) + V^T V / K) || N(0, p I))``, summed over all entries.

    .. math::
        \tfrac12 \Big[ \tfrac{1}{p} \big( \textstyle\sum d + \operatorname{tr} G + \|\mu\|^2 \big) - P + P \ln p
        - \sum \ln d - \ln\det M \Big], \quad G = \tfrac1K V V^\top, \quad M = I + \tfrac1K V \operatorname{diag}(1/d)
        V^\top

    Args:
        mean: The mean, of any shape, with P entries.
        variance: d, a number or a tensor that broadcasts to the mean's shape.
        factors: V, of shape ``(K, *mean.shape)``; None: a diagonal covariance.
        prior_variance: p; None is the p with the least divergence.

    Returns:
        A scalar in nats; in float64, as the determinant is computed.

    Raises:
        ValueError: If shapes do not fit, or a variance that is a number is not positive.

    Source: Tomczak, Swaroop, Turner, Efficient Low Rank Gaussian Variational Inference for Neural Networks (2020).
    """
    if factors is not None and (factors.ndim != mean.ndim + 1 or factors.shape[1:] != mean.shape or not len(factors)):
        raise ValueError(
            f"Expected `factors` of shape (K, {', '.join(map(str, mean.shape))}) but got {tuple(factors.shape)}."
        )
    for name, value in (("variance", variance), ("prior_variance", prior_variance)):
        if isinstance(value, float | int) and not 0 < value < math.inf:
            raise ValueError(f"Expected `{name}` to be positive and finite but got {value}.")
    log_variance = variance.log() if isinstance(variance, Tensor) else math.log(variance)
    return divergence([Block(mean, log_variance, factors, None, mean.numel())], prior_variance)
