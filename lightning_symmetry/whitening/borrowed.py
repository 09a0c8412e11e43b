"""Layers with a map of their own that are whitened through the gradients of their canonical weight."""

from __future__ import annotations

import copy
import types
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.surgery import HasConstants, ReparametrizedLayer, is_graph_linear, is_plain_but_for_constants
from lightning_symmetry.surgery.convolution import convolve
from lightning_symmetry.whitening.applied import Applied
from lightning_symmetry.whitening.coefficients import Mode, Whitening
from lightning_symmetry.whitening.layer import HasWhitening, precondition


class BorrowedLayer(HasWhitening):
    r"""A layer of another kind with gradients in whitened coordinates: one with fixed entries, or a graph network's.

    Its class is one more subclass of the layer's own, so that it keeps its parameters, its constants, their names and
    its ``state_dict``, and whoever asks for the layer's kind finds it. With the mask M of the trainable entries

    .. math:: \tilde G_W = M \odot ((M \odot G_W - g_b c^\top) P), \qquad
        \tilde g_b = g_b - ((M \odot G_W - g_b c^\top) P)\, c :

    the metric of the whitened coordinates restricted to what is trained, symmetric and positive, so that a step
    descends. Fixed entries receive no gradient and stay what they are to the bit. The gradient side is always taken.

    Source: Natural Neural Networks (2015), section 3.
    """

    _power = 2

    @classmethod
    def of(cls, layer: nn.Module, whitening: Whitening | None = None, mode: Mode = "full") -> Self:
        """Build the layer from one that :func:`can_borrow`, whose parameters and buffers it shares.

        Args:
            layer: The layer.
            whitening: Coefficients of its input; None: U is the identity and c = 0 for now.
            mode: Which directions its statistics tell apart.
        """
        kind = borrowed_kind(type(layer))
        self = kind.__new__(kind)
        self.__dict__.update(_state_of(layer))
        self.mode, self._applied = mode, Applied()
        if whitening is not None:
            self.set_whitening(whitening)
        return self

    def release(self) -> nn.Module:
        """Return the layer that this one replaced, with the same Parameter objects."""
        kind = type(self)._kind
        layer = kind.__new__(kind)
        layer.__dict__.update({k: v for k, v in _state_of(self).items() if k not in ("mode", "units", "_applied")})
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer's linear map or convolution."""
        self._watch(input)
        weight, bias = self._whitened_parameters()
        return F.linear(input, weight, bias) if weight.ndim == 2 else convolve(self, input, weight, bias)

    def _whitened_parameters(self) -> tuple[Tensor, Tensor | None]:
        if not isinstance(self, HasConstants):
            return precondition(self.weight, self.bias, self.groups, self._applied)
        canonical = self.canonical_weight()  # whose backward pass masks after
        weight, bias = precondition(canonical, self.bias, self.groups, self._applied)
        if weight is not canonical:
            weight = torch.where(self.trainable_entries(), weight, weight.detach())  # and this one before
        return weight, bias

    def extra_repr(self) -> str:
        """Describe the layer and its coefficients."""
        return f"{super().extra_repr()}, mode={self.mode!r}, form={self.form!r}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self)._kind,), self.__dict__.copy()


class BorrowedPlainLayer(BorrowedLayer, ReparametrizedLayer):
    """A whitened layer of a plain kind that this room does not know, with canonical parameters."""

    affine = True

    def canonical_weight(self) -> Tensor:
        """Return the weight."""
        return self.weight

    def to_layer(self) -> nn.Module:
        """Return the plain layer."""
        return copy.deepcopy(self.release())


def can_borrow(layer: nn.Module) -> bool:
    """Whether a layer is whitened by :class:`BorrowedLayer`: layers with constants, and torch-geometric's linear."""
    if isinstance(layer, ReparametrizedLayer) and not isinstance(layer, HasWhitening):
        return is_plain_but_for_constants(layer)
    return is_graph_linear(type(layer))


@cache
def borrowed_kind(kind: type[nn.Module]) -> type[BorrowedLayer]:
    """Return the whitened subclass of a kind of layer."""
    base = BorrowedLayer if issubclass(kind, ReparametrizedLayer) else BorrowedPlainLayer
    members = {"_kind": kind, "__doc__": BorrowedLayer.__doc__, "__module__": __name__}
    return types.new_class(f"Whitened{kind.__name__}", (base, kind), {}, lambda namespace: namespace.update(members))


def _empty(kind: type[nn.Module]) -> BorrowedLayer:
    """Return a whitened layer without state, for ``pickle`` and ``deepcopy``."""
    whitened = borrowed_kind(kind)
    return whitened.__new__(whitened)


def _state_of(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's attributes, with tables of its own for what it holds."""
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in layer.__dict__.items()}
