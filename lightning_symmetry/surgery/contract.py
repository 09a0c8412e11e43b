"""The contract of a layer in other coordinates, through which the rooms meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
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
    """A module with random constants in buffers called ``mask`` or ``fixed``; or a kind of which some have none.

    Two networks can only be compared where these agree.
    """

    @abstractmethod
    def constants(self) -> dict[str, Tensor]:
        """Return the constants by name."""

    @property
    @abstractmethod
    def num_fixed(self) -> int:
        """Number of entries of the weight, or of its mean, that are constants."""

    @property
    def num_fixed_parameters(self) -> int:
        """Number of entries of all its parameters that are constants; there are more where a weight has a posterior."""
        return self.num_fixed


def constants_of(net: nn.Module) -> dict[str, Tensor]:
    """Return the constants of all layers by their full names."""
    constants = {}
    for name, module in net.named_modules():
        if isinstance(module, HasConstants):
            constants.update({f"{name}.{key}".lstrip("."): value for key, value in module.constants().items()})
    return constants


def check_constants(a: Mapping[str, Tensor], b: Mapping[str, Tensor], left: str = "a", right: str = "b") -> None:
    """Check that two networks have the same constants.

    Args:
        a: Constants of one network by name.
        b: Constants of the other.
        left: What to call the first in errors.
        right: What to call the second.

    Raises:
        ValueError: If they differ; the message names both sides.
    """
    for here, there, side, other in ((a, b, left, right), (b, a, right, left)):
        if missing := [name for name in here if name not in there]:
            raise ValueError(
                f"The networks differ in their constants: {side} has {missing[0]} ({len(missing)} in all), "
                f"{other} does not. Only one of them is asymmetric there."
            )
    for name, value in a.items():
        if value.shape != b[name].shape or not torch.equal(value, b[name].to(value.device)):
            kind = "masks" if name.endswith("mask") else "constants"
            raise ValueError(
                f"The networks have different {kind}: {name} of {left} and {name} of {right} differ. They must be "
                "made asymmetric with the same seed, n_fix and kappa to be interpolated."
            )
