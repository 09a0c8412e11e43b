"""The segment between two networks: what can be interpolated, and the points on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.surgery import CONSTANT_BUFFERS, HasConstants, check_constants, constants_of, plain_copy

State = Mapping[str, Tensor]


class Segment:
    """The straight line ``(1 - alpha) a + alpha b`` in the space of canonical parameters.

    Layers in other coordinates (whitened, factorised) enter by the weights that they stand for. Layers with fixed
    entries must have the same constants on both sides. Running statistics of normalisation layers are
    interpolated as parameters are; integer buffers are those of the nearer end.

    Args:
        a: Network at alpha = 0.
        b: Network at alpha = 1.

    Raises:
        ValueError: If the architectures or the constants differ.
    """

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        check_constants(constants_of(a), constants_of(b))
        self.point = plain_copy(a, keep_affine=True)
        other = plain_copy(b, keep_affine=True)
        ends = _tensors(other)
        self._a = {name: tensor.detach().clone() for name, tensor in _tensors(self.point).items()}
        _check_shapes(self._a, ends)
        self._b = {name: _end(tensor, ends[name]) for name, tensor in self._a.items()}
        self._here = _tensors(self.point)

    @torch.no_grad()
    def move_to(self, alpha: float) -> nn.Module:
        """Write the parameters at ``alpha`` into :attr:`point`, the one network of this segment, and return it."""
        for name, here in self._here.items():
            _between(self._a[name], self._b[name], alpha, out=here)
        return self.point


def interpolate(a: nn.Module | State, b: nn.Module | State, alpha: float) -> Any:
    """Return the network, or the state dict, at ``(1 - alpha) a + alpha b``.

    Args:
        a: A network or a state dict.
        b: The same, from the same architecture and with the same constants.
        alpha: Position; 0 is ``a`` and 1 is ``b``, both exactly. Values outside of [0, 1] extrapolate.

    Returns:
        A new network, or a new state dict. Layers in other coordinates (but those with fixed entries) are plain
        layers in it.

    Raises:
        ValueError: If the architectures, masks or constants differ; the message names both sides.
        TypeError: If one is a network and the other is not.
    """
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        return Segment(a, b).move_to(alpha)
    if isinstance(a, nn.Module) or isinstance(b, nn.Module):
        raise TypeError(f"Expected two networks or two state dicts but got {type(a).__name__} and {type(b).__name__}.")
    _check_shapes(a, b)
    constant = {name for name in a if name.rpartition(".")[2] in CONSTANT_BUFFERS}
    check_constants({n: a[n] for n in constant}, {n: b[n] for n in constant})
    return {name: _between(a[name], _end(a[name], b[name]), alpha) for name in a}


def parameter_distance(a: nn.Module, b: nn.Module, per_parameter: bool = True) -> float:
    r"""Return the distance of two networks in parameter space.

    .. math:: \|\theta_a - \theta_b\|_2 / P

    over the canonical parameters, where P counts the trainable entries. Fixed entries agree and do not count.

    Args:
        a: A network.
        b: A network of the same architecture with the same constants.
        per_parameter: Whether to divide by P.

    Raises:
        ValueError: If the architectures or the constants differ.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), App. A.
    """
    check_constants(constants_of(a), constants_of(b))
    left, right = plain_copy(a), plain_copy(b)
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    _check_shapes(ours, theirs)
    square = sum(
        (tensor.detach().cpu().double() - theirs[name].detach().cpu().double()).square().sum().item()
        for name, tensor in ours.items()
    )
    fixed = sum(module.num_fixed for module in a.modules() if isinstance(module, HasConstants))
    count = sum(tensor.numel() for tensor in ours.values()) - fixed
    return square**0.5 / (count if per_parameter else 1)


def _end(a: Tensor, b: Tensor) -> Tensor:
    """Return ``b`` in the place and type of ``a``; ``a`` itself where the two agree."""
    b = b.to(a.device, a.dtype)
    return a if torch.equal(a, b) else b


def _between(a: Tensor, b: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    # What agrees is copied: between two infinities (masks of attention) there is no line.
    if a is b or alpha in (0, 1) or not (a.is_floating_point() or a.is_complex()):
        nearer = a if alpha < 0.5 else b
        return nearer.clone() if out is None else out.copy_(nearer)
    return torch.lerp(a, b, alpha, out=out)


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, but constants, which agree on both sides."""
    constant = {
        id(buffer) for module in net.modules() if isinstance(module, HasConstants) for buffer in module.buffers(False)
    }
    tensors = {name: parameter.data for name, parameter in net.named_parameters()}
    tensors.update((name, buffer) for name, buffer in net.named_buffers() if id(buffer) not in constant)
    return tensors


def _check_shapes(a: State, b: State) -> None:
    for here, there, side, other in ((a, b, "a", "b"), (b, a, "b", "a")):
        if missing := [name for name in here if name not in there]:
            raise ValueError(
                f"The networks differ in architecture: {side} has {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, {other} does not."
            )
    for name, tensor in a.items():
        if tensor.shape != b[name].shape:
            raise ValueError(
                f"The networks differ in architecture: {name} has shape {tuple(tensor.shape)} in a and "
                f"{tuple(b[name].shape)} in b."
            )
