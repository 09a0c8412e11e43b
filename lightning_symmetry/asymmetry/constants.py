"""Constants at the fixed entries of a weight: a new tensor that holds them, or writing them in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad


def with_constants(weight: Tensor, index: Tensor, fixed: Tensor) -> Tensor:
    """Return ``M * weight + (1 - M) * F`` as a new tensor, differentiable, and constant where it is fixed.

    Args:
        weight: Weight of any shape; its first axis is the rows.
        index: Positions of the fixed entries in the flattened rows, of shape ``(rows, n)``.
        fixed: Constants, of shape ``(rows, n)``.
    """
    return weight.flatten(1).scatter(1, index, fixed).view_as(weight)


def with_mask(weight: Tensor, mask: Tensor, fixed: Tensor) -> Tensor:
    """Return the same from the mask, of shape ``(rows, inputs)``, without positions: dense, but ready for ``vmap``."""
    inputs = mask.shape[1]
    trainable = mask.unsqueeze(-1).expand(-1, -1, weight[0].numel() // inputs).flatten(1)
    position = (trainable.logical_not().cumsum(1) - 1).clamp_min(0)
    return torch.where(trainable, weight.flatten(1), fixed.gather(1, position)).view_as(weight)


def write_constants(tensor: Tensor, flat: Tensor, index: Tensor, values: Tensor) -> None:
    """Write values at the fixed entries of a tensor in place, whatever its memory format.

    Args:
        tensor: Weight or gradient.
        flat: Numbers of the fixed entries in the flattened tensor, of shape ``(rows, n)``.
        index: Positions of the fixed entries in the flattened rows, of shape ``(rows, n)``.
        values: What to write, of shape ``(rows, n)``.
    """
    if torch.are_deterministic_algorithms_enabled() or tensor.is_meta:
        tensor.copy_(with_constants(tensor, index, values))
    else:
        tensor.put_(flat, values)  # fastest, but PyTorch does not know that no entry is named twice


class FixedLinear(torch.autograd.Function):
    """``y = x W^T + b`` where the gradient of W is zero at the fixed entries, which W already holds.

    Writing into the gradient that this backward has just computed, and keeping the constants inside the weight,
    spares the dense elementwise passes and the copies of W that a mask costs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, places: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Compute the map; ``places`` are the last three arguments of :func:`write_constants`, and as many zeros."""
        ctx.save_for_backward(x, weight)
        ctx.places = places
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; differentiable a second time."""
        x, weight = ctx.saved_tensors
        flat, index, fixed, zeros = ctx.places
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph: the constants must not receive second derivatives either
            weight = with_constants(weight, index, fixed)
        rows = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if needs_x:
            grad_x = rows @ weight
            grad_x = grad_x if x.ndim == 2 else grad_x.view_as(x)
        if needs_weight:
            grad_weight = rows.t() @ (x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
            write_constants(grad_weight, flat, index, zeros)
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None, None


def in_plain_eager_mode(x: Tensor, weight: Tensor) -> bool:
    """Whether ``x`` meets ``weight`` in plain eager reverse mode, where constants may be written into the weight.

    Elsewhere (``torch.func``, ``torch.compile``, autocast, forward mode) the differentiable form is used.
    """
    return (
        type(x) is Tensor
        and x.dtype == weight.dtype
        and not weight.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(x.device.type)
        and forward_ad._current_level < 0
    )
