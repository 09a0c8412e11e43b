"""The paper's graph network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


class GNN(nn.Module):
    """Graph network similar to GIN with mean aggregation.

    Each layer maps node features by ``h_i <- act(BN(W (h_i + mean_{j in N(i)} h_j) + b))``; a linear layer reads
    the logits out. With the defaults for ogbn-arxiv (128 features, 40 classes) it has 176,424 parameters.

    Args:
        in_features: Node features.
        num_classes: Number of outputs.
        hidden: Width.
        num_layers: Message passing layers.
        activation: Class of the activation, called without argument.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.1.2.
    """

    def __init__(
        self,
        in_features: int = 128,
        num_classes: int = 40,
        hidden: int = 256,
        num_layers: int = 3,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        from torch_geometric.nn import SimpleConv  # takes seconds to import

        super().__init__()
        widths = [in_features] + [hidden] * num_layers
        if min(widths) < 1 or num_layers < 1:
            raise ValueError(f"Expected widths and `num_layers` to be at least 1 but got {widths}.")
        self.in_features = in_features
        self.aggregate = SimpleConv(aggr="mean", combine_root="sum")
        self.linears = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(num_layers))
        self.activations = nn.ModuleList(activation() for _ in range(num_layers))
        self.head = nn.Linear(hidden, num_classes)

    @property
    def example_input_array(self) -> tuple[Tensor, Tensor]:
        """Node features and edges of the right shape."""
        return torch.zeros(2, self.in_features), torch.tensor([[0, 1], [1, 0]])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Map node features ``(N, in_features)`` and edges ``(2, E)`` to logits ``(N, num_classes)``."""
        for linear, norm, activation in zip(self.linears, self.norms, self.activations, strict=True):
            x = activation(norm(linear(self.aggregate(x, edge_index))))
        return self.head(x)
