"""The bases of the whitened layers: what all have in common, and those with canonical parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.surgery import ReparametrizedLayer
from lightning_symmetry.whitening.applied import Applied, applied, apply_rows
from lightning_symmetry.whitening.coefficients import Mode, Whitening
from lightning_symmetry.whitening.gradients import WhitenedGradient, WhitenedWeight
from lightning_symmetry.whitening.statistics import InputStatistics
from lightning_symmetry.whitening.units import Units

State = Mapping[str, Any]


class HasWhitening(nn.Module):
    """A layer with whitening coefficients of its input.

    The coefficients are no buffers: they change their shape with the number of samples, DDP would send them in each
    step, and a moving average of a network would average them. They move with ``to``, deep-copy and pickle with the
    layer, and are not in its ``state_dict``.

    Attributes:
        weight: Parameter of shape ``(M, N, *kernel)``.
        bias: Parameter of shape ``(M,)``, or None.
        groups: Number of groups of input channels that are whitened each by itself.
        mode: Which directions its statistics tell apart.
        units: Running variances of its whitened units, where these are rescaled (PRONG+); else None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    groups: int = 1
    mode: Mode = "full"
    units: Units | None = None
    _power: int
    _applied: Applied

    def statistics(self) -> InputStatistics:
        """Return an empty accumulator for the layer's input.

        Without a bias that is trained c stays 0, since the shift ``W c`` has nowhere to go.
        """
        size, spatial = self.weight.shape[1], self.weight.ndim - 2
        offset = self.bias is not None and self.bias.requires_grad
        return InputStatistics(size, self.groups, spatial, self.mode, centred=offset, offset=offset)

    def set_whitening(self, whitening: Whitening, units: Units | None = None) -> None:
        """Take new coefficients, with a leading axis of groups. The function stays what it is.

        Args:
            whitening: The coefficients.
            units: What rescales the whitened units from now on; None: nothing.

        Raises:
            ValueError: If they are for another number of inputs, have a centre where there is no bias, or units of
                explicit parameters are to be rescaled.
            WhiteningError: If they overflow in the layer's type. The layer keeps its old ones then.
        """
        expected = self.groups, self.weight.shape[1]
        if tuple(whitening.center.shape) != expected:
            raise ValueError(
                f"Expected coefficients for {expected[0]} group(s) of {expected[1]} inputs but got a center of shape "
                f"{tuple(whitening.center.shape)}."
            )
        if self.bias is None and bool(whitening.center.any()):
            raise ValueError("A layer without bias cannot centre its inputs: its coefficients must have center 0.")
        if units is None:
            self._take(applied(whitening, self.weight, self._power))
        elif self._power == 1:
            raise ValueError("Units of a layer with explicit parameters cannot be rescaled: use the canonical form.")
        else:
            units = units.to(self.weight)
            self._take(applied(whitening, self.weight, 1)._replace(diagonal=1 / units.variance))
        self.units = units

    def rescale_units(self, sums: Tensor, momentum: float) -> None:
        """End a step: take sums into the running variances, and P = U D^2 U with the new ones.

        Args:
            sums: See :class:`~lightning_symmetry.whitening.units.Units`.
            momentum: Weight of the past.
        """
        self.units.step(sums, momentum)
        self._applied = self._applied._replace(diagonal=1 / self.units.variance)

    def _watch(self, input: Tensor) -> None:
        """Look at an input of a training step, where units are rescaled."""
        if self.units is None or not (self.training and torch.is_grad_enabled() and self.weight.requires_grad):
            return
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            self.units.add(input, self.weight.ndim - 2, self._applied)

    def _take(self, new: Applied) -> None:
        self._applied = new

    def whitening_matrix(self) -> tuple[Tensor, Tensor]:
        """Return U, of shape ``(groups, N, N)``, and c, ``(groups, N)``, in float64, as they are applied.

        Where units are rescaled it is D U.
        """
        eye = torch.eye(self.weight.shape[1], dtype=torch.float64, device=self.weight.device)
        center, *root, diagonal = (None if t is None else t.double() for t in self._applied)
        matrix = apply_rows(eye.expand(self.groups, -1, -1), *root)
        if diagonal is not None:
            matrix = diagonal.sqrt().unsqueeze(-1) * matrix
        elif self._power == 2:
            values, vectors = torch.linalg.eigh(matrix.cpu())
            matrix = ((vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT).to(matrix.device)
        return matrix, eye.new_zeros(self.groups, len(eye)) if center is None else center

    def precondition_rows(self, rows: Tensor) -> Tensor:
        """Return ``rows P``, for rows of shape ``(groups, n, N)``, in float64."""
        _, *matrix = (None if t is None else t.to(rows.device, torch.float64) for t in self._applied)
        for _ in range(2 // self._power):
            rows = apply_rows(rows.double(), *matrix)
        return rows

    def whitening_state(self) -> dict[str, Any]:
        """Return what is needed to continue exactly and is not in the ``state_dict``."""
        units = {} if self.units is None else {"units": self.units.state()}
        return {**self._applied._asdict(), **units}

    def load_whitening_state(self, state: State) -> None:
        """Take back what :meth:`whitening_state` returned."""
        self._applied = Applied(*(state.get(name) for name in Applied._fields)).to(self.weight)
        self.units = Units.from_state(state["units"]).to(self.weight) if "units" in state else None

    @property
    def form(self) -> str:
        """How coefficients are applied: ``"identity"``, ``"centred"``, ``"scaled"``, ``"dense"``, ``"rank 9"``, ..."""
        return self._applied.describe()

    @abstractmethod
    def release(self) -> nn.Module:
        """Return the layer that this one replaced, with the same Parameter objects."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._applied = self._applied.to(self.weight)
        self.units = None if self.units is None else self.units.to(self.weight)
        return self


class NewLayer(HasWhitening, ReparametrizedLayer):
    """A whitened layer that stands in the place of a plain one; subclasses say which map it is."""

    @classmethod
    def from_layer(cls, layer: nn.Module, whitening: Whitening | None = None, mode: Mode = "full") -> Self:
        """Build the layer from the plain one, whose parameters it takes over.

        Args:
            layer: The plain layer.
            whitening: Coefficients of its input; None: U is the identity and c = 0 for now.
            mode: Which directions its statistics tell apart.

        Raises:
            ValueError: If the coefficients do not fit.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._take_settings(layer)
        self.mode = mode
        self.weight, self.bias = layer.weight, layer.bias
        self._applied = Applied()
        if whitening is not None:
            self.set_whitening(whitening)
        return self.train(layer.training)

    @abstractmethod
    def _take_settings(self, layer: nn.Module) -> None:
        """Take over what else a plain layer knows: sizes, stride, padding."""

    @abstractmethod
    def _empty(self, **factory: Any) -> nn.Module:
        """Return a plain layer of the same settings with parameters that are not initialised."""

    def canonical_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias that the plain layer would have."""
        return self.weight, self.bias

    def canonical_weight(self) -> Tensor:
        """Return the weight that the plain layer would have, differentiable in the parameters."""
        return self.canonical_parameters()[0]

    @torch.no_grad()
    def to_layer(self) -> nn.Module:
        """Return the plain layer with the same function, dtype, device, mode and ``requires_grad``."""
        layer = self._empty(device=self.weight.device, dtype=self.weight.dtype)
        weight, bias = self._canonical_values()
        layer.weight.copy_(weight)
        layer.weight.requires_grad_(self.weight.requires_grad)
        if bias is not None:
            layer.bias.copy_(bias)
            layer.bias.requires_grad_(self.bias.requires_grad)
        return layer.train(self.training)

    @torch.no_grad()
    def release(self) -> nn.Module:
        """Return the plain layer, with the same Parameter objects, whose values become the canonical ones."""
        layer = self._empty(device="meta", dtype=self.weight.dtype)
        for parameter, value in zip((self.weight, self.bias), self._canonical_values(), strict=True):
            if value is not None and value is not parameter:
                parameter.copy_(value)
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)

    def _canonical_values(self) -> tuple[Tensor, Tensor | None]:
        """Return W and b as the ``state_dict`` has them."""
        return self.canonical_parameters()

    def _describe(self) -> str:
        return f"bias={self.bias is not None}, mode={self.mode!r}, form={self.form!r}"


class WhitenedLayer(NewLayer):
    r"""A layer whose gradients are those of SGD in whitened coordinates.

    The whitened layer computes :math:`V U (h - c) + d` (eq. 7). SGD on (V, d) is SGD on the canonical
    :math:`W = V U` and :math:`b = d - W c` with the gradients

    .. math:: \tilde G_W = (G_W - g_b c^\top) P, \qquad \tilde g_b = g_b - \tilde G_W c, \qquad P = U^2,

    so that is what these layers do: ``weight`` and ``bias`` are the canonical parameters, the function does not depend
    on U and c at all, and neither does the ``state_dict``. Momentum accumulated on these gradients is the exact
    transport of the momentum on V through a change of U and c. Weight decay acts on the canonical weight and bias:
    where both have the same, that is the decay of V and d, since one map of theirs gives both.
    An optimizer that acts elementwise needs the explicit form,
    :class:`~lightning_symmetry.whitening.explicit.ExplicitWhitenedLayer`.

    A layer without bias has no d: c = 0, see :class:`~lightning_symmetry.whitening.statistics.InputStatistics`. Where
    the bias is frozen, :math:`\tilde G_W = G_W P`; where the weight is, :math:`\tilde g_b = g_b`.

    Costs in operations a step, with M outputs, N inputs, K taps of the kernel, B rows, and the dense P at
    :math:`2 N^2` a row or its low-rank form of rank r at :math:`4 N r`, whichever is less:

    ========== ============================= =============================
    side       dense                         low rank
    ========== ============================= =============================
    activation :math:`2 B N^2`               :math:`4 B N r`
    gradient   :math:`2 M K N^2`             :math:`4 M K N r`
    ========== ============================= =============================

    A linear layer takes the activation side where B < M, convolutions take the gradient side. With
    :math:`P' = U D^2 U` (:func:`~lightning_symmetry.whitening.reparametrize.rescale_units`) it is twice that, and the
    activation side's once more for the rows that are watched. Second derivatives are
    refused: those of the canonical parameters are not those of the whitened ones.

    In float32 P resolves multipliers down to about 1e-6 / eps: with variances beyond 1e5 eps the steps along the
    strongest directions are those of rounding.

    Source: Natural Neural Networks (2015), section 3, Algorithm 1.
    """

    affine = True
    _power = 2

    def whitened_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as they are; their gradients are preconditioned."""
        return precondition(self.weight, self.bias, self.groups, self._applied)


def precondition(
    weight: Tensor, bias: Tensor | None, groups: int, coefficients: Applied
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias as they are, with gradients preconditioned by the coefficients of P."""
    if coefficients.is_identity or not _is_trained(weight):
        return weight, bias
    center, *matrix = coefficients
    if bias is not None and center is not None and _is_trained(bias):
        return WhitenedGradient.apply(weight, bias, groups, center, *matrix)
    return WhitenedWeight.apply(weight, groups, *matrix), bias


def _is_trained(parameter: Tensor) -> bool:
    """Whether a gradient is wanted; ``torch.func`` does not say so of what it wraps."""
    return parameter.requires_grad or torch._C._are_functorch_transforms_active()
