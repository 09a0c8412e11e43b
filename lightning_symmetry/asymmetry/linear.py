"""Linear layers with fixed entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.asymmetry.constants import FixedLinear
from lightning_symmetry.asymmetry.graph_linear import graph_linear
from lightning_symmetry.asymmetry.layer import AsymmetricLayer, Layout


class AsymmetricLinear(AsymmetricLayer):
    """Linear layer with fixed entries, see :class:`AsymmetricLayer`.

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
        ValueError: If rows cannot be made distinct with at least one trainable entry each, or kappa < 0.
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

    def to_layer(self) -> nn.Module:
        """Return the plain ``nn.Linear``, or torch-geometric's, with the canonical weight."""
        factory = {"device": self.weight.device, "dtype": self.weight.dtype}
        if self.of_graph_network:
            from torch_geometric.nn import Linear as GraphLinear  # takes seconds to import

            weight_init, bias_init = self._initializers
            with torch.random.fork_rng(devices=[]):  # it cannot be built without drawing parameters
                layer = GraphLinear(
                    self.in_features,
                    self.out_features,
                    bias=self.bias is not None,
                    weight_initializer=weight_init,
                    bias_initializer=bias_init,
                ).to(**factory)
        else:
            layer = skip_init(nn.Linear, self.in_features, self.out_features, bias=self.bias is not None, **factory)
        return self._fill(layer)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        if self._may_write(input):
            self.restore_constants()
            return FixedLinear.apply(input, self.weight, self.bias, self._places)
        return F.linear(input, self.canonical_weight(), self.bias)

    def extra_repr(self) -> str:
        """Describe sizes and constants."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._describe()}"
