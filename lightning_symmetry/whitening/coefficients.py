"""Whitening coefficients of a layer's input: a centre and a damped inverse covariance, in the cheapest form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

Mode = Literal["full", "diagonal", "center"]


class WhiteningError(ValueError):
    """Statistics that cannot be whitened: too few samples, or values that are not finite."""


@dataclass(frozen=True)
class Whitening:
    r"""ZCA whitening :math:`h \mapsto U (h - c)` of inputs with N entries, and its inverse.

    .. math::
        U = (\Sigma + \epsilon I)^{-1/2} = s\,(I - Q\,\mathrm{diag}(u)\,Q^\top), \qquad
        P = U^2 = s^2\,(I - Q\,\mathrm{diag}(p)\,Q^\top)

    Q holds eigenvectors of the covariance :math:`\Sigma`; those with eigenvalue 0 need not be among them. In the modes
    ``"diagonal"`` and ``"center"`` there is no Q. All tensors may have leading axes: one whitening a group of channels.

    Attributes:
        center: c, of shape ``(..., N)``.
        scale: s, of shape ``(..., 1)`` or ``(..., N)``.
        basis: Q, of shape ``(..., N, r)``, or None.
        shrink: u, of shape ``(..., r)``, or None.
        mode: Which directions are told apart: all, the entries one by one, or none.
        damping: :math:`\epsilon`, of shape ``(..., 1)``, in absolute units. None where nothing is damped, or unknown.
    """

    center: Tensor
    scale: Tensor
    basis: Tensor | None = None
    shrink: Tensor | None = None
    mode: Mode = "full"
    damping: Tensor | None = None

    def root(self, rows: Tensor) -> Tensor:
        """Return ``rows U``, for rows of shape ``(..., n, N)``."""
        return self._apply(rows, self.scale, self.shrink)

    def inverse_root(self, rows: Tensor) -> Tensor:
        """Return ``rows U^-1``."""
        return self._apply(rows, 1 / self.scale, None if self.shrink is None else -self.shrink / (1 - self.shrink))

    def precondition(self, rows: Tensor) -> Tensor:
        """Return ``rows P``."""
        shrink = None if self.shrink is None else self.shrink * (2 - self.shrink)
        return self._apply(rows, self.scale.square(), shrink)

    def _apply(self, rows: Tensor, scale: Tensor, shrink: Tensor | None) -> Tensor:
        if self.basis is not None:
            rows = rows - ((rows @ self.basis) * shrink.unsqueeze(-2)) @ self.basis.mT
        return rows * scale.unsqueeze(-2)

    def dense(self) -> Tensor:
        """Return U as a symmetric matrix, of shape ``(..., N, N)``."""
        return _symmetric(self.root(self._eye()))

    def dense_precondition(self) -> Tensor:
        """Return P as a symmetric matrix, of shape ``(..., N, N)``."""
        return _symmetric(self.precondition(self._eye()))

    def precondition_diagonal(self) -> Tensor:
        """Return the diagonal of P, of shape ``(..., N)``."""
        diagonal = self.scale.square().expand_as(self.center)
        if self.basis is None:
            return diagonal
        shrink = self.shrink * (2 - self.shrink)
        return diagonal * (1 - (self.basis.square() @ shrink.unsqueeze(-1)).squeeze(-1))

    def uncentred(self) -> Whitening:
        """Return the same U with c = 0, for a layer without bias."""
        return replace(self, center=torch.zeros_like(self.center))

    def _eye(self) -> Tensor:
        eye = torch.eye(self.center.shape[-1], dtype=self.center.dtype, device=self.center.device)
        return eye.expand(*self.center.shape[:-1], *eye.shape)


def zca_whitening(mean: Tensor, covariance: Tensor, eps: float, *, relative: bool = False) -> Whitening:
    r"""Return the ZCA whitening :math:`U = Q\,\mathrm{diag}(\lambda + \epsilon)^{-1/2}\,Q^\top` of a covariance.

    Computed in float64, the decomposition on the CPU, and returned in float64 on the mean's device.

    Args:
        mean: Mean, of shape ``(..., N)``.
        covariance: Covariance, of shape ``(..., N, N)``.
        eps: Damping, which bounds the multiplier of the learning rate at ``1 / eps``.
        relative: Whether ``eps`` is in units of the mean variance, which gives layers very different bounds. Where
            all inputs are constant there is no such unit, and U is the identity.

    Returns:
        The :class:`~lightning_symmetry.whitening.coefficients.Whitening`, with all N eigenvectors in Q.

    Raises:
        WhiteningError: If values are not finite or the decomposition fails.
        ValueError: If ``eps`` is not positive and finite.

    Source: Natural Neural Networks (2015), section 3. There the formula is printed without the left Q.
    """
    _check(mean, covariance, eps=eps)
    mean, covariance = mean.double(), covariance.double()
    damping = _damping(eps, covariance.diagonal(dim1=-2, dim2=-1), mean, relative)
    values, basis = _eigh(covariance)
    values = values.clamp_min(0)
    # Any s will do where Q is complete; the smallest eigenvalue of U keeps all differences without cancellation.
    scale = (values[..., -1:] + damping).rsqrt()
    return Whitening(mean, scale, basis, 1 - (values + damping).rsqrt() / scale, damping=damping)


def diagonal_whitening(mean: Tensor, variances: Tensor, eps: float, *, relative: bool = False) -> Whitening:
    r"""Return the whitening by variances alone, :math:`U = \mathrm{diag}(\sigma^2 + \epsilon)^{-1/2}`.

    Args:
        mean: Mean, of shape ``(..., N)``.
        variances: Variances, of shape ``(..., N)``.
        eps: Damping.
        relative: Whether ``eps`` is in units of the mean variance.

    Raises:
        WhiteningError: If values are not finite.
        ValueError: If ``eps`` is not positive and finite.
    """
    _check(mean, variances, eps=eps)
    mean, variances = mean.double(), variances.double()
    damping = _damping(eps, variances, mean, relative)
    return Whitening(mean, (variances + damping).rsqrt(), mode="diagonal", damping=damping)


def centering(mean: Tensor) -> Whitening:
    """Return the whitening that subtracts the mean, of shape ``(..., N)``, and no more: U is the identity.

    Raises:
        WhiteningError: If values are not finite.
    """
    _check(mean, eps=1.0)
    return Whitening(mean.double(), torch.ones_like(mean[..., :1], dtype=torch.float64), mode="center")


def zca_whitening_from_samples(
    samples: Tensor,
    eps: float,
    *,
    mode: Mode = "full",
    relative: bool = False,
    weights: Tensor | None = None,
    centred: bool = True,
) -> Whitening:
    r"""Return the whitening of samples; with fewer of them than entries, from their Gram matrix.

    With :math:`N_s < N` samples :math:`P = \frac1\epsilon (I - Q\,\mathrm{diag}(\frac{\lambda}{\lambda+\epsilon})
    Q^\top)` has a correction of rank :math:`N_s`, whose eigenvectors follow from a matrix of size :math:`N_s`.
    Covariances are those of the samples as a population (divided by :math:`N_s`).

    Args:
        samples: Inputs, of shape ``(..., N_s, N)``.
        eps: Damping.
        mode: ``"full"``, ``"diagonal"`` (variances alone) or ``"center"`` (U is the identity).
        relative: Whether ``eps`` is in units of the mean variance.
        weights: Weight of each sample, of shape ``(N_s,)``. Default: all the same.
        centred: Whether the mean is subtracted; otherwise c = 0 and :math:`\Sigma = E[h h^\top]`.

    Raises:
        WhiteningError: If there are fewer than two samples, values that are not finite, or the decomposition fails.
        ValueError: If ``eps`` is not positive and finite or the mode unknown.
    """
    check_mode(mode)
    count, size = samples.shape[-2:]
    if count < 2:
        raise WhiteningError(f"Whitening needs at least 2 samples but got {count}.")
    _check(samples, eps=eps)
    rows = samples.to(torch.float64, copy=True)
    share = rows.new_full((count,), 1 / count) if weights is None else (weights / weights.sum()).to(rows)
    mean = (share @ rows) if centred else torch.zeros_like(rows[..., 0, :])
    if mode == "center":
        return centering(mean)
    rows.sub_(mean.unsqueeze(-2)).mul_(share.sqrt().unsqueeze(-1))
    if mode == "diagonal":
        return diagonal_whitening(mean, rows.square().sum(-2), eps, relative=relative)
    if count >= size:
        return zca_whitening(mean, rows.mT @ rows, eps, relative=relative)
    damping = _damping(eps, rows.square().sum(-2), mean, relative)
    values, left = _eigh(rows @ rows.mT)
    seen = values > values[..., -1:].clamp_min(0) * size * torch.finfo(torch.float64).eps
    values = torch.where(seen, values, 0)
    basis = rows.mT @ (left * (torch.where(seen, values, 1).rsqrt() * seen).unsqueeze(-2))
    shrink = 1 - (damping / (values + damping)).sqrt()
    return Whitening(mean, damping.rsqrt(), basis, shrink, damping=damping)


def check_mode(mode: str) -> None:
    """Check the name of a mode.

    Raises:
        ValueError: If there is no such mode.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"Expected `mode` to be 'full', 'diagonal' or 'center' but got {mode!r}.")


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix.cpu())
    except torch.linalg.LinAlgError as error:
        raise WhiteningError(f"The eigendecomposition failed: {error}") from error
    return values.to(matrix.device), vectors.to(matrix.device)


def _damping(eps: float, variances: Tensor, mean: Tensor, relative: bool) -> Tensor:
    unit = variances.mean(-1, keepdim=True)
    if not relative:
        return torch.full_like(unit, eps)
    rounding = (1e3 * torch.finfo(torch.float64).eps) ** 2 * mean.square().mean(-1, keepdim=True)
    return torch.where(unit > rounding, eps * unit, 1)


def _check(*tensors: Tensor, eps: float) -> None:
    if not eps > 0 or not math.isfinite(eps):
        raise ValueError(f"Expected `eps` to be positive and finite but got {eps}.")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise WhiteningError("Statistics of activations are not finite.")
