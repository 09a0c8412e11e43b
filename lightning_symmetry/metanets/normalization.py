"""Standardisation of what a metanetwork reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_CHUNK = 2**24  # entries that are held in float64 at a time


class Normalization(nn.Module):
    r"""Standardise columns by the statistics of their group.

    Column j of group g is mapped by :math:`x_j \mapsto (x_j - \mu_g) / \sigma_g` with the mean and the standard
    deviation over all samples and all columns of the group, by whatever :meth:`fit` has seen; before, by nothing. Where
    a group does not vary, :math:`\sigma_g = 1`.

    Args:
        group_of: Number of the group of each column, int64 of shape ``(F,)``.
    """

    def __init__(self, group_of: Tensor) -> None:
        super().__init__()
        groups = int(group_of.max()) + 1
        self.register_buffer("group_of", group_of, persistent=False)
        self.register_buffer("mean", torch.zeros(groups))
        self.register_buffer("std", torch.ones(groups))

    @torch.no_grad()
    def fit(self, weights: Tensor, features: Callable[[Tensor], Tensor]) -> None:
        """Take the statistics of samples, by chunks and in float64.

        Args:
            weights: Rows of weights, shape ``(N, P)``, on any device.
            features: Maps rows of weights to the ``(n, F)`` columns.

        Raises:
            ValueError: If there is no sample, or a column is not finite: leave out networks that diverged.
        """
        if len(weights) == 0:
            raise ValueError("Expected the weights of at least one network but got none.")
        group_of = self.group_of
        columns = torch.bincount(group_of, minlength=len(self.mean)).double()
        size = max(1, _CHUNK // weights.shape[1])

        def mean_of(function: Callable[[Tensor], Tensor]) -> Tensor:
            """Average over samples and the columns of each group."""
            total = torch.zeros(len(group_of), dtype=torch.float64, device=group_of.device)
            for chunk in weights.split(size):
                total += function(features(chunk.to(group_of.device)).double()).sum(0)
            return torch.zeros_like(columns).index_add_(0, group_of, total) / (columns * len(weights))

        mean = mean_of(lambda values: values)
        if not bool(mean.isfinite().all()):
            raise ValueError("The weights are not all finite: leave out the networks that diverged.")
        variance = mean_of(lambda values: (values - mean[group_of]).square())
        std = variance.sqrt()
        # A group that does not vary but for rounding, such as constants, would only show the rounding.
        std[std <= 1e-6 * mean.abs()] = 1.0
        self.mean.copy_(mean)
        self.std.copy_(std)

    def forward(self, columns: Tensor) -> Tensor:
        """Standardise ``(B, F)`` columns."""
        return (columns - self.mean[self.group_of]) / self.std[self.group_of]
