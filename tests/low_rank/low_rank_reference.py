"""What low-rank layers should do, written down directly in float64."""

from __future__ import annotations

import numpy as np
import torch


def best_error(matrix, rank):
    """Return the least Frobenius error of a rank, the norm of the singular values beyond it (Eckart-Young)."""
    values = np.linalg.svd(np.asarray(matrix.detach().double()), compute_uv=False)
    return float(np.sqrt((values[rank:] ** 2).sum()))


def kernel_matrices(weight, groups, scheme):
    """Return the matrix of each group of a kernel, entry by entry."""
    weight = weight.detach().double()
    outputs, inputs, *kernel = weight.shape
    size = outputs // groups
    matrices = []
    for group in range(groups):
        part = weight[group * size : (group + 1) * size]
        if scheme == "kxk-1x1":
            matrices.append(part.reshape(size, -1))
            continue
        high, wide = kernel
        matrix = torch.zeros(size * high, inputs * wide, dtype=torch.float64)
        for n in range(size):
            for c in range(inputs):
                for i in range(high):
                    for j in range(wide):
                        matrix[n * high + i, c * wide + j] = part[n, c, i, j]
        matrices.append(matrix)
    return matrices


def random_factors(layer, seed=0, scale=0.5):
    """Give a layer factors and a bias of no structure, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return layer
