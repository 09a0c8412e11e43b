"""Truncated singular value decompositions by the cheapest exact way for the shape."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

_SMALLEST = 1e-5  # relative to the largest singular value: below it a Gram matrix has lost the right vectors


class DecompositionError(ValueError):
    """A matrix that has no decomposition: it is not finite, or every algorithm failed."""


class Decomposition:
    r"""The singular value decomposition :math:`W = \tilde U S \tilde V^\top` of one matrix or of one for each group.

    With W turned so that it is wide, :math:`W W^\top = Q S^2 Q^\top` is decomposed in float64 on the CPU, at a fraction
    of the cost of a full decomposition of W, and

    .. math:: \tilde U_r = Q_r, \qquad \tilde V_r S_r = W^\top Q_r.

    The product is the projection of W on :math:`Q_r` and has all digits of Q, which is orthogonal to rounding. What
    squaring loses are the right vectors of small singular values, to :math:`10^{-16} (s_1 / s_r)^2`: where a wanted
    :math:`s_r` is less than 1e-5 of the largest one W is decomposed in full, and also where ``eigh`` fails.

    Nothing is computed before it is asked for.

    Args:
        matrices: Matrices of shape ``(G, N, M)``, of any floating-point type and on any device.
    """

    def __init__(self, matrices: Tensor) -> None:
        self._given = matrices.detach()
        self.groups, self.rows, self.columns = matrices.shape
        self._tall = self.rows > self.columns

    @property
    def full_rank(self) -> int:
        """The smaller side, ``min(N, M)``."""
        return min(self.rows, self.columns)

    @cached_property
    def matrices(self) -> Tensor:
        """The matrices in float64 on the CPU."""
        return self._given.to("cpu", torch.float64)

    @cached_property
    def values(self) -> Tensor:
        """All singular values, largest first, of shape ``(G, min(N, M))``.

        Raises:
            DecompositionError: If the decomposition fails or the matrices are not finite.
        """
        return self._gram[0] if self._gram is not None else self._full[1]

    def truncate(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return :math:`\tilde U_r, S_r, \tilde V_r`: of shape ``(G, N, r)``, ``(G, r)`` and ``(G, M, r)``.

        Raises:
            DecompositionError: If the decomposition fails or the matrices are not finite.
            ValueError: If there are fewer than ``rank`` singular values.
        """
        if not 1 <= rank <= self.full_rank:
            raise ValueError(f"Expected a rank between 1 and the full rank {self.full_rank} but got {rank}.")
        short, values, long = self._by_gram(rank) or (t[..., :rank] for t in self._full)
        return (long, values, short) if self._tall else (short, values, long)

    def _by_gram(self, rank: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the short side's vectors, the values and the long side's vectors; None where they are not exact."""
        if self._gram is None:
            return None
        short = self._gram[1][..., -rank:].flip(-1)
        long = self._wide.mT @ short
        values = long.norm(dim=-2)
        if bool((values.amin(-1) <= _SMALLEST * self._gram[0][..., 0]).any()):
            return None
        return short, values, long.div_(values.unsqueeze(-2))

    @property
    def _wide(self) -> Tensor:
        return self.matrices.mT if self._tall else self.matrices

    @cached_property
    def _gram(self) -> tuple[Tensor, Tensor] | None:
        """Singular values, largest first, and the vectors of the short side, smallest first; None if ``eigh`` fails."""
        gram = self._wide @ self._wide.mT
        if not math.isfinite(gram.diagonal(dim1=-2, dim2=-1).sum()):  # the squared norm
            raise DecompositionError("its weight is not finite")
        try:
            squares, vectors = torch.linalg.eigh(gram)
        except torch.linalg.LinAlgError:
            return None
        return squares.flip(-1).clamp_min(0).sqrt(), vectors

    @cached_property
    def _full(self) -> tuple[Tensor, Tensor, Tensor]:
        try:
            short, values, long = torch.linalg.svd(self._wide, full_matrices=False)
        except torch.linalg.LinAlgError as error:
            raise DecompositionError(f"its singular value decomposition failed: {error}") from error
        return short, values, long.mT
