"""FiGLU, the fixed gated linear unit: a nonlinearity without permutation or diagonal equivariances."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_symmetry.asymmetry.gated_images import GatedImages, gate_images, lean_path_applies
from lightning_symmetry.asymmetry.masks import draw_constants, layer_generator
from lightning_symmetry.surgery import HasConstants


class FiGLU(nn.Module, HasConstants):
    r"""Fixed gated linear unit.

    .. math:: \sigma(x) = \eta(F x) \odot x, \qquad F_{ij} \sim N(0, \mathrm{scale}^2 / d)

    with the sigmoid :math:`\eta` and an untrained F of shape ``(d, d)``. With probability 1 no permutation and
    no diagonal matrix commutes with it, so it leaves no such symmetry between the layers around it. Inputs have d
    entries along one axis, and outputs the same shape.

    Args:
        dim: Number d of channels.
        scale: Standard deviation of F times the root of d. 1 is the scale of a usual initialisation; 0.01 (the
            paper's graph networks) gates within half a percent of 1/2 and is almost linear.
        channel_dim: Axis of the channels: -1 for features (linear layers, graphs), 1 for images, on which F acts
            as a 1x1 convolution.
        seed: Seed of F.
        name: Name of the layer in its network; constants are drawn for each name apart.

    Raises:
        ValueError: If ``dim < 1`` or ``scale <= 0``, or an input has another number of channels.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 4.2.1, eq. 4,
    Proposition 2.
    """

    fixed: Tensor

    def __init__(self, dim: int, scale: float = 1.0, channel_dim: int = -1, seed: int = 0, name: str = "") -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"Expected `dim` to be at least 1 but got {dim}.")
        if not scale > 0 or not math.isfinite(scale):
            raise ValueError(f"Expected `scale` to be positive and finite but got {scale}.")
        self.dim, self.scale, self.channel_dim = dim, float(scale), channel_dim
        gate = draw_constants(dim, dim, layer_generator(seed, name)) * (scale / math.sqrt(dim))
        self.register_buffer("fixed", gate.to(torch.get_default_device(), torch.get_default_dtype()))

    def constants(self) -> dict[str, Tensor]:
        """Return F."""
        return {"fixed": self.fixed}

    @property
    def num_fixed(self) -> int:
        """Number of parameter entries that are constants: none, F is a buffer."""
        return 0

    def forward(self, input: Tensor) -> Tensor:
        """Gate the channels, of which ``input`` must have ``dim`` at ``channel_dim``."""
        if input.shape[self.channel_dim] != self.dim:
            raise ValueError(
                f"FiGLU has {self.dim} channels, but axis {self.channel_dim} of the input of shape "
                f"{tuple(input.shape)} has {input.shape[self.channel_dim]}."
            )
        if self.channel_dim in (-1, input.ndim - 1):
            return torch.sigmoid(F.linear(input, self.fixed)) * input
        if self.channel_dim == 1 and lean_path_applies(input, self.fixed):
            return GatedImages.apply(input, self.fixed, None, None, 0.0)
        if self.channel_dim == 1 and input.ndim == 4:
            return gate_images(input, self.fixed)
        channels_last = torch.movedim(input, self.channel_dim, -1)
        return torch.movedim(torch.sigmoid(F.linear(channels_last, self.fixed)), -1, self.channel_dim) * input

    def after_layer_norm(self, input: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Return ``self(norm(input))`` for a normalisation over the channels of each pixel of ``(N, C, H, W)``.

        The normalised images are not kept for the backward pass, which saves a third of the activation memory.
        """
        affine = norm.weight is not None and norm.bias is not None
        if self.channel_dim == 1 and affine and lean_path_applies(input, self.fixed):
            return GatedImages.apply(input, self.fixed, norm.weight, norm.bias, norm.eps)
        return self(norm(input))

    def extra_repr(self) -> str:
        """Describe size, scale and axis."""
        return f"dim={self.dim}, scale={self.scale:g}, channel_dim={self.channel_dim}"
