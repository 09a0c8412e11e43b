"""Convolutions of many networks at once, each with its own small kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Geometry(NamedTuple):
    """Stride and padding of a convolution, by rows and columns."""

    stride: tuple[int, int]
    padding: tuple[int, int]


class StackedConv2d(torch.autograd.Function):
    """Convolution of K networks, for images ``(K, B, H, W, C)`` and kernels ``(K, O, C, h, w)``.

    The networks are convolved one after the other with channels innermost: on the CPU, that measured faster than one
    grouped convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
        """Return the images ``(K, B, H', W', O)``."""
        ctx.geometry = geometry
        ctx.save_for_backward(x, kernel)
        images = x.permute(0, 1, 4, 2, 3).unbind()
        found = [F.conv2d(image, k, None, *geometry) for image, k in zip(images, kernel.unbind(), strict=True)]
        return torch.stack([image.permute(0, 2, 3, 1) for image in found])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images and kernels."""
        x, kernel = ctx.saved_tensors
        stride, padding = ctx.geometry
        needs_x, needs_kernel, _ = ctx.needs_input_grad
        grad, grad_x = grad.contiguous(), None
        stacks = grad.permute(0, 1, 4, 2, 3), x.permute(0, 1, 4, 2, 3), kernel
        wanted = [needs_x, needs_kernel, False]
        found = [
            torch.ops.aten.convolution_backward(g, image, k, None, stride, padding, (1, 1), False, (0, 0), 1, wanted)
            for g, image, k in zip(*(stack.unbind() for stack in stacks), strict=True)
        ]
        if needs_x:
            grad_x = torch.stack([g.permute(0, 2, 3, 1) for g, _, _ in found])
        return grad_x, torch.stack([g for _, g, _ in found]) if needs_kernel else None, None


class StackedUnfoldedConv2d(torch.autograd.Function):
    """The same as one product with unfolded images: for strides, and for kernels of a first layer, which read little.

    Strided convolutions of 16 channels measured 1.5 times as fast as the library's at a batch of 16, and equal at 64.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
        """Return the images ``(K, B, H', W', O)``."""
        columns = _unfold(x, kernel.shape[3:], geometry)
        ctx.geometry, ctx.shape = geometry, x.shape
        ctx.save_for_backward(columns, kernel)
        return torch.matmul(columns.flatten(1, 3), _matrices(kernel).transpose(1, 2)).view(*columns.shape[:4], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images and kernels."""
        columns, kernel = ctx.saved_tensors
        needs_x, needs_kernel, _ = ctx.needs_input_grad
        grad, grad_kernel = grad.contiguous(), None
        if needs_kernel:
            networks, outputs, channels, h, w = kernel.shape
            product = torch.bmm(columns.flatten(1, 3).transpose(1, 2), grad.flatten(1, 3))
            grad_kernel = product.view(networks, h, w, channels, outputs).permute(0, 4, 3, 1, 2)
        return _spread(grad, kernel, ctx.shape, ctx.geometry) if needs_x else None, grad_kernel, None


def _matrices(kernel: Tensor) -> Tensor:
    """Return kernels ``(K, O, C, h, w)`` as matrices ``(K, O, h w C)``."""
    return kernel.permute(0, 1, 3, 4, 2).flatten(2)


def _unfold(x: Tensor, kernel: tuple[int, int], geometry: Geometry) -> Tensor:
    """Return what each output reads, shape ``(K, B, H', W', h w C)``."""
    (down, right), (top, left) = geometry
    padded = F.pad(x, (0, 0, left, left, top, top))
    windows = padded.unfold(2, kernel[0], down).unfold(3, kernel[1], right)
    return windows.permute(0, 1, 2, 3, 5, 6, 4).flatten(4)


def _spread(grad: Tensor, kernel: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """Return the gradient of the images: each gradient of an output, spread over the pixels that it has read."""
    (down, right), (top, left) = geometry
    networks, samples, height, width, channels = shape
    high, wide = grad.shape[2:4]
    h, w = kernel.shape[3:]
    spread = torch.bmm(grad.flatten(1, 3), _matrices(kernel)).view(networks, samples, high, wide, h, w, channels)
    found = grad.new_zeros(networks, samples, height + 2 * top, width + 2 * left, channels)
    for i in range(0, h, down):
        for j in range(0, w, right):  # blocks of the kernel that never meet another output's
            block = spread[:, :, :, :, i : i + down, j : j + right]
            windows = found[:, :, i:, j:].unfold(2, block.shape[4], down).unfold(3, block.shape[5], right)
            windows[:, :, :high, :wide].permute(0, 1, 2, 3, 5, 6, 4).add_(block)
    return found[:, :, top : top + height, left : left + width]
