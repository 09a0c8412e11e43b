"""Layers of many small networks under ``vmap``, faster on the CPU than vmap's own rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_symmetry.metanets.population_convolution import (
    Geometry,
    StackedConv2d,
    StackedUnfoldedConv2d,
)
from lightning_symmetry.metanets.population_normalization import StackedBatchNorm, StackedLayerNorm
from lightning_symmetry.metanets.population_rules import VmapOnly

_FEW = 32  # numbers that an output of a convolution reads: up to here, unfolding measured faster


class StackedLayers(TorchFunctionMode):
    """Within it, two-dimensional convolutions and normalisations of images under ``vmap`` go their own way.

    Images then lie in memory with channels innermost, ``(K, B, H, W, C)``. All that does not fit (groups, dilation,
    other dimensions) is left to vmap.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(function)
        found = NotImplemented if rule is None else rule(*args, **kwargs)
        return function(*args, **kwargs) if found is NotImplemented else found


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if input.ndim != 4 or isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1):
        return NotImplemented
    out = _Conv2d.call(input, weight, Geometry(_pair(stride), _pair(padding)))
    return out if bias is None else out + bias[:, None, None]


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    if input.ndim != 4 or len(normalized_shape) != 1 or weight is None or bias is None:
        return NotImplemented
    return _LayerNorm.call(input, weight, bias, eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if input.ndim != 4 or weight is None or bias is None:
        return NotImplemented
    if not training:
        scale = weight * (running_var + eps).rsqrt()
        return input * scale[:, None, None] + (bias - running_mean * scale)[:, None, None]
    count = input.shape[0] * input.shape[2] * input.shape[3]
    if count == 1:
        return NotImplemented  # torch says what is wrong
    out, mean, variance = _BatchNorm.call(input, weight, bias, eps)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.detach() * momentum)
        running_var.mul_(1 - momentum).add_(variance.detach() * (momentum * count / (count - 1)))
    return out


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """Divide the sum: the gradient of a mean is written out in an order of memory that later steps stumble over."""
    if dim is None or options or not input.is_floating_point():
        return NotImplemented
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims:
        return NotImplemented
    return input.sum(dims, keepdim) / math.prod(input.shape[d] for d in dims)


_RULES = {
    torch.mean: _mean,
    Tensor.mean: _mean,
    F.conv2d: _conv2d,
    torch.conv2d: _conv2d,
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


class _Conv2d(VmapOnly):
    @staticmethod
    def vmap(info: Any, dims: tuple, x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, int]:
        count, (_, _, h, w) = info.batch_size, [n for i, n in enumerate(weight.shape) if i != dims[1]]
        if dims[0] is None:  # all networks see the same images: one network with the channels of all
            kernels = weight.movedim(dims[1], 0)
            found = F.conv2d(x, kernels.flatten(0, 1), None, *geometry)
            return found.unflatten(1, (count, -1)).permute(1, 0, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3), 0
        x = x.movedim(dims[0], 0)
        if dims[1] is None:  # one kernel for all
            return F.conv2d(x.flatten(0, 1), weight, None, *geometry).unflatten(0, (count, -1)), 0
        x, kernels = x.permute(0, 1, 3, 4, 2).contiguous(), weight.movedim(dims[1], 0)
        if (h, w) == (1, 1) and geometry == ((1, 1), (0, 0)):
            found = torch.bmm(x.flatten(1, 3), kernels[..., 0, 0].transpose(1, 2)).view(*x.shape[:-1], -1)
        else:
            strided = max(geometry.stride) > 1 and torch.is_grad_enabled()  # unfolded images take memory
            unfolds = kernels[0, 0].numel() <= _FEW or strided
            layer = StackedUnfoldedConv2d if unfolds else StackedConv2d
            found = layer.apply(x, kernels, geometry)
        return found.permute(0, 1, 4, 2, 3), 0


class _LayerNorm(VmapOnly):
    @staticmethod
    def vmap(info: Any, dims: tuple, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, int]:
        x, weight, bias = (_front(t, dim, info.batch_size) for t, dim in zip((x, weight, bias), dims, strict=False))
        return StackedLayerNorm.apply(x.contiguous().flatten(1, 3), weight, bias, eps).view(x.shape), 0


class _BatchNorm(VmapOnly):
    @staticmethod
    def vmap(info: Any, dims: tuple, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[tuple, tuple]:
        x, weight, bias = (_front(t, dim, info.batch_size) for t, dim in zip((x, weight, bias), dims, strict=False))
        x = x.permute(0, 1, 3, 4, 2).contiguous()
        out, mean, variance = StackedBatchNorm.apply(x.flatten(1, 3), weight, bias, eps)
        return (out.view(x.shape).permute(0, 1, 4, 2, 3), mean, variance), (0, 0, 0)


def _front(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """Return a tensor with the axis of the networks in front."""
    return tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
