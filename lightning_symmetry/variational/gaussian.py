"""The divergence of Gaussians with diagonal plus low-rank covariance from isotropic ones, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_symmetry.variational.sums import DiagonalSums, Grams, SquaredNorms, at_least_single


class Gaussian(NamedTuple):
    """A Gaussian with covariance ``diag(d) + V^T V / K`` over the entries of some tensors, a layer's, jointly.

    Attributes:
        means: Means, zero where an entry is fixed.
        log_variances: ``ln d``, a number for all entries or tensors that broadcast to the shapes of the means.
        factors: V, of shapes ``(K, *mean.shape)``, zero where an entry is fixed; none if K is 0. Where ``ln d`` is a
            number any shapes of as many entries do.
        trainable: Booleans that broadcast to the means' shapes, false where an entry is fixed; None: all are trainable.
        size: Number P of entries that are not fixed.
    """

    means: tuple[Tensor, ...]
    log_variances: float | tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    trainable: tuple[Tensor | None, ...]
    size: int


def divergence(gaussians: Sequence[Gaussian], prior_variances: Sequence[float | None]) -> Tensor:
    r"""Return the sum of ``KL(q || N(0, p I))`` over Gaussians q, those of a network's layers; a scalar in float64.

    The equation is that of :func:`gaussian_kl`.

    Those of one kind are computed together: for a network of small layers the time is that of the number of calls.

    Args:
        gaussians: The Gaussians.
        prior_variances: p of each; None is the p with the least divergence, the mean of :math:`d +
            \operatorname{diag}(V^\top V)/K + \mu^2` over all entries.
    """
    kinds: dict[tuple, list[tuple[Gaussian, float | None]]] = {}
    for q, prior in zip(gaussians, prior_variances, strict=True):
        kind = _rank(q), isinstance(q.log_variances, tuple), prior is None, q.means[0].device
        kinds.setdefault(kind, []).append((q, prior))
    return sum(_divergence(*zip(*group, strict=True)) for group in kinds.values())


def _divergence(gaussians: tuple[Gaussian, ...], prior_variances: tuple[float | None, ...]) -> Tensor:
    """Return the sum of divergences of Gaussians of one kind."""
    seconds, log_determinant = _moments(gaussians)
    sizes = [q.size for q in gaussians]
    if prior_variances[0] is None:
        counts = _vector(sizes, seconds)
        return 0.5 * ((counts * torch.log(seconds / counts)).sum() - log_determinant)
    precisions = _vector([1 / prior for prior in prior_variances], seconds)
    constant = sum(size * (math.log(prior) - 1) for size, prior in zip(sizes, prior_variances, strict=True))
    return 0.5 * ((seconds * precisions).sum() + constant - log_determinant)


def second_moment(q: Gaussian) -> Tensor:
    r"""Return :math:`\sum d + \operatorname{tr} G + \|\mu\|^2`, the expected squared norm; a scalar in float64."""
    return _moments([q])[0].squeeze(0)


def _moments(gaussians: Sequence[Gaussian]) -> tuple[Tensor, Tensor | float]:
    """Return the expected squared norms of Gaussians of one kind and the sum of their logarithms of determinants."""
    seconds = _norms([q.means for q in gaussians])
    if learned := isinstance(gaussians[0].log_variances, tuple):
        sums = [[sum(part) for part in zip(*_variances(q), strict=True)] for q in gaussians]
        variances, logarithms = (torch.stack(part) for part in zip(*sums, strict=True))
        seconds, log_determinant = seconds + variances, logarithms.sum()
    else:
        seconds = seconds + _vector([q.size * math.exp(q.log_variances) for q in gaussians], seconds)
        log_determinant = sum(q.size * q.log_variances for q in gaussians)
    if not (rank := _rank(gaussians[0])):
        return seconds, log_determinant
    counts = tuple(len(q.factors) for q in gaussians)
    if learned:
        factors = [[at_least_single(part) for part in q.factors] for q in gaussians]
        scaled = [part for q, parts in zip(gaussians, factors, strict=True) for part in _scaled(q, parts)]
        inner = Grams.apply(counts, *scaled) / rank
        seconds = seconds + _norms(factors) / rank
    else:
        inner = Grams.apply(counts, *(part for q in gaussians for part in q.factors)) / rank
        seconds = seconds + inner.diagonal(dim1=-2, dim2=-1).sum(-1)
        inner = inner * _vector([math.exp(-q.log_variances) for q in gaussians], inner)[:, None, None]
    eye = torch.eye(rank, dtype=inner.dtype, device=inner.device)
    return seconds, log_determinant + torch.linalg.slogdet(eye + inner).logabsdet.sum()


def _rank(q: Gaussian) -> int:
    return len(q.factors[0]) if q.factors else 0


def _norms(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sums of squares of each group of tensors."""
    return SquaredNorms.apply(tuple(map(len, tensors)), *(part for group in tensors for part in group))


def _scaled(q: Gaussian, factors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``V diag(d)^(-1/2)``."""
    scales = (torch.exp(-0.5 * at_least_single(part)) for part in q.log_variances)
    return [part * scale for part, scale in zip(factors, scales, strict=True)]


def _variances(q: Gaussian) -> list[tuple[Tensor, Tensor]]:
    """Return the sums of d and of ``ln d`` over entries that are not fixed, for each tensor."""
    values = [at_least_single(part).expand(mean.shape) for part, mean in zip(q.log_variances, q.means, strict=True)]
    return [DiagonalSums.apply(part, trainable) for part, trainable in zip(values, q.trainable, strict=True)]


def _vector(values: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as a tensor, with the type and device of another one, for which an accelerator does not wait."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


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
    log_variances = (variance.log(),) if isinstance(variance, Tensor) else math.log(variance)
    q = Gaussian((mean,), log_variances, () if factors is None else (factors,), (None,), mean.numel())
    return divergence([q], [prior_variance])
