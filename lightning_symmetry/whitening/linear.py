"""Whitened linear layers with canonical parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.whitening.gradients import WhitenedProduct
from lightning_symmetry.whitening.layer import NewLayer, WhitenedLayer


class LinearMap(NewLayer):
    """What the whitened linear layers share.

    Attributes:
        in_features: Number of inputs.
        out_features: Number of outputs.
    """

    def _take_settings(self, layer: nn.Module) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def _empty(self, **factory: Any) -> nn.Linear:
        return skip_init(nn.Linear, self.in_features, self.out_features, bias=self.bias is not None, **factory)

    def _few_rows(self, input: Tensor) -> bool:
        """Whether the side of the activations is cheaper and can be taken: in plain eager mode and full precision."""
        return (
            not torch.compiler.is_compiling()  # which would compile anew for each number of rows
            and input.numel() < self.out_features * self.in_features
            and input.dtype == self.weight.dtype
            and input.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled(input.device.type)
            and not torch._C._are_functorch_transforms_active()
        )

    def extra_repr(self) -> str:
        """Describe sizes and coefficients."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._describe()}"


class WhitenedLinear(LinearMap, WhitenedLayer):
    """Linear layer with gradients in whitened coordinates; see :class:`WhitenedLayer`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        self._watch(input)
        if self._few_rows(input) and not self._applied.is_identity:
            center, *matrix = self._applied
            center = center if self.bias is not None and self.bias.requires_grad else None
            return WhitenedProduct.apply(input, self.weight, self.bias, center, *matrix)
        return F.linear(input, *self.whitened_parameters())
