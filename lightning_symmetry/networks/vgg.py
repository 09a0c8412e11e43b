"""Plain convolutional networks for small images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class VGG(nn.Module):
    r"""Convolutional network in the manner of VGG: stages of 3x3 convolutions, each ending in a max-pool, no skips.

    Stage s = 0, 1, ... has ``convs`` convolutions of :math:`2^s` times ``width`` channels, and then halves height and
    width. The mean over the pixels that are left goes through a hidden linear layer of as many units as the last stage
    has channels, and a linear layer reads the logits out. Images may have any size of at least :math:`2^S` pixels for
    S stages.

    Weights start from a normal distribution of variance 2 / fan-in (1 / fan-in for the logits), biases at zero.

    Args:
        width: Channels of the first stage.
        stages: Number of stages.
        convs: Convolutions a stage.
        num_classes: Number of outputs.
        in_channels: Channels of the image.
        norm: Whether to normalise over the batch before each activation (BatchNorm); layers before one have no bias.
        activation: Class of the activation, called without argument.

    Source: Simonyan and Zisserman (2015), on which Natural Neural Networks (2015), section 4.3, models its network for
    CIFAR-10 without giving sizes; He et al. (2015) for the initialisation.
    """

    def __init__(
        self,
        width: int = 64,
        stages: int = 3,
        convs: int = 2,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: bool = False,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if min(width, stages, convs, num_classes, in_channels) < 1:
            raise ValueError(
                "Expected `width`, `stages`, `convs`, `num_classes` and `in_channels` to be at least 1 but got "
                f"{width}, {stages}, {convs}, {num_classes} and {in_channels}."
            )
        self.in_channels, self.smallest = in_channels, 2**stages
        self.stages = nn.Sequential()
        before = in_channels
        for stage in range(stages):
            channels, layers = width * 2**stage, nn.Sequential()
            for _ in range(convs):
                layers.append(nn.Conv2d(before, channels, 3, padding=1, bias=not norm))
                layers.append(nn.BatchNorm2d(channels) if norm else nn.Identity())
                layers.append(activation())
                before = channels
            self.stages.append(layers.append(nn.MaxPool2d(2)))
        self.hidden = nn.Linear(channels, channels, bias=not norm)
        self.norm = nn.BatchNorm1d(channels) if norm else nn.Identity()
        self.activation = activation()
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                gain = "linear" if module is self.head else "relu"
                nn.init.kaiming_normal_(module.weight, nonlinearity=gain)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        side = max(32, self.smallest)
        return torch.zeros(2, self.in_channels, side, side)

    def forward(self, input: Tensor) -> Tensor:
        """Map images ``(N, C, H, W)`` to logits ``(N, num_classes)``."""
        if min(input.shape[-2:]) < self.smallest:
            raise ValueError(
                f"The VGG halves images {len(self.stages)} times: they need at least {self.smallest} pixels a side but "
                f"the input has shape {tuple(input.shape)}."
            )
        hidden = self.stages(input).mean((2, 3))
        return self.head(self.activation(self.norm(self.hidden(hidden))))
