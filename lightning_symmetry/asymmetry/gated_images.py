"""FiGLU on channels-last images with little memory: what the backward pass needs is computed again, piece by piece."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

_PIECE = 2**18  # entries worked on at a time in the backward pass, so that they stay in cache


def gate_images(x: Tensor, fixed: Tensor) -> Tensor:
    """Return ``sigmoid(F x) * x`` over the channels of ``(N, C, H, W)``; the reference form, differentiable at will."""
    return F.conv2d(x, fixed[:, :, None, None]).sigmoid() * x


def normalise_images(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer normalisation over the channels of ``(N, C, H, W)``."""
    return F.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, eps).permute(0, 3, 1, 2)


class GatedImages(torch.autograd.Function):
    """``sigmoid(F n) * n`` for n = x, or n = LN(x) where a normalisation is given.

    Saves x alone (and the means and deviations of the normalisation): neither n nor the gate. With the normalisation,
    x is the output of the layer before it and nothing is saved that the plain network would not save too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, fixed: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Compute the gated images."""
        ctx.eps = eps
        mean = deviation = None
        n = x
        if weight is not None:
            n, mean, deviation = torch.native_layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, eps)
            n = n.permute(0, 3, 1, 2)
        ctx.save_for_backward(x, fixed, weight, bias, mean, deviation)
        return F.conv2d(n, fixed[:, :, None, None]).sigmoid_().mul_(n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the normalisation's parameters."""
        x, fixed, weight, bias, mean, deviation = ctx.saved_tensors
        if torch.is_grad_enabled() or _is_batched(grad):
            return _reference_backward(ctx, grad)
        pixels = x.permute(0, 2, 3, 1)
        out = torch.empty_like(pixels)
        _gate_backward(pixels, grad.permute(0, 2, 3, 1), fixed, weight, bias, mean, deviation, out)
        if weight is None:
            return out.permute(0, 3, 1, 2), None, None, None, None
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            out, pixels, weight.shape, mean, deviation, weight, bias, [True, True, True]
        )
        return grad_x.permute(0, 3, 1, 2), None, grad_weight, grad_bias, None


def _is_batched(grad: Tensor) -> bool:
    """Whether many gradients are pulled back at once, by ``vmap`` or ``is_grads_batched``."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def _reference_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the reference form, so that the result can be differentiated again."""
    x, fixed, weight, bias, _, _ = ctx.saved_tensors
    inputs = {place: (x, fixed, weight, bias)[place] for place in (0, 2, 3) if ctx.needs_input_grad[place]}
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        n = x if weight is None else normalise_images(x, weight, bias, ctx.eps)
        grads = torch.autograd.grad(gate_images(n, fixed), list(inputs.values()), grad, create_graph=again)
    found = dict(zip(inputs, grads, strict=True))
    return tuple(found.get(place) for place in range(5))


def _gate_backward(
    x: Tensor,
    grad: Tensor,
    fixed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    deviation: Tensor | None,
    out: Tensor,
) -> None:
    """Write into ``out`` the gradient of n: ``s * g + F^T [g * n * s * (1 - s)]`` with ``s = sigmoid(F n)``."""
    channels = fixed.shape[0]
    size = max(1, _PIECE // channels)
    pieces = [tensor.reshape(-1, channels).split(size) for tensor in (x, grad, out)]
    if weight is not None:
        pieces += [tensor.reshape(-1, 1).split(size) for tensor in (mean, deviation)]
    buffers = x.new_empty(2, size, channels)
    for n, g, gate, *statistics in zip(*pieces, strict=True):
        if statistics:
            n = torch.sub(n, statistics[0], out=buffers[0, : len(n)]).mul_(statistics[1]).mul_(weight).add_(bias)
        torch.mm(n, fixed.t(), out=gate).sigmoid_()
        inner = torch.mul(g, n, out=buffers[1, : len(g)])
        torch.ops.aten.sigmoid_backward.grad_input(inner, gate, grad_input=inner)
        gate.mul_(g).addmm_(inner, fixed)


def lean_path_applies(x: Tensor, fixed: Tensor) -> bool:
    """Whether images are laid out channels last, in plain eager training, so that the pieces are views."""
    return (
        torch.is_grad_enabled()
        and type(x) is Tensor
        and x.ndim == 4
        and x.dtype == fixed.dtype
        and not x.is_meta
        and not torch._C._are_functorch_transforms_active()
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
    )
