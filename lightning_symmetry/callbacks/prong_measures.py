"""What PRONG measures when it reparametrises."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_symmetry.whitening.coefficients import Whitening
from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.reparametrize import largest_eigenvalue
from lightning_symmetry.whitening.statistics import InputStatistics


def damped_condition(whitening: Whitening) -> float:
    r"""Return the condition number of the damped covariance that coefficients come from, the largest of all groups.

    .. math:: \kappa(\Sigma + \epsilon I) = \kappa(U)^2
    """
    roots = whitening.scale
    if whitening.basis is not None:
        directions, size = whitening.basis.shape[-1], whitening.basis.shape[-2]
        inside = roots * (1 - whitening.shrink)
        roots = torch.cat([inside, roots], -1) if directions < size else inside
    return float((roots.amax(-1) / roots.amin(-1)).square().max())


def whitened_eigenvalue(layer: HasWhitening, statistics: InputStatistics, fresh: Whitening) -> float:
    r"""Return the largest eigenvalue of :math:`U \Sigma U` for a layer's present U and fresh samples.

    Args:
        layer: The layer, which still has the coefficients that are to be judged.
        statistics: Statistics of the fresh samples.
        fresh: Coefficients that come from them. Where they are of low rank their eigenvectors and -values give
            :math:`\Sigma = R^\top R`, and :math:`R P R^\top`, which is small, has the same eigenvalues.
    """
    if fresh.basis is None or fresh.basis.shape[-1] >= fresh.basis.shape[-2]:
        return largest_eigenvalue(layer, statistics)
    variances = ((1 - fresh.shrink).pow(-2) - 1) * fresh.scale.pow(-2)
    rows = variances.sqrt().unsqueeze(-1) * fresh.basis.mT
    gram = layer.precondition_rows(rows) @ rows.mT
    return float(torch.linalg.eigvalsh(((gram + gram.mT) / 2).cpu()).max())


def relative_deviation(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return the largest difference between tensors of a name, in units of the largest entry of the first one."""
    ratios = [
        float((after[name] - value).abs().max() / value.abs().max().clamp_min(torch.finfo(value.dtype).tiny))
        for name, value in before.items()
    ]
    return max(ratios, default=0.0)
