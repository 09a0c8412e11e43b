"""Standardisation of what a metanetwork reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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

    Attributes:
        fitted: Whether :meth:`fit` has seen anything, a boolean buffer that is saved with the statistics.
    """

    def __init__(self, group_of: Tensor) -> None:
        super().__init__()
        groups = int(group_of.max()) + 1
        self.register_buffer("group_of", group_of, persistent=False)
        self.register_buffer("mean", torch.zeros(groups))
        self.register_buffer("std", torch.ones(groups))
        self.register_buffer("fitted", torch.tensor(False))

    @torch.no_grad()
    def fit(self, weights: Tensor | Iterable[Tensor], features: Callable[[Tensor], Tensor]) -> None:
        """Take the statistics of samples in one pass, by chunks and in float64.

        Args:
            weights: Rows of weights, shape ``(N, P)``, on any device; or batches of them, which are read once.
            features: Maps rows of weights to the ``(n, F)`` columns.

        Raises:
            ValueError: If there is no sample, or a column is not finite: leave out networks that diverged.
        """
        group_of = self.group_of
        columns = torch.bincount(group_of, minlength=len(self.mean)).double()
        mean, squares, count = torch.zeros_like(columns), torch.zeros_like(columns), 0

        def by_group(values: Tensor) -> Tensor:
            return torch.zeros_like(columns).index_add_(0, group_of, values.sum(0))

        for batch in [weights] if isinstance(weights, Tensor) else weights:
            for chunk in batch.split(max(1, _CHUNK // batch.shape[1])) if len(batch) else ():
                values = features(chunk.to(group_of.device)).double()
                # Chan, Golub and LeVeque's update: sums of squares about a running mean do not cancel.
                own = by_group(values) / (columns * len(chunk))
                shift, share = own - mean, len(chunk) / (count + len(chunk))
                squares += by_group((values - own[group_of]).square()) + shift.square() * columns * (count * share)
                mean += shift * share
                count += len(chunk)
        if count == 0:
            raise ValueError("Expected the weights of at least one network but got none.")
        if not bool(mean.isfinite().all()):
            raise ValueError("The weights are not all finite: leave out the networks that diverged.")
        std = (squares / (columns * count)).sqrt()
        # A group that does not vary but for rounding, such as constants, would only show the rounding.
        std[std <= 1e-6 * mean.abs() + torch.finfo(self.std.dtype).tiny] = 1.0
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.fitted.fill_(True)

    def forward(self, columns: Tensor) -> Tensor:
        """Standardise ``(B, F)`` columns."""
        return (columns - self.mean[self.group_of]) / self.std[self.group_of]
