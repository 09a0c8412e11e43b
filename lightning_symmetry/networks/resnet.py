"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.networks.norm import Norm, image_norm, normalise_and_activate


def convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the number of pixels, up to its stride; the norm after it has the bias."""
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


def channels_last(images: Tensor) -> Tensor:
    """Return ``(N, C, H, W)`` images in channels-last memory, in words that vmap knows."""
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with normalisation, and a skip (1x1 convolution where the shape changes)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        norm: Norm,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, out_channels, 3, stride)
        self.norm1 = image_norm(norm, out_channels)
        self.activation1 = activation()
        self.conv2 = convolution(out_channels, out_channels, 3)
        self.norm2 = image_norm(norm, out_channels)
        self.activation2 = activation()
        self.skip = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.skip = nn.Sequential(convolution(in_channels, out_channels, 1, stride), image_norm(norm, out_channels))

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, C, H, W)``."""
        hidden = normalise_and_activate(self.norm1, self.activation1, self.conv1(input))
        return self.activation2(self.norm2(self.conv2(hidden)) + self.skip(input))


class ResNet(nn.Module):
    """Residual network for CIFAR: stem, three stages of ``16, 32, 64`` channels times the width, linear head.

    Args:
        blocks: Residual blocks a stage; 3 gives 20 layers, 18 gives 110.
        norm: ``"layer"`` (over the channels of each pixel, as the papers use) or ``"batch"``.
        width: Multiplier of the channels.
        num_classes: Number of outputs.
        in_channels: Channels of the image.
        activation: Class of the activation, called without argument.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.1.1; He et al. (2016), section 4.2.
    """

    def __init__(
        self,
        blocks: int = 3,
        norm: Norm = "layer",
        width: int = 1,
        num_classes: int = 10,
        in_channels: int = 3,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if blocks < 1 or width < 1:
            raise ValueError(f"Expected `blocks` and `width` to be at least 1 but got {blocks} and {width}.")
        channels = 16 * width
        self.in_channels = in_channels
        self.stem = convolution(in_channels, channels, 3)
        self.stem_norm = image_norm(norm, channels)
        self.stem_activation = activation()
        stages = []
        for stage in range(3):
            out_channels = 16 * width * 2**stage
            layers = []
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(ResidualBlock(channels, out_channels, stride, norm, activation))
                channels = out_channels
            stages.append(nn.Sequential(*layers))
        self.stage1, self.stage2, self.stage3 = stages
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        return torch.zeros(2, self.in_channels, 32, 32)

    def forward(self, input: Tensor) -> Tensor:
        """Map images ``(N, C, H, W)`` to logits ``(N, num_classes)``."""
        hidden = normalise_and_activate(self.stem_norm, self.stem_activation, self.stem(channels_last(input)))
        hidden = self.stage3(self.stage2(self.stage1(hidden)))
        return self.head(hidden.mean((2, 3)))


class ResNet20(ResNet):
    """Residual network of 20 layers; arguments of :class:`ResNet` but ``blocks``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(blocks=3, **arguments)


class ResNet110(ResNet):
    """Residual network of 110 layers; arguments of :class:`ResNet` but ``blocks``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(blocks=18, **arguments)
