"""The papers' multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Multi-layer perceptron: (linear, layer normalisation, activation) for each hidden layer, then linear.

    Args:
        in_features: Number of inputs; images are flattened.
        hidden: Widths of the hidden layers. The paper's MLP for MNIST is ``(512, 512, 512)``.
        num_classes: Number of outputs.
        norm: Whether to normalise hidden layers (LayerNorm).
        activation: Class of the activation, called without argument.
        bias: Whether the linear layers have biases.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.1.1: 4 layers, LayerNorm, width 512.
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (512, 512, 512),
        num_classes: int = 10,
        norm: bool = True,
        activation: Callable[[], nn.Module] = nn.GELU,
        bias: bool = True,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden, num_classes]
        if min(widths) < 1:
            raise ValueError(f"Expected all widths to be at least 1 but got {widths}.")
        self.in_features = in_features
        self.linears = nn.ModuleList(nn.Linear(n, m, bias=bias) for n, m in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(n) if norm else nn.Identity() for n in hidden)
        self.activations = nn.ModuleList(activation() for _ in hidden)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        return torch.zeros(2, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, ...)`` with ``in_features`` entries a sample to logits ``(N, num_classes)``."""
        hidden = flat_samples(input, self.in_features, "MLP")
        for linear, norm, activation in zip(self.linears, self.norms, self.activations, strict=False):
            hidden = activation(norm(linear(hidden)))
        return self.linears[-1](hidden)


def flat_samples(input: Tensor, in_features: int, title: str) -> Tensor:
    """Return samples as rows of ``in_features`` entries.

    Raises:
        ValueError: If they have another number.
    """
    found = math.prod(input.shape[1:])
    if found != in_features:
        raise ValueError(
            f"The {title} takes {in_features} features, but a sample of the input of shape {tuple(input.shape)} "
            f"has {found}."
        )
    return input.flatten(1)
