"""A small convolutional classifier, of which zoos have thousands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_symmetry.networks.norm import Norm, image_norm, normalise_and_activate
from lightning_symmetry.networks.resnet import channels_last, convolution


class ConvNet(nn.Module):
    """Convolutional network for small images: 3x3 convolutions, each normalised and activated, mean, linear head.

    A convolution halves height and width where it has more channels than the one before it. With its defaults and
    digits of 8x8 pixels it has 7,514 parameters, and 230 thousand multiplications an image.

    Args:
        channels: Channels of each convolution.
        norm: ``"layer"`` (over the channels of each pixel) or ``"batch"``.
        num_classes: Number of outputs.
        in_channels: Channels of the image.
        size: Height and width of the image.
        activation: Class of the activation, called without argument.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.1, made smaller: the paper's networks
    are :class:`ResNet` of one block a stage.
    """

    def __init__(
        self,
        channels: Sequence[int] = (16, 16, 32),
        norm: Norm = "layer",
        num_classes: int = 10,
        in_channels: int = 1,
        size: int = 8,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if min([*channels, in_channels, num_classes, size], default=0) < 1 or not channels:
            raise ValueError(
                "Expected `channels`, `in_channels`, `num_classes` and `size` to be at least 1 but got "
                f"{tuple(channels)}, {in_channels}, {num_classes} and {size}."
            )
        self.in_channels, self.size = in_channels, size
        self.convs, self.norms, self.activations = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        before = in_channels
        for layer, after in enumerate(channels):
            self.convs.append(convolution(before, after, 3, stride=2 if layer > 0 and after > before else 1))
            self.norms.append(image_norm(norm, after))
            self.activations.append(activation())
            before = after
        self.head = nn.Linear(before, num_classes)
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        return torch.zeros(2, self.in_channels, self.size, self.size)

    def forward(self, input: Tensor) -> Tensor:
        """Map images ``(N, C, H, W)`` to logits ``(N, num_classes)``."""
        hidden = channels_last(input)
        for conv, norm, activation in zip(self.convs, self.norms, self.activations, strict=True):
            hidden = normalise_and_activate(norm, activation, conv(hidden))
        return self.head(hidden.mean((2, 3)))
