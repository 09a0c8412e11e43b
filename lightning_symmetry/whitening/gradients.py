"""Gradients in whitened coordinates: what SGD on (V, d) means for the canonical weight and bias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_symmetry.whitening.applied import apply_rows, apply_rows_, full_precision, shift_of, tap_by_tap


class WhitenedWeight(torch.autograd.Function):
    r"""The identity of a weight whose inputs are not centred: :math:`\tilde G_W = G_W P` in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, groups: int, *coefficients: Tensor | None) -> Tensor:
        """Return the weight as it is; ``coefficients`` are those of P: scale, basis, shrink and diagonal."""
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the coefficients."""
        ctx.groups = inputs[1]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
        """Precondition the gradient."""
        with full_precision(grad_weight):
            grad = whitened_gradients(grad_weight, None, ctx.groups, None, *ctx.saved_tensors)[0]
        return grad, None, None, None, None, None


class WhitenedGradient(torch.autograd.Function):
    r"""The identity of weight and bias, whose backward pass preconditions their gradients.

    .. math:: \tilde G_W = (G_W - g_b c^\top) P, \qquad \tilde g_b = g_b - \tilde G_W c

    The gradient side: it costs ``2 M N`` times ``min(2 r, N)`` operations for a weight (M, N), whatever the batch, and
    serves any operation that comes after. Kernels of convolutions are preconditioned tap by tap.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bias: Tensor, groups: int, *coefficients: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weight and bias as they are; ``coefficients`` are the centre, and those of P as above."""
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the coefficients."""
        ctx.groups = inputs[2]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> tuple[Tensor | None, ...]:
        """Precondition both gradients."""
        with full_precision(grad_weight):
            grads = whitened_gradients(grad_weight, grad_bias, ctx.groups, *ctx.saved_tensors)
        return *grads, None, None, None, None, None, None


def whitened_gradients(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    groups: int,
    center: Tensor | None,
    scale: Tensor | None,
    basis: Tensor | None,
    shrink: Tensor | None,
    diagonal: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Return :math:`\tilde G_W` and :math:`\tilde g_b` for the gradients of a linear layer or a convolution.

    Args:
        grad_weight: Gradient of the weight, of shape ``(M, N)`` or ``(M, N, *kernel)``.
        grad_bias: Gradient of the bias, of shape ``(M,)``; None where there is none, or it stays as it is.
        groups: G, the number of groups of M / G rows.
        center: c, of shape ``(G, N)``, or None for 0.
        scale: Part of P, see :func:`~lightning_symmetry.whitening.applied.apply_rows`.
        basis: Likewise.
        shrink: Likewise.
        diagonal: Likewise.
    """
    matrix = scale, basis, shrink, diagonal
    like = next((t for t in (center, *matrix) if t is not None), grad_weight)
    weight = grad_weight.to(like.dtype)  # half-precision gradients are preconditioned in float32
    if grad_bias is None or center is None:
        return tap_by_tap(weight, groups, apply_rows, *matrix).to(grad_weight.dtype), grad_bias
    bias = grad_bias.to(like.dtype)
    if weight.ndim == 2 and groups == 1:
        centred = torch.addr(weight, bias, center[0], alpha=-1).unsqueeze(0)
        weight = apply_rows_(centred, *matrix).squeeze(0)
    else:
        outer = bias.view(groups, -1, 1) * center.unsqueeze(1)
        centred = weight - outer.view(weight.shape[:2] + (1,) * (weight.ndim - 2))
        weight = tap_by_tap(centred, groups, apply_rows, *matrix)
    return weight.to(grad_weight.dtype), (bias - shift_of(weight, center)).to(grad_bias.dtype)


class WhitenedProduct(torch.autograd.Function):
    r"""``y = x W^T + b``, whose backward pass preconditions the gradients of W and b.

    .. math:: \tilde G_W = \delta^\top [(x - c) P], \qquad \tilde g_b = \sum \delta - \tilde G_W c

    The activation side: it costs ``2 B N`` times ``min(2 r, N)`` operations for B rows, less than the gradient side
    where there are fewer rows than outputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        center: Tensor | None,
        scale: Tensor | None,
        basis: Tensor | None,
        shrink: Tensor | None,
        diagonal: Tensor | None = None,
    ) -> Tensor:
        """Compute the map."""
        ctx.save_for_backward(x, weight, center, scale, basis, shrink, diagonal)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, and the preconditioned ones of weight and bias."""
        x, weight, center, *matrix = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        delta = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        with full_precision(grad):
            if needs_x:
                grad_x = (delta @ weight).view_as(x)
            if needs_weight:
                rows = x.reshape(-1, x.shape[-1])
                coefficients = (None if t is None else t[0] for t in matrix)
                if center is None:
                    rows = apply_rows(rows, *coefficients)
                else:
                    rows = apply_rows_(rows - center[0], *coefficients)
                grad_weight = delta.mT @ rows
            if needs_bias and (center is None or not needs_weight):
                grad_bias = delta.sum(0)
            elif needs_bias:
                grad_bias = delta.mT @ (1 - rows @ center[0])
        return grad_x, grad_weight, grad_bias, None, None, None, None, None
