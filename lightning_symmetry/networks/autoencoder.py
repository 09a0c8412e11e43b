"""The deep autoencoder on which optimizers are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_symmetry.networks.mlp import flat_samples


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
        hidden = flat_samples(input, self.in_features, "autoencoder")
        for linear, norm, activation in zip(self.linears, self.norms, self.activations, strict=True):
            hidden = activation(norm(linear(hidden)))
        return hidden
