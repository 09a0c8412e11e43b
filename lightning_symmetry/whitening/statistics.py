"""Statistics of the inputs of whitened layers, accumulated row by row in bounded memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_symmetry.whitening.applied import working_dtype
from lightning_symmetry.whitening.coefficients import (
    Mode,
    Whitening,
    WhiteningError,
    centering,
    check_mode,
    diagonal_whitening,
    zca_whitening,
    zca_whitening_from_samples,
)


class InputStatistics:
    r"""Mean and covariance of the inputs of one layer, accumulated batch by batch in float64.

    .. math:: \mu = E[h], \qquad \Sigma = E[(h - \mu)(h - \mu)^\top] \quad\text{or}\quad \Sigma = E[h h^\top]

    The rows h of a linear layer are its inputs along all leading axes; those of a convolution are the channels (of a
    group) at every pixel of every sample. As long as there are no more rows than entries N they are kept, and the
    whitening has their rank; beyond that they are merged into moments (Chan et al.) of size N x N (N in the diagonal
    mode). So never more than N^2 numbers a group are held, whatever the number of samples.

    A layer without bias cannot be centred: c = 0. Its :math:`\Sigma` is the second moment about zero, the factor of
    its Fisher matrix, unless ``centred``: with batch normalisation behind the layer the mean of its outputs has no
    effect, the deltas of a channel sum to zero, and :math:`\delta^\top h = \delta^\top (h - \mu)`.

    Args:
        size: N, the number of entries (of a group).
        groups: Number of groups of channels.
        spatial: Number of axes of pixels behind the channels: 0 for a linear layer, 2 for images.
        mode: ``"full"``, ``"diagonal"`` or ``"center"``.
        centred: Whether :math:`\Sigma` is taken about the mean.
        offset: Whether the coefficients have c = mu; otherwise c = 0.

    Attributes:
        num_rows: Number of rows seen, of all batches.
        count: Sum of their weights.

    Raises:
        ValueError: If the mode is unknown.

    Source: Natural Neural Networks (2015), Algorithm 1 and section 4.3 (pixels as samples). Merging of moments: Chan,
    Golub and LeVeque (1983).
    """

    def __init__(
        self,
        size: int,
        groups: int = 1,
        spatial: int = 0,
        mode: Mode = "full",
        centred: bool = True,
        offset: bool = True,
    ) -> None:
        check_mode(mode)
        self.size, self.groups, self.spatial, self.mode = size, groups, spatial, mode
        self.centred, self.offset = centred, offset
        self.num_rows = 0
        self.count = 0.0
        self._rows: Tensor | None = None  # (groups, n, N) as they are, as long as n <= N
        self._weights: Tensor | None = None  # (n,)
        self._mean: Tensor | None = None  # (groups, N), afterwards
        self._scatter: Tensor | None = None  # (groups, N, N), or (groups, N) in the diagonal mode

    @torch.no_grad()
    def add(self, input: Tensor) -> None:
        """Add the rows of an input of the layer.

        Args:
            input: Shape ``(..., N)`` for a linear layer, ``(batch, groups * N, *pixels)`` for a convolution, with or
                without the batch axis.

        Raises:
            ValueError: If its size is not that of the layer.
        """
        rows = input.detach().movedim(-self.spatial - 1, -1)
        if rows.shape[-1] != self.groups * self.size:
            raise ValueError(f"Expected inputs of {self.groups * self.size} channels but got {tuple(input.shape)}.")
        device = rows.device if rows.device.type in ("cpu", "cuda") else "cpu"  # where there is float64
        for part in rows.reshape(-1, self.groups, self.size).split(max(self.size, _CHUNK // rows.shape[-1])):
            batch = InputStatistics(self.size, self.groups, self.spatial, self.mode, self.centred, self.offset)
            batch.num_rows, batch.count = len(part), float(len(part))
            batch._rows = part.to(device, working_dtype(part), copy=True).movedim(1, 0)
            batch._weights = batch._rows.new_ones(len(part), dtype=torch.float64)
            self.merge(batch)

    def merge(self, other: InputStatistics) -> None:
        """Add what another one of the same layer has seen: on another rank, or before.

        Raises:
            ValueError: If it is one of another layer.
        """
        if self._describe() != other._describe():
            raise ValueError(f"Cannot merge statistics of {other._describe()} into those of {self._describe()}.")
        if not other.num_rows:
            return
        num_rows = self.num_rows + other.num_rows
        kept = self._rows is not None or not self.num_rows
        if kept and other._rows is not None and self.mode == "full" and num_rows <= self.size:
            if self._rows is None:
                self._rows, self._weights = other._rows, other._weights
            else:
                self._rows = torch.cat([self._rows, other._rows.to(self._rows.device)], 1)
                self._weights = torch.cat([self._weights, other._weights.to(self._rows.device)])
        else:
            moments = [s._moments() for s in (self, other) if s.num_rows]
            self._mean, self._scatter = moments[0][1:] if len(moments) == 1 else _merged(*moments)
            self._rows = self._weights = None
        self.num_rows, self.count = num_rows, self.count + other.count

    def discount(self, factor: float) -> None:
        """Multiply the weight of all rows seen so far: ``old.discount(0.9); old.merge(new)`` is a moving average.

        Raises:
            ValueError: If the factor is not between 0 (excluded) and 1.
        """
        if not 0 < factor <= 1:
            raise ValueError(f"Expected `factor` to lie in (0, 1] but got {factor}.")
        self.count *= factor
        self._weights = None if self._weights is None else self._weights * factor
        self._scatter = None if self._scatter is None else self._scatter * factor

    def whitening(self, eps: float, *, relative: bool = False) -> Whitening:
        """Return the coefficients, with a leading axis of groups.

        Args:
            eps: Damping, which bounds the multiplier of the learning rate at ``1 / eps``.
            relative: Whether ``eps`` is in units of the mean variance.

        Raises:
            WhiteningError: If there are fewer than two rows, values that are not finite, or the decomposition fails.
            ValueError: If ``eps`` is not positive and finite.
        """
        if self.num_rows < 2:
            raise WhiteningError(f"Whitening needs at least 2 samples but got {self.num_rows}.")
        whitening = self._whitening(eps, relative)
        return whitening if self.offset else whitening.uncentred()

    def _whitening(self, eps: float, relative: bool) -> Whitening:
        if self._rows is not None:
            return zca_whitening_from_samples(
                self._rows, eps, relative=relative, weights=self._weights, centred=self.centred
            )
        mean, covariance = self.moments()
        if self.mode == "center":
            return centering(mean)
        return (diagonal_whitening if self.mode == "diagonal" else zca_whitening)(
            mean, covariance, eps, relative=relative
        )

    def mean(self) -> Tensor:
        """Return the mean, of shape ``(groups, N)``."""
        return self._mean if self._rows is None else self._weights @ self._rows.double() / self.count

    def moments(self) -> tuple[Tensor, Tensor | None]:
        """Return the mean, ``(groups, N)``, and the covariance (its diagonal in that mode, None for centring)."""
        _, mean, scatter = self._moments()
        if scatter is None:
            return mean, None
        covariance = scatter / self.count
        if not self.centred:
            covariance = covariance + (mean.square() if self.mode == "diagonal" else mean[:, :, None] * mean[:, None])
        return mean, covariance

    def _moments(self) -> tuple[float, Tensor, Tensor | None]:
        if self._rows is None:
            return self.count, self._mean, self._scatter
        mean = self.mean()
        if self.mode == "center":
            return self.count, mean, None
        rows = (self._rows.double() - mean.unsqueeze(1)) * self._weights.sqrt().unsqueeze(-1)
        return self.count, mean, rows.square().sum(1) if self.mode == "diagonal" else rows.mT @ rows

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen: tensors and numbers."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        for name in _STATE:
            setattr(self, name, state[name])

    def _describe(self) -> str:
        return f"{self.groups} group(s) of {self.size} entries (mode {self.mode!r}, centred {self.centred})"

    def __repr__(self) -> str:
        return f"InputStatistics({self._describe()}, num_rows={self.num_rows})"


_CHUNK = 2**18
"""Number of entries that are brought to float64 at a time."""

_STATE = ("num_rows", "count", "centred", "_rows", "_weights", "_mean", "_scatter")


def _merged(
    a: tuple[float, Tensor, Tensor | None], b: tuple[float, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Merge two counts, means and scatters; return mean and scatter."""
    (count, mean, scatter), (other_count, other_mean, other_scatter) = a, b
    step = other_mean.to(mean.device) - mean
    share = other_count / (count + other_count)
    merged = mean + step * share
    if scatter is None or other_scatter is None:
        return merged, None
    outer = step.square() if scatter.ndim == 2 else step[:, :, None] * step[:, None]
    return merged, scatter + other_scatter.to(scatter.device) + outer * (count * share)
