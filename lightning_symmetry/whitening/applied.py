"""Coefficients as layers apply them: U or P in the layer's own type, in the form that costs least."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_symmetry.whitening.coefficients import Whitening, WhiteningError


class Applied(NamedTuple):
    r"""A centre and a symmetric matrix A, which is U or P.

    .. math:: A = B := s\,(I - Q\,\mathrm{diag}(a)\,Q^\top) \qquad\text{or}\qquad A = B\,\mathrm{diag}(e)\,B

    Fields are None where they change nothing. A dense B stands in ``basis``, without ``shrink`` and ``scale``.

    Attributes:
        center: c, of shape ``(G, N)``, or None for 0.
        scale: s, of shape ``(G, 1)`` or ``(G, N)``.
        basis: Q, of shape ``(G, N, r)``, or B, of shape ``(G, N, N)``.
        shrink: a, of shape ``(G, r)``.
        diagonal: e, of shape ``(G, N)``, where B is U and stands twice; None: A is B.
    """

    center: Tensor | None = None
    scale: Tensor | None = None
    basis: Tensor | None = None
    shrink: Tensor | None = None
    diagonal: Tensor | None = None

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return all(part is None for part in self)

    def to(self, like: Tensor) -> Applied:
        """Return it on the device of a tensor, in its type or in float32 where that has less than 32 bits."""
        dtype = working_dtype(like)
        return Applied(*(None if t is None else t.to(like.device, dtype) for t in self))

    def describe(self) -> str:
        """Return the form in words."""
        if self.basis is not None:
            form = "dense" if self.shrink is None else f"rank {self.basis.shape[-1]}"
        elif self.scale is not None:
            form = "scaled" if self.scale.shape[-1] == 1 else "diagonal"
        else:
            form = "identity" if self.center is None else "centred"
        return form if self.diagonal is None else f"{form}, scaled units"


def working_dtype(like: Tensor) -> torch.dtype:
    """Return the type in which coefficients of a weight are held: float64 for float64, otherwise float32."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def applied(whitening: Whitening, like: Tensor, power: int) -> Applied:
    """Bring coefficients into the form in which a layer applies them.

    The dense matrix costs 2 N^2 operations a row and the low-rank form 4 N r, so that the dense one is taken where
    r > N / 2. Directions whose multiplier P is within 0.1 % of the largest one get that: with a damping above their
    variance there are many of them, and a variance from N_s samples is far less certain. What remains is computed in
    float64 and then rounded.

    Args:
        whitening: Coefficients with a leading axis of groups.
        like: The weight, whose device and type they take.
        power: 1 for U, 2 for P, of the same directions.

    Raises:
        WhiteningError: If a coefficient is not finite in the layer's type.
    """
    center = whitening.center if bool(whitening.center.any()) else None
    scale, basis, shrink = whitening.scale, whitening.basis, whitening.shrink
    if basis is None:
        scale = None if whitening.mode == "center" else scale**power
    else:
        scale, basis, shrink = _distinct(scale, basis, shrink)
        if 2 * basis.shape[-1] > basis.shape[-2]:
            scale, shrink = None, None
            basis = whitening.dense() if power == 1 else whitening.dense_precondition()
        elif basis.shape[-1] == 0:
            scale, basis, shrink = scale**power, None, None
        else:
            scale, shrink = scale**power, shrink if power == 1 else shrink * (2 - shrink)
    result = Applied(center, scale, basis, shrink).to(like)
    if not all(bool(torch.isfinite(t).all()) for t in result if t is not None):
        raise WhiteningError(f"Whitening coefficients overflow in {working_dtype(like)}: choose a larger eps.")
    return result


_DISTINCT = 1e-3
"""Relative difference between multipliers that counts."""


