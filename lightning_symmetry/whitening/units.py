"""PRONG+: running variances of whitened units, by which they are rescaled after each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_symmetry.whitening.applied import Applied, apply_rows, apply_rows_, full_precision, working_dtype
from lightning_symmetry.whitening.coefficients import Whitening
from lightning_symmetry.whitening.statistics import InputStatistics


class Units:
    r"""Running damped variances of the whitened units :math:`z = U (h - c)` of one layer, from its mini-batches.

    .. math:: v_j = [U S U]_{jj} + \epsilon\,[U U]_{jj}, \qquad D_{jj} = v_j^{-1/2}

    S is the running covariance of h: a moving average over optimizer steps, about the moving average of the mean, that
    starts from the statistics that U comes from. There :math:`U (S + \epsilon I) U = I`, so that v = 1 and D = I right
    after a reparametrisation (to the 0.1 % to which multipliers near the largest one are told apart). With the weight
    :math:`\rho` of the past, and mean m' and variance w of the units in the batches of a step,

    .. math::
        v \leftarrow \rho v + (1 - \rho) (w + \epsilon\,\mathrm{diag}(UU)) + \rho (1 - \rho) (m' - m)^2, \qquad
        m \leftarrow \rho m + (1 - \rho) m'.

    Where :math:`\Sigma` is a second moment about zero so is S (:class:`InputStatistics`). The centre c stays what it is
    until the next reparametrisation. Since :math:`v_j \ge \epsilon [UU]_{jj}`, multipliers of
    :math:`P' = U D^2 U` stay bounded: their sum by N / eps, as that of P, and in the diagonal mode each by 1 / eps.

    Sums wait in ``sums`` for the end of the step. They are of float32 at least, and no part of the state.

    Args:
        floor: :math:`\epsilon\,\mathrm{diag}(U U)`, of shape ``(G, N)``.
        origin: The point about which sums are taken, the mean of the statistics, of shape ``(G, N)``. None: variances
            are about zero.
        num_rows: Number of rows of a batch to use, at most.

    Attributes:
        mean: Running mean of :math:`U (h - \mathrm{origin})`, of shape ``(G, N)``.
        variance: v, of shape ``(G, N)``.
        sums: Number of rows seen since the last step, their sum and their sum of squares, of shape ``(1 + 2 G N,)``.

    Source: Natural Neural Networks (2015), section 3.
    """

    def __init__(self, floor: Tensor, origin: Tensor | None, num_rows: int) -> None:
        self.floor, self.origin, self.num_rows = floor, origin, num_rows
        self.mean = torch.zeros_like(floor)
        self.variance = torch.ones_like(floor)
        self.sums = floor.new_zeros(1 + 2 * floor.numel())

    @classmethod
    def of(cls, whitening: Whitening, statistics: InputStatistics, num_rows: int) -> Units | None:
        """Return units of fresh coefficients: v = 1.

        Args:
            whitening: The coefficients.
            statistics: The statistics that they come from.
            num_rows: Number of rows of a batch to use, at most.

        Returns:
            None where the coefficients only centre: there are no variances.
        """
        if whitening.mode == "center":
            return None
        floor = (whitening.damping * whitening.precondition_diagonal()).clamp_min(torch.finfo(torch.float64).eps)
        return cls(floor, statistics.mean() if statistics.centred else None, num_rows)

    def to(self, like: Tensor) -> Units:
        """Return it on the device of a tensor, in its type or in float32 where that has less than 32 bits."""
        state = {name: self._move(value, like) for name, value in self.state().items()}
        moved = Units.from_state(state)
        moved.sums = self._move(self.sums, like)
        return moved

    @staticmethod
    def _move(value: Any, like: Tensor) -> Any:
        return value.to(like.device, working_dtype(like)) if isinstance(value, Tensor) else value

    def state(self) -> dict[str, Any]:
        """Return what is needed to continue after a step: tensors and a number."""
        return {name: getattr(self, name) for name in _STATE}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Units:
        """Return what :meth:`state` was taken of."""
        units = cls(state["floor"], state["origin"], state["num_rows"])
        units.mean, units.variance = state["mean"], state["variance"]
        return units

    @torch.no_grad()
    def add(self, input: Tensor, spatial: int, coefficients: Applied) -> None:
        """Add rows of an input of the layer, unless they have values that are not finite.

        Args:
            input: The input, of shape ``(..., N)`` or ``(batch, G * N, *pixels)``.
            spatial: Number of axes of pixels.
            coefficients: Those of U.
        """
        with full_precision(input):
            rows = spread_rows(input.detach(), spatial, self.num_rows).to(self.floor.dtype)
            rows = rows.reshape(-1, *self.floor.shape).movedim(1, 0)  # (G, n, N)
            root = coefficients.scale, coefficients.basis, coefficients.shrink
            if self.origin is None:
                units = apply_rows(rows, *root)
            else:
                units = apply_rows_(rows - self.origin.unsqueeze(1), *root)
            count = self.sums.new_full((1,), units.shape[1])
            sums = torch.cat([count, units.sum(1).flatten(), units.square().sum(1).flatten()])
            self.sums.add_(torch.where(sums.isfinite().all(), sums, 0))

    def step(self, sums: Tensor, momentum: float) -> None:
        """Take the sums of a step, of all ranks together, into the averages, and begin new ones.

        Args:
            sums: Like ``self.sums``. Without rows, v stays what it is.
            momentum: Weight of the past.
        """
        count, total, squares = sums[0], *sums[1:].view(2, *self.floor.shape)
        seen = count > 0
        mean, square = (part / count.clamp_min(1) for part in (total, squares))
        new = momentum * self.variance + (1 - momentum) * (square + self.floor)
        if self.origin is not None:
            new = new - (1 - momentum) * mean.square() + momentum * (1 - momentum) * (mean - self.mean).square()
            self.mean = torch.where(seen, momentum * self.mean + (1 - momentum) * mean, self.mean)
        new = torch.maximum(new, self.floor)  # in spite of rounding
        self.variance = torch.where(seen, new, self.variance)
        self.sums.zero_()

    def __repr__(self) -> str:
        return f"Units(groups={self.floor.shape[0]}, size={self.floor.shape[1]})"


_STATE = ("floor", "origin", "num_rows", "mean", "variance")
_GOLDEN = (math.sqrt(5) - 1) / 2


def spread_rows(input: Tensor, spatial: int, count: int) -> Tensor:
    """Return at most so many rows of a layer's input, the same positions each time, spread over samples and pixels.

    All rows in a line are cut into ``count`` stretches of a length, one is taken of each: at places within them that
    follow the golden ratio, since stretches are often as long as a row of pixels.

    Args:
        input: Shape ``(..., N)``, or ``(batch, channels, *pixels)`` with or without the batch axis.
        spatial: Number of axes of pixels.
        count: Number of rows.

    Returns:
        Shape ``(n, channels)``.
    """
    rows = input.movedim(-spatial - 1, -1)
    total = math.prod(rows.shape[:-1])
    if total <= count:
        return rows.reshape(-1, rows.shape[-1])
    order = torch.arange(count, device=rows.device)
    within = (order * _GOLDEN).frac() * (total // count)
    places = order * total // count + within.long()
    if spatial == 0:
        return rows.reshape(total, -1).index_select(0, places)
    index = []
    for size in reversed(rows.shape[:-1]):
        index.append(places % size)
        places = places // size
    return rows[tuple(reversed(index))]
