"""The contract of a layer in other coordinates, through which the rooms meet."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class ReparametrizedLayer(nn.Module, ABC):
    """A layer whose parameters describe a canonical weight and bias.

    Subclasses are plain modules: explicit parameters and buffers, no parametrizations and no hooks, so that
    they pickle, deep-copy and run under ``torch.func``, ``torch.compile``, autocast and DDP. They are built
    from the layer that they replace (``from_layer``) and give it back (:meth:`to_layer`).

    Attributes:
        affine: Whether the canonical weight is an affine function of the parameters, given the layer's
            constants: a segment between two sets of parameters is then a segment of canonical weights.
    """

    affine: bool = False

    @abstractmethod
    def to_layer(self) -> nn.Module:
        """Return the plain layer with the same function, dtype, device, mode and ``requires_grad``."""

    @abstractmethod
    def canonical_weight(self) -> Tensor:
        """Return the weight that the plain layer would have, differentiable in the parameters."""


CONSTANT_BUFFERS = ("mask", "fixed")
"""Names of the buffers that hold constants, by which they are known in a ``state_dict``."""


class HasConstants(ABC):
    """A module with random constants in buffers called ``mask`` or ``fixed``.

    Two networks can only be compared where these agree.
    """

    @abstractmethod
    def constants(self) -> dict[str, Tensor]:
        """Return the constants by name."""

    @property
    @abstractmethod
    def num_fixed(self) -> int:
        """Number of entries of the parameters that are constants."""
