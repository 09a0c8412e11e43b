"""The deep autoencoder on which optimizers are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """Fully connected autoencoder with a mirrored, untied decoder; every layer ends in the activation.

    Weights start from a normal distribution of variance 1 / fan-in, biases at zero.

    Args:
        in_features: Number of inputs; images are flattened.
        hidden: Widths of the encoder, the last of which is the code. The paper's for MNIST is ``(1000, 500, 250, 30)``.
        activation: Class of the activation, called without argument.
        norm: Whether to normalise hidden layers over the batch before their activation (BatchNorm).

    Source: Natural Neural Networks (2015), section 4.2; Martens, Deep learning via Hessian-free optimization (2010).
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (1000, 500, 250, 30),
        activation: Callable[[], nn.Module] = nn.Sigmoid,
        norm: bool = False,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden, *reversed(hidden[:-1]), in_features]
        if min(widths) < 1 or not hidden:
            raise ValueError(f"Expected a code and all widths to be at least 1 but got {widths}.")
        self.in_features = in_features
        self.linears = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(widths))
        hidden_norms = [nn.BatchNorm1d(n) if norm else nn.Identity() for n in widths[1:-1]]
        self.norms = nn.ModuleList([*hidden_norms, nn.Identity()])
        self.activations = nn.ModuleList(activation() for _ in self.linears)
        for linear in self.linears:
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        return torch.zeros(2, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, ...)`` with ``in_features`` entries a sample to its reconstruction ``(N, in_features)``."""
        if math.prod(input.shape[1:]) != self.in_features:
            raise ValueError(
                f"The autoencoder takes {self.in_features} features, but a sample of the input of shape "
                f"{tuple(input.shape)} has {math.prod(input.shape[1:])}."
            )
        hidden = input.flatten(1)
        for linear, norm, activation in zip(self.linears, self.norms, self.activations, strict=True):
            hidden = activation(norm(linear(hidden)))
        return hidden
