"""Symmetries that are no permutations: scalings, sign flips and general linear maps of a network's units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["positive scaling", "sign flip", "scaling", "scale invariance", "general linear"]


@dataclass(frozen=True)
class Action:
    """What a rescaling does to one axis of one tensor.

    Attributes:
        tensor: Name in the state dict.
        axis: The axis.
        index: Positions of each unit, of shape ``(units, k)``.
        exponent: The power of the unit's factor with which its positions are multiplied.
    """

    tensor: str
    axis: int
    index: Tensor
    exponent: int


@dataclass(frozen=True)
class Rescaling:
    r"""A symmetry of a network that multiplies parameters by factors, or by a matrix.

    Attributes:
        kind: ``"positive scaling"`` (any positive factor for each unit), ``"sign flip"`` (1 or -1), ``"scaling"`` (any
            factor but 0), ``"scale invariance"`` (of a weight that is normalised next: any positive factors, up to the
            norm's eps) or ``"general linear"`` (an invertible matrix instead of factors).
        where: Name of the group of units, or of the weight.
        units: Which units of the group have a factor; for ``"scale invariance"`` one number for each factor.
        actions: What is multiplied.
        detail: What has a factor of its own, and why, in words.
    """

    kind: Kind
    where: str
    units: Tensor
    actions: tuple[Action, ...]
    detail: str

    def apply(self, state_dict: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
        r"""Return a new state dict of the same function.

        Incoming weights and biases are multiplied by the factors (from the left by the matrix A), outgoing weights by
        their inverses (from the right by :math:`A^{-1}`).

        Args:
            state_dict: State dict of the plain network, or of the asymmetric one.
            factors: One for each of :attr:`units`; for ``"general linear"`` the matrix.

        Raises:
            ValueError: If the factors have another shape or are not of this kind.
        """
        self._check(factors)
        found = dict(state_dict)
        inverse = torch.linalg.inv(factors.double()) if factors.ndim == 2 else 1 / factors.double()
        for action in self.actions:
            moved = found[action.tensor].detach().movedim(action.axis, 0).clone()
            index = action.index.to(moved.device)
            used = (factors if action.exponent > 0 else inverse).to(moved.device, moved.dtype)
            if used.ndim == 2:
                used = used if action.exponent > 0 else used.t()
                moved[index[:, 0]] = torch.tensordot(used, moved[index[:, 0]], 1)
            else:
                moved[index] *= used.view(-1, 1, *[1] * (moved.ndim - 1))
            found[action.tensor] = moved.movedim(0, action.axis)
        return found

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Return random factors (from 1/2 to 2, signs that are not all 1) or a random matrix, in float64."""
        n = len(self.units)
        if self.kind == "general linear":
            return torch.eye(n, dtype=torch.float64) + torch.rand(n, n, generator=generator, dtype=torch.float64) / n
        sign = 1 - 2 * torch.randint(2, (n,), generator=generator).double()
        sign[0] = -1 if bool((sign > 0).all()) else sign[0]
        if self.kind == "sign flip":
            return sign
        size = torch.exp2(2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1)
        return size * sign if self.kind == "scaling" else size

    def _check(self, factors: Tensor) -> None:
        n = len(self.units)
        if self.kind == "general linear":
            if factors.shape != (n, n):
                raise ValueError(f"Expected a matrix of shape {(n, n)} but got {tuple(factors.shape)}.")
            return
        if factors.shape != (n,):
            raise ValueError(f"Expected {n} factors for {self.where!r} but got the shape {tuple(factors.shape)}.")
        wrong = factors == 0 if self.kind == "scaling" else factors <= 0
        if self.kind == "sign flip":
            wrong = factors.abs() != 1
        if wrong.any():
            raise ValueError(f"{float(factors[wrong][0])} is no factor of a {self.kind}.")

    def __str__(self) -> str:
        return f"{self.kind}, {self.detail}"
