"""The singular values of random matrices, to compare spectra with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor


def marchenko_pastur_cdf(x: float, ratio: float) -> float:
    r"""Return the Marchenko-Pastur distribution function at x, for the eigenvalues of :math:`W W^\top / M`.

    W is N x M with independent entries of variance 1 and :math:`\gamma = N / M \le 1`. On the support between
    :math:`\lambda_\pm = (1 \pm \sqrt\gamma)^2`, with :math:`\rho = \sqrt{(\lambda_+ - x) / (x - \lambda_-)}`,

    .. math:: F(x) = \frac{1}{2 \pi \gamma} \left( \pi\gamma + \sqrt{(\lambda_+ - x)(x - \lambda_-)}
        - (1 + \gamma) \arctan\frac{\rho^2 - 1}{2\rho}
        + (1 - \gamma) \arctan\frac{\lambda_- \rho^2 - \lambda_+}{2 (1 - \gamma) \rho} \right).

    Args:
        x: Where.
        ratio: :math:`\gamma`, in (0, 1].

    Raises:
        ValueError: If ``ratio`` is not in (0, 1].
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"Expected `ratio` to be in (0, 1] but got {ratio}.")
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    if x <= low or x >= high:
        return float(x >= high)
    rho = math.sqrt((high - x) / (x - low))
    value = math.pi * ratio + math.sqrt((high - x) * (x - low)) - (1 + ratio) * math.atan((rho**2 - 1) / (2 * rho))
    if ratio < 1:
        value += (1 - ratio) * math.atan((low * rho**2 - high) / (2 * (1 - ratio) * rho))
    return min(1.0, max(0.0, value / (2 * math.pi * ratio)))


def marchenko_pastur_quantiles(shape: tuple[int, int], probabilities: Sequence[float] | Tensor, std: float) -> Tensor:
    r"""Return quantiles of the singular values of a large random matrix, in float64.

    A singular value is :math:`\sigma \sqrt{K x}`, with K the longer side and x distributed by
    :func:`marchenko_pastur_cdf`, inverted by Brent's method. What lies beyond the quantile of 1,
    :math:`\sigma (\sqrt N + \sqrt M)`, is no noise.

    Args:
        shape: ``(N, M)``.
        probabilities: Where, in [0, 1].
        std: :math:`\sigma`, the standard deviation of the entries.

    Raises:
        ValueError: If a probability is not in [0, 1], a side not positive or ``std`` negative.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.2 and appendix A.1.
    """
    short, long = sorted(shape)
    if short < 1 or not std >= 0:
        raise ValueError(f"Expected positive sides and a standard deviation but got shape {shape} and std {std}.")
    ratio = short / long
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    quantiles = []
    for probability in np.asarray(probabilities, dtype=float).ravel():
        if not 0 <= probability <= 1:
            raise ValueError(f"Expected `probabilities` to be in [0, 1] but got {probability}.")
        if probability in (0, 1):
            quantiles.append(high if probability else low)
        else:
            # In the root of x: at ratio 1 the density of x has a pole at 0.
            root = brentq(
                lambda s, p=probability: marchenko_pastur_cdf(s * s, ratio) - p, math.sqrt(low), math.sqrt(high)
            )
            quantiles.append(root**2)
    return std * (long * torch.tensor(quantiles, dtype=torch.float64)).sqrt()
