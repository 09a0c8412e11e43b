"""The linear map from whitened to canonical parameters of a layer, and what it does to a Fisher matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class WhitenedCoordinates:
    r"""The map :math:`\theta = J \Omega` from whitened parameters (V, d) of a layer to its canonical (W, b).

    .. math:: W_k = V_k U, \qquad b = d - \sum_k V_k U c

    for each tap k of the kernel (a linear layer has one). As vectors, :math:`\theta = (\mathrm{vec}(W), b)` and
    :math:`\Omega = (\mathrm{vec}(V), d)`, where vec goes through a weight row by row, in its order in memory.

    Args:
        U: Whitening matrix, of shape ``(N, N)``, or ``(groups, N, N)`` for a grouped convolution with N inputs a group.
        c: Centre, of shape ``(N,)`` or ``(groups, N)``; None is zero.
        weight_shape: Shape of the weight, ``(out, N, *kernel)``.
        bias: Whether the layer has a bias.
        name: What to call the layer in errors.

    Raises:
        ValueError: If shapes do not fit, values are not finite, or a layer without bias is to be centred.

    Source: Natural Neural Networks (2015), eq. 7 and Algorithm 1, lines 7 and 10.
    """

    def __init__(
        self, U: Tensor, c: Tensor | None, weight_shape: Sequence[int], bias: bool, name: str = "the layer"
    ) -> None:
        rows, inputs = weight_shape[:2]
        self._taps = math.prod(weight_shape[2:])
        self._num_weights, self._bias = math.prod(weight_shape), bias
        self.size = self._num_weights + (rows if bias else 0)
        groups = U.shape[0] if U.ndim == 3 else 1
        if U.shape[-2:] != (inputs, inputs) or U.ndim not in (2, 3) or rows % groups:
            raise ValueError(
                f"Expected U of {name} to have shape ({inputs}, {inputs}), or a stack of them that divides the "
                f"{rows} rows of the weight {tuple(weight_shape)}, but got {tuple(U.shape)}."
            )
        c = U.new_zeros(groups, inputs) if c is None else c.to(U)
        if c.shape[-1:] != (inputs,) or c.numel() != groups * inputs:
            raise ValueError(f"Expected c of {name} to have {groups} x {inputs} entries but got {tuple(c.shape)}.")
        if not (torch.isfinite(U).all() and torch.isfinite(c).all()):
            raise ValueError(f"U or c of {name} has values that are not finite.")
        if not bias and bool(c.any()):
            raise ValueError(f"c of {name} is not zero, but without a bias there is nothing to take the shift V U c.")
        self._U, self._c = U.detach().reshape(groups, inputs, inputs), c.detach().reshape(groups, inputs)

    def to_canonical(self, vectors: Tensor) -> Tensor:
        """Return ``J X`` for X of shape ``(size, K)``."""
        weight, bias = self._split(vectors)
        weight = torch.einsum("goitk,gij->gojtk", weight, self._U)
        shift = torch.einsum("gojtk,gj->gok", weight, self._c)
        return self._join(weight, bias - shift if self._bias else bias)

    def pull_back(self, vectors: Tensor) -> Tensor:
        """Return ``J^T X`` for X of shape ``(size, K)``: ``(G_W - g_b c^T) U^T`` and ``g_b`` for gradients."""
        weight, bias = self._split(vectors)
        if self._bias:
            weight = weight - torch.einsum("gok,gj->gojk", bias, self._c).unsqueeze(-2)
        return self._join(torch.einsum("gojtk,gij->goitk", weight, self._U), bias)

    def _split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        groups, inputs, _ = self._U.shape
        weight, bias = vectors.split([self._num_weights, self.size - self._num_weights])
        columns = vectors.shape[1]
        return weight.reshape(groups, -1, inputs, self._taps, columns), bias.reshape(groups, -1, columns)

    def _join(self, weight: Tensor, bias: Tensor) -> Tensor:
        columns = weight.shape[-1]
        return torch.cat([weight.reshape(self._num_weights, columns), bias.reshape(-1, columns)])


def transform_fisher(
    block: Tensor,
    U: Tensor,
    c: Tensor | None = None,
    *,
    weight_shape: Sequence[int] | None = None,
    bias: bool = True,
) -> Tensor:
    r"""Return a layer's Fisher block in the coordinates of its whitened parameters.

    .. math:: F_\Omega = J^\top F_\theta J, \qquad W = V U, \quad b = d - V U c

    where :math:`\theta = J \Omega` is linear: it takes the canonical block only, not the network. Vectors are
    :math:`\theta = (\mathrm{vec}(W), b)` and :math:`\Omega = (\mathrm{vec}(V), d)`, vec row by row as in the paper:
    entry (o, i) of a linear layer's weight stands at ``o * N + i``, and the biases follow all weights. For a
    convolution the same U acts on each tap of the kernel and c counts once a tap, as if the input were padded with c.

    Args:
        block: :math:`F_\theta`, of shape ``(D, D)``, with the layer's weight and bias only.
        U: Whitening matrix, of shape ``(N, N)``, or ``(groups, N, N)`` for grouped convolutions.
        c: Centre, of shape ``(N,)`` or ``(groups, N)``; None is zero.
        weight_shape: Shape of the weight. Default: a linear layer's, ``(out, N)``.
        bias: Whether the layer has a bias.

    Returns:
        :math:`F_\Omega`, of the same shape and type.

    Raises:
        ValueError: If shapes do not fit, values are not finite, or a layer without bias is to be centred.

    Source: Natural Neural Networks (2015), section 3.
    """
    if block.ndim != 2 or block.shape[0] != block.shape[1]:
        raise ValueError(f"Expected `block` to be a square matrix but got shape {tuple(block.shape)}.")
    if weight_shape is None:
        weight_shape = (block.shape[0] // (U.shape[-1] + bias), U.shape[-1])
    coordinates = WhitenedCoordinates(U.to(block), c, weight_shape, bias)
    if coordinates.size != block.shape[0]:
        raise ValueError(
            f"`block` has size {block.shape[0]}, but a layer with a weight of shape {tuple(weight_shape)} "
            f"{'and' if bias else 'without'} bias has {coordinates.size} parameters."
        )
    return coordinates.pull_back(coordinates.pull_back(block).mT).mT
