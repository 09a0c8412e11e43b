"""Wide residual networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_symmetry.networks.norm import Norm, image_norm
from lightning_symmetry.networks.resnet import channels_last, convolution


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after normalisation and ReLU, and a skip: the input, or a 1x1 convolution of it.

    Where the shape changes the 1x1 convolution sees the normalised input, as in the authors' code.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.norm1 = image_norm(norm, in_channels)
        self.conv1 = convolution(in_channels, out_channels, 3, stride)
        self.norm2 = image_norm(norm, out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = convolution(out_channels, out_channels, 3)
        self.skip = None
        if stride != 1 or in_channels != out_channels:
            self.skip = convolution(in_channels, out_channels, 1, stride)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, C, H, W)``."""
        active = self.norm1(input).relu()
        hidden = self.dropout(self.norm2(self.conv1(active)).relu())
        return self.conv2(hidden) + (input if self.skip is None else self.skip(active))


class WideResNet(nn.Module):
    """WRN-d-k for small images: stem, three stages of ``16 k, 32 k, 64 k`` channels, linear head.

    Args:
        depth: Number of layers d, ``6 n + 4`` for n blocks a stage: 10, 16, 22, 28, 40.
        width: Multiplier k of the channels.
        num_classes: Number of outputs.
        in_channels: Channels of the image.
        norm: ``"batch"``, as in the paper, or ``"layer"`` over the channels of each pixel.
        dropout: Probability of dropout between the two convolutions of a block.

    Raises:
        ValueError: If there is no network of that depth, or a size is less than 1.

    Source: Zagoruyko and Komodakis, Wide Residual Networks (2016), section 2; WRN-28 on CIFAR-100 is used by Exploring
    Low Rank Training of Deep Neural Networks (2022).
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(
                f"Expected `depth` to be 6 n + 4 for n blocks a stage (10, 16, 22, 28, ...) but got {depth}."
            )
        if width < 1:
            raise ValueError(f"Expected `width` to be at least 1 but got {width}.")
        self.in_channels = in_channels
        channels = 16
        self.stem = convolution(in_channels, channels, 3)
        stages = []
        for stage in range(3):
            blocks = []
            for block in range((depth - 4) // 6):
                out_channels = 16 * width * 2**stage
                blocks.append(WideBlock(channels, out_channels, 2 if stage and not block else 1, norm, dropout))
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.stage1, self.stage2, self.stage3 = stages
        self.norm = image_norm(norm, channels)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        return torch.zeros(2, self.in_channels, 32, 32)

    def forward(self, input: Tensor) -> Tensor:
        """Map images ``(N, C, H, W)`` to logits ``(N, num_classes)``."""
        hidden = self.stage3(self.stage2(self.stage1(self.stem(channels_last(input)))))
        return self.head(self.norm(hidden).relu().mean((2, 3)))
