"""Float64 reference of a whitened layer, written down as in the paper: ``y = V U (h - c) + d`` with a dense U."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def covariance_of(rows, centred=True):
    """Mean and covariance, or second moment about zero, of rows (n, N)."""
    rows = rows.double()
    mean = rows.mean(0)
    rows = rows - mean if centred else rows
    return mean, torch.einsum("ni,nj->ij", rows, rows) / len(rows)


def zca(covariance, eps):
    values, vectors = torch.linalg.eigh(covariance)
    return vectors @ torch.diag((values + eps).rsqrt()) @ vectors.T


class ReferenceLayer(nn.Module):
    """V, d, U and c as they stand; the input is padded first, so that U (h - c) is what the paper's 1x1 filter sees."""

    def __init__(self, layer):
        super().__init__()
        self.plain = [layer]  # not a submodule
        self.groups = getattr(layer, "groups", 1)
        size = layer.weight.shape[1]
        self.V, self.d = (nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias))
        self.U = torch.eye(size, dtype=torch.float64).repeat(self.groups, 1, 1)
        self.c = torch.zeros(self.groups, size, dtype=torch.float64)

    def forward(self, h):
        layer = self.plain[0]
        if isinstance(layer, nn.Linear):
            return F.linear((h - self.c[0]) @ self.U[0], self.V, self.d)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        h = F.pad(h, layer._reversed_padding_repeated_twice, mode=mode)
        parts = h.unflatten(1, (self.groups, -1))
        c = self.c.view(1, *self.c.shape, *[1] * (h.ndim - 2))
        h = torch.einsum("bgi...,gij->bgj...", parts - c, self.U).flatten(1, 2)
        function = F.conv1d if h.ndim == 3 else F.conv2d
        return function(h, self.V, self.d, layer.stride, 0, layer.dilation, self.groups)

    def _map(self, weight, bias, matrix, shift):
        """Apply a matrix to each tap; add ``shift`` times (its result or the given weight) c to the bias."""
        taps = weight.unflatten(0, (self.groups, -1))
        mapped = torch.einsum("gmi...,gij->gmj...", taps, matrix)
        canonical = mapped if shift < 0 else taps
        moved = torch.einsum("gmi...,gi->gm...", canonical, self.c).flatten(0, 1)
        return mapped.flatten(0, 1), bias + shift * moved.reshape(len(bias), -1).sum(1)

    def canonical(self, V, d):
        return self._map(V, d, self.U, -1)

    def whitened(self, W, b):
        return self._map(W, b, torch.linalg.inv(self.U), +1)

    @torch.no_grad()
    def reparametrize(self, U, c, optimizer=None):
        """Lines 7 and 10 of Algorithm 1, for the parameters and, as directions, for their momentum."""
        states = [(self.V.data, self.d.data)]
        if optimizer is not None and "momentum_buffer" in optimizer.state.get(self.V, {}):
            states.append(tuple(optimizer.state[p]["momentum_buffer"] for p in (self.V, self.d)))
        canonical = [self.canonical(*state) for state in states]
        self.U, self.c = U, c
        for state, values in zip(states, canonical, strict=True):
            for tensor, value in zip(state, self.whitened(*values), strict=True):
                tensor.copy_(value)


CONVOLUTIONS = {
    "padding": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1)),
    "groups": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "dilation": lambda: nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), padding=2),
    "same": lambda: nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(1, 2)),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="circular"),
    "reflect same": lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="reflect"),
    "replicate": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, padding_mode="replicate", groups=2),
    "circular valid": lambda: nn.Conv2d(4, 6, 3, padding="valid", padding_mode="circular"),
    "1d": lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2, padding_mode="circular"),
}


def rows_of(layer, h):
    """Rows (n, N) of each group of the input of a layer."""
    if isinstance(layer, nn.Linear):
        return [h.reshape(-1, h.shape[-1])]
    parts = h.flatten(2).chunk(layer.groups, 1)
    return [torch.cat([sample.T for sample in part]) for part in parts]