def _distinct(scale: Tensor, basis: Tensor, shrink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return s, Q and u of U with the directions alone whose multiplier is not the largest."""
    roots = scale * (1 - shrink)
    complete = basis.shape[-1] == basis.shape[-2]
    largest = roots.amax(-1, keepdim=True) if complete else scale
    shrink, order = (1 - roots / largest).sort(descending=True)
    rank = int((shrink * (2 - shrink) > _DISTINCT).sum(-1).max())  # the same for all groups
    return largest, basis.gather(-1, order.unsqueeze(-2).expand_as(basis))[..., :rank], shrink[..., :rank]


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off where it is on: coefficients of very different sizes would lose the small ones."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def apply_rows(
    rows: Tensor,
    scale: Tensor | None,
    basis: Tensor | None,
    shrink: Tensor | None,
    diagonal: Tensor | None = None,
) -> Tensor:
    """Return ``rows A``, for rows of shape ``(..., n, N)``."""
    if diagonal is not None:
        if basis is None:
            return rows * (diagonal if scale is None else diagonal * scale.square()).unsqueeze(-2)
        return apply_rows(apply_rows(rows, scale, basis, shrink) * diagonal.unsqueeze(-2), scale, basis, shrink)
    if basis is not None:
        rows = rows @ basis if shrink is None else rows - ((rows @ basis) * shrink.unsqueeze(-2)) @ basis.mT
    return rows if scale is None else rows * scale.unsqueeze(-2)


def apply_rows_(
    rows: Tensor,
    scale: Tensor | None,
    basis: Tensor | None,
    shrink: Tensor | None,
    diagonal: Tensor | None = None,
) -> Tensor:
    """Return ``rows A`` for rows ``(n, N)`` or ``(1, n, N)`` that may be overwritten: one pass instead of three."""
    if diagonal is not None:
        if basis is None:
            return apply_rows(rows, scale, basis, shrink, diagonal)
        rows = apply_rows_(rows, scale, basis, shrink).mul_(diagonal.unsqueeze(-2))
        return apply_rows_(rows, scale, basis, shrink)
    factor = None if scale is None else _number(scale)
    if factor is not None and basis is None:
        return rows.mul_(factor)
    if shrink is None or factor is None or rows.shape[:-2].numel() != 1:
        return apply_rows(rows, scale, basis, shrink)
    matrix, columns = rows.view(rows.shape[-2:]), basis.view(basis.shape[-2:])
    inner = (matrix @ columns) * shrink.view(-1)
    return matrix.addmm_(inner, columns.mT, beta=factor, alpha=-factor).view(rows.shape)


def _number(scale: Tensor) -> float | None:
    """Return a scale as a number where it is one that is at hand: not on an accelerator, nor while it is traced."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return None if traced or scale.numel() != 1 or scale.device.type != "cpu" else float(scale)


def solve_rows(rows: Tensor, scale: Tensor | None, basis: Tensor | None, shrink: Tensor | None) -> Tensor:
    """Return ``rows B^-1``: the inverse of A as it is after rounding, where Q is not quite orthogonal.

    .. math:: (I - Q D Q^T)^{-1} = I + Q (I - D Q^T Q)^{-1} D Q^T

    Source: the matrix inversion lemma of Sherman, Morrison and Woodbury.
    """
    rows = rows if scale is None else rows / scale.unsqueeze(-2)
    if basis is None:
        return rows
    if shrink is None:
        return torch.linalg.solve(basis, rows, left=False)
    scaled = shrink.unsqueeze(-1) * basis.mT  # D Q^T
    inner = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device) - scaled @ basis
    return rows + (rows @ basis) @ torch.linalg.solve(inner, scaled)


def tap_by_tap(weight: Tensor, groups: int, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Apply a function of rows ``(G, n, N)`` to each tap of a weight ``(M, N, *kernel)``."""
    rows = weight.reshape(groups, -1, *weight.shape[1:]).movedim(2, -1)  # (G, M / G, *kernel, N)
    result = function(rows.reshape(groups, -1, weight.shape[1]), *arguments)
    return result.view(rows.shape).movedim(-1, 2).reshape(weight.shape)


def shift_of(weight: Tensor, center: Tensor) -> Tensor:
    """Return ``sum_k W_k c`` over the taps k, of shape ``(M,)``, for a weight ``(M, N, *kernel)``."""
    groups, size = center.shape
    taps = weight.reshape(groups, -1, size, weight[0, 0].numel()).sum(-1)
    return (taps @ center.unsqueeze(-1)).flatten()
