"""Whitened layers with explicit parameters (V, d), for optimizers that act on each entry by itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_symmetry.surgery.convolution import convolve
from lightning_symmetry.whitening.applied import Applied, apply_rows, full_precision, shift_of, solve_rows, tap_by_tap
from lightning_symmetry.whitening.coefficients import WhiteningError
from lightning_symmetry.whitening.conv import ConvMap
from lightning_symmetry.whitening.layer import NewLayer, State
from lightning_symmetry.whitening.linear import LinearMap


class ExplicitWhitenedLayer(NewLayer):
    r"""A layer in whitened coordinates: its parameters are V (``weight``) and d (``bias``).

    .. math:: y = V U (h - c) + d = W h + b, \qquad W = V U, \quad b = d - \sum_k W_k c

    over the taps k of the kernel. A change of U and c keeps the function: :math:`V = W U^{-1}`, :math:`d = b + W c`
    (Algorithm 1, line 10), computed in float64 for the coefficients as they are after rounding, so that a change costs
    one rounding of V and d, whose entries are of one size for each direction, and no more.

    Decoupled weight decay of V and d alike is that of W and b, since these are linear in them; one of the gradient,
    as in Adam, is not. A frozen bias is d, not b, unless it is frozen before c is set.

    The ``state_dict`` holds the canonical weight and bias under the plain names: a checkpoint loads into the plain
    network and back, to rounding. :meth:`whitening_state` has V and d themselves.

    Costs in operations a step, forward and backward, with M outputs, N inputs, K taps, B rows: transforming the input
    takes :math:`4 B N` times :math:`\min(2 r, N)`, folding :math:`W = V U` takes :math:`4 M K N` times the same. Linear
    layers transform the input where B < M; convolutions fold, which is exact at padded borders. Under autocast and in
    half precision W is folded in float32 and then rounded.

    Source: Natural Neural Networks (2015), eq. 7 and Algorithm 1.
    """

    affine = False  # in (V, d) alone: segments between networks with other coefficients are others
    _power = 1

    def canonical_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return W and b, differentiable in V and d."""
        if self._applied.is_identity:
            return self.weight, self.bias
        center, *matrix = self._applied
        with full_precision(self.weight):
            dtype = next(t.dtype for t in self._applied if t is not None)
            weight = tap_by_tap(self.weight.to(dtype), self.groups, apply_rows, *matrix)
            bias = self.bias if center is None else self.bias.to(dtype) - shift_of(weight, center)
        return weight.to(self.weight.dtype), None if bias is None else bias.to(self.bias.dtype)

    @torch.no_grad()
    def to_canonical(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (W, b) for (V, d), in float64; linear, so that it also takes directions such as momentum."""
        center, *matrix = _double(self._applied)
        weight = tap_by_tap(weight.double(), self.groups, apply_rows, *matrix)
        bias = None if bias is None else bias.double()
        return weight, bias if bias is None or center is None else bias - shift_of(weight, center)

    def _canonical_values(self) -> tuple[Tensor, Tensor | None]:
        return self.to_canonical(self.weight, self.bias)

    @torch.no_grad()
    def to_whitened(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (V, d) for (W, b), in float64; the inverse of :meth:`to_canonical`."""
        return _whitened(self._applied, self.groups, weight, bias)

    @torch.no_grad()
    def _take(self, new: Applied) -> None:
        weight, bias = _whitened(new, self.groups, *self.to_canonical(self.weight, self.bias))
        if not bool(torch.isfinite(weight).all()) or (bias is not None and not bool(torch.isfinite(bias).all())):
            raise WhiteningError("The weights in whitened coordinates are not finite.")
        self._applied = new
        self.weight.copy_(weight)
        if bias is not None:
            self.bias.copy_(bias)

    def whitening_state(self) -> dict[str, Any]:
        """Return the coefficients, V and d."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return {**super().whitening_state(), "weight": self.weight.detach().clone(), "bias": bias}

    @torch.no_grad()
    def load_whitening_state(self, state: State) -> None:
        """Take back coefficients, V and d."""
        super().load_whitening_state(state)
        self.weight.copy_(state["weight"])
        if self.bias is not None:
            self.bias.copy_(state["bias"])

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._applied.is_identity:
            return
        weight, bias = self.canonical_parameters() if keep_vars else self.to_canonical(self.weight, self.bias)
        destination[prefix + "weight"] = weight.to(self.weight.dtype)
        if bias is not None:
            destination[prefix + "bias"] = bias.to(self.bias.dtype)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any, **kwargs: Any) -> None:
        weight, bias = (state_dict.get(prefix + name) for name in ("weight", "bias"))
        fits = weight is not None and weight.shape == self.weight.shape and (bias is None) == (self.bias is None)
        if fits and not self._applied.is_identity:  # else the loader records what is missing or does not fit
            to = {"device": self.weight.device, "dtype": torch.float64}
            weight, bias = self.to_whitened(weight.to(**to), None if bias is None else bias.to(**to))
            state_dict = {**state_dict, prefix + "weight": weight.to(self.weight.dtype)}
            if bias is not None:
                state_dict[prefix + "bias"] = bias.to(self.bias.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""


class ExplicitWhitenedLinear(LinearMap, ExplicitWhitenedLayer):
    """Linear layer in whitened coordinates; see :class:`ExplicitWhitenedLayer`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        if self._few_rows(input) and not self._applied.is_identity:
            center, *matrix = (None if t is None else t[0] for t in self._applied)
            rows = input.reshape(-1, self.in_features)
            rows = apply_rows(rows if center is None else rows - center, *matrix)
            return F.linear(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)
        return F.linear(input, *self.canonical_parameters())


class _ExplicitWhitenedConv(ConvMap, ExplicitWhitenedLayer):
    """A convolution in whitened coordinates."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(batch, channels, *pixels)``, with or without the batch axis."""
        return convolve(self, input, *self.canonical_parameters())


class ExplicitWhitenedConv1d(_ExplicitWhitenedConv):
    """One-dimensional convolution in whitened coordinates; see :class:`ExplicitWhitenedLayer`."""

    _plain = nn.Conv1d


class ExplicitWhitenedConv2d(_ExplicitWhitenedConv):
    """Convolution in whitened coordinates; see :class:`ExplicitWhitenedLayer`."""

    _plain = nn.Conv2d


def _double(coefficients: Applied) -> Applied:
    return Applied(*(None if t is None else t.double() for t in coefficients))


def _whitened(coefficients: Applied, groups: int, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (V, d) for (W, b) and coefficients of U."""
    center, *matrix, _ = _double(coefficients)  # units of explicit parameters are not rescaled
    weight, bias = weight.double(), None if bias is None else bias.double()
    shifted = bias if bias is None or center is None else bias + shift_of(weight, center)
    return tap_by_tap(weight, groups, solve_rows, *matrix), shifted
