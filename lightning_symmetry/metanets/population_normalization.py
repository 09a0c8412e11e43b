"""Normalisation of many networks at once, each with its own scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StackedLayerNorm(torch.autograd.Function):
    r"""Layer normalisation of K networks, for ``(K, n, C)`` over C and scales and shifts ``(K, C)``.

    .. math:: y = \gamma_k \hat x + \beta_k, \qquad \hat x = (x - \mathrm{E} x) / \sqrt{\mathrm{Var}\, x + \epsilon}

    For few channels, means are products with a vector: a reduction over the last axis takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        """Return the normalised tensor."""
        mean = x.new_full((x.shape[2],), 1 / x.shape[2])
        normal = x - torch.mv(x.flatten(0, 1), mean).view(*x.shape[:2], 1)
        square = torch.mv((normal * normal).flatten(0, 1), mean)
        inverse = square.add_(eps).rsqrt_().view(*x.shape[:2], 1)
        normal.mul_(inverse)
        ctx.save_for_backward(normal, inverse, scale)
        return torch.addcmul(shift.unsqueeze(1), normal, scale.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensor, scales and shifts."""
        normal, inverse, scale = ctx.saved_tensors
        grad = grad.contiguous()
        ones = grad.new_ones(len(grad), 1, grad.shape[1])
        grad_scale, grad_shift = torch.bmm(ones, grad * normal), torch.bmm(ones, grad)
        # PyTorch's own backward pass, told that the tensor was normalised before.
        rows = inverse.new_zeros(inverse.numel()), torch.ones_like(inverse.flatten())
        found = torch.ops.aten.native_layer_norm_backward(
            (grad * scale.unsqueeze(1)).flatten(0, 1),
            normal.flatten(0, 1),
            normal.shape[2:],
            *(row.view(-1, 1) for row in rows),
            None,
            None,
            [True, False, False],
        )[0]
        return found.view(grad.shape).mul_(inverse), grad_scale.squeeze(1), grad_shift.squeeze(1), None


class StackedBatchNorm(torch.autograd.Function):
    r"""Batch normalisation of K networks in training, for ``(K, n, C)`` over n and scales and shifts ``(K, C)``.

    The equation is that of :class:`StackedLayerNorm`. Returns also the means and biased variances ``(K, C)``, which
    have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised tensor, means and variances."""
        share = x.new_full((1, 1, 1), 1 / x.shape[1]).expand(len(x), 1, x.shape[1])
        mean = torch.bmm(share, x)
        normal = x - mean
        variance = torch.bmm(share, normal * normal)
        inverse = (variance + eps).rsqrt_()
        normal.mul_(inverse)
        mean, variance = mean.squeeze(1), variance.squeeze(1)
        ctx.save_for_backward(normal, inverse, scale)
        ctx.mark_non_differentiable(mean, variance)
        return torch.addcmul(shift.unsqueeze(1), normal, scale.unsqueeze(1)), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensor, scales and shifts."""
        normal, inverse, scale = ctx.saved_tensors
        grad = grad.contiguous()
        ones = grad.new_ones(len(grad), 1, grad.shape[1])
        product = grad * normal
        grad_scale, grad_shift = torch.bmm(ones, product), torch.bmm(ones, grad)
        count = grad.shape[1]
        found = torch.mul(normal, grad_scale / -count, out=product).add_(grad).sub_(grad_shift / count)
        return found.mul_(inverse * scale.unsqueeze(1)), grad_scale.squeeze(1), grad_shift.squeeze(1), None
