"""The evidence lower bound for a sample, and the weight of the divergence in it."""

from __future__ import annotations

import math

from torch import Tensor


def negative_elbo(nll: Tensor, kl: Tensor, num_data: int, kl_weight: float = 1.0) -> Tensor:
    r"""Return the negative evidence lower bound for one sample of the training set.

    .. math:: -\frac{\mathrm{ELBO}}{N} = \frac1B \sum_{i=1}^B -\ln p(y_i \mid x_i, w) + \frac{\lambda}{N}
        \mathrm{KL}(q \,\|\, \text{prior})

    The divergence is divided by the number N of samples of the whole training set, not by the batch's B: N times this
    is an unbiased estimate of the negative bound for every batch size.

    Args:
        nll: Mean negative log-likelihood of the samples of a batch, in nats.
        kl: The divergence, summed over all entries, in nats.
        num_data: N.
        kl_weight: :math:`\lambda`: below 1 a cold posterior, or one of augmented data. An augmentation that is counted
            as m times the data is 1/m: it is a temperature, not the posterior of N samples.

    Returns:
        The bound in the type of ``nll``.

    Raises:
        ValueError: If N is not positive, the weight negative or not finite, or one of the two is no scalar.
    """
    if isinstance(num_data, bool) or not num_data >= 1 or not math.isfinite(num_data):
        raise ValueError(
            f"Expected `num_data` to be the number of samples of the training set but got {num_data!r}. An iterable "
            "data set does not know it: give it."
        )
    if not 0 <= kl_weight < math.inf:
        raise ValueError(f"Expected `kl_weight` to be at least 0 and finite but got {kl_weight!r}.")
    for name, value in (("nll", nll), ("kl", kl)):
        if value.numel() != 1:
            raise ValueError(f"Expected `{name}` to be a scalar but got shape {tuple(value.shape)}.")
    return nll + (kl * (kl_weight / num_data)).to(nll.dtype)


def kl_warmup(step: int, num_steps: int, temperature: float = 1.0) -> float:
    r"""Return the weight of the divergence in a step of a linear warm-up, :math:`T \min(1, (t + 1) / n)`.

    Args:
        step: Number t of steps that were made.
        num_steps: Number n of steps of the warm-up; 0: none.
        temperature: Weight T after it.

    Raises:
        ValueError: If an argument is negative.
    """
    if step < 0 or num_steps < 0 or not temperature >= 0:
        raise ValueError(
            f"Expected `step`, `num_steps` and `temperature` of at least 0 but got {step}, {num_steps}, {temperature}."
        )
    return temperature * min(1.0, (step + 1) / num_steps) if num_steps else temperature
