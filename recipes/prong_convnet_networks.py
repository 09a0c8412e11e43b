"""The Inception network of `prong_convnet.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision.models import googlenet
from torchvision.models.googlenet import Inception, InceptionAux


class PlainConvolution(nn.Module):
    """A convolution with bias and a rectifier: torchvision's ``BasicConv2d`` without the batch norm in between."""

    def __init__(self, in_channels: int, out_channels: int, **arguments: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, **arguments)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, C, H, W)``."""
        return self.conv(input).relu()


def inception(num_classes: int, norm: bool) -> nn.Module:
    """Return the Inception network, with or without batch norm before each activation.

    The paper's is the one with which batch norm was introduced (Ioffe and Szegedy, 2015): version 1 with batch norm and
    smaller kernels in place of 5x5, on images of 224 pixels. Of torchvision's two GoogLeNet is that, while Inception v3
    came later, with factorised 7x7 kernels and images of 299 pixels. There are no auxiliary classifiers and no dropout:
    every method trains the same single loss. Weights start from a normal distribution of variance 2 / fan-in
    (1 / fan-in for the logits): torchvision's (standard deviation 0.01) needs batch norm to get through 22 layers.

    Args:
        num_classes: Number of outputs.
        norm: Whether convolutions have batch norm; without, they have biases.
    """
    blocks = None if norm else [PlainConvolution, partial(Inception, conv_block=PlainConvolution), InceptionAux]
    net = googlenet(num_classes=num_classes, aux_logits=False, init_weights=False, dropout=0.0, blocks=blocks)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear" if module is net.fc else "relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net
