"""A linear map whose constants live inside the weight: the fast path of an asymmetric linear layer."""

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


class FixedLinear(torch.autograd.Function):
    """``y = x W^T + b`` where the gradient of W is zero at the fixed entries, which W already holds.

    Writing into the gradient that this backward has just computed, and keeping the constants inside the
    weight, spares the two dense elementwise passes and the copy of W that a mask costs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, fixed: Tensor) -> Tensor:
        """Compute the map; ``index`` holds the columns of the fixed entries of each row."""
        ctx.save_for_backward(x, weight)
        ctx.constants = index, fixed
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; differentiable a second time."""
        x, weight = ctx.saved_tensors
        index, fixed = ctx.constants
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, grad.shape[-1])
        if torch.is_grad_enabled():  # create_graph: the constants must not receive second derivatives either
            weight = with_constants(weight, index, fixed)
        grad_x = (rows @ weight).view_as(x) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
            grad_weight.scatter_(1, index, torch.zeros_like(fixed))
        grad_bias = rows.sum(0) if needs_bias and ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None


def fast_path_applies(weight: Tensor, x: Tensor) -> bool:
    """Whether this is plain eager reverse mode in one type; elsewhere the ordinary differentiable form is used."""
    return (
        type(weight) is torch.nn.Parameter
        and type(x) is Tensor
        and x.dtype == weight.dtype
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
    )
