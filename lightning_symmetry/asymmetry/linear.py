"""Linear layers with fixed entries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.asymmetry.constants import FixedLinear
from lightning_symmetry.asymmetry.graph_linear import graph_linear
from lightning_symmetry.asymmetry.layer import AsymmetricLayer, Layout


class AsymmetricLinear(AsymmetricLayer):
    r"""Linear layer with fixed entries, :math:`y = W' x + b`; see :class:`AsymmetricLayer`.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        n_fix: Number of fixed inputs of each output.
        kappa: Standard deviation of the constants; 0 gives fixed zeros (Theorem 3).
        bias: Whether to add a bias.
        layout: A linear layer's entries are its filters: both layouts are the same.
        seed: Seed of mask and constants.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If rows cannot be made distinct with at least one trainable entry each, kappa < 0, or the layout is
            unknown.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 4.1, eq. 2.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_fix: int,
        kappa: float,
        bias: bool = True,
        layout: Layout = "entries",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._adopt(nn.Linear(in_features, out_features, bias, device, dtype), n_fix, kappa, layout, seed, "")

    def _take_settings(self, layer: nn.Module) -> None:
        self.of_graph_network = isinstance(layer, graph_linear())
        if self.of_graph_network:
            self.in_features, self.out_features = layer.in_channels, layer.out_channels
            self._initializers = layer.weight_initializer, layer.bias_initializer
        else:
            self.in_features, self.out_features = layer.in_features, layer.out_features

    def _empty(self, **factory: Any) -> nn.Module:
        bias = self.bias is not None
        if not self.of_graph_network:
            return skip_init(nn.Linear, self.in_features, self.out_features, bias=bias, **factory)
        from torch_geometric.nn import Linear as GraphLinear  # takes seconds to import

        weight_init, bias_init = self._initializers
        settings = {"bias": bias, "weight_initializer": weight_init, "bias_initializer": bias_init}
        with torch.random.fork_rng(devices=[]):  # it cannot be built without drawing parameters
            return GraphLinear(self.in_features, self.out_features, **settings).to(**factory)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        if self._may_write(input):
            self.restore_constants()
            return FixedLinear.apply(input, self.weight, self.bias, self._places)
        return F.linear(input, self.canonical_weight(), self.bias)

    def extra_repr(self) -> str:
        """Describe sizes and constants."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._describe()}"
