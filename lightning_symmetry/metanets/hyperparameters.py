"""Hyper-parameters of the networks of a zoo."""

from __future__ import annotations

import numpy as np


def sample_hyperparameters(
    n: int,
    seed: int,
    learning_rate: tuple[float, float] = (0.005, 0.5),
    weight_decay: tuple[float, float] = (1e-5, 1e-1),
    label_smoothing: tuple[float, float] = (0.0, 0.2),
    epochs: tuple[int, int] = (10, 40),
) -> dict[str, np.ndarray]:
    r"""Draw the hyper-parameters with which the networks of a zoo are trained.

    By default those of Table 8:

    ==================  ===================================================================================
    learning rate       :math:`.5 \cdot 10^{-\mathrm{Unif}(0, 2)}`, log-uniform over [0.005, 0.5]
    weight decay        :math:`10^{-\mathrm{Unif}(1, 5)}`, log-uniform over [1e-5, 0.1]
    label smoothing     :math:`\mathrm{Unif}(0, .2)`
    epochs              :math:`\mathrm{RandInt}(10, 40)`, uniform over integers including both ends
    ==================  ===================================================================================

    The same seed gives the same values on every machine, and network i has the same for every ``n`` > i.

    Args:
        n: Number of networks.
        seed: Seed.
        learning_rate: Ends of the log-uniform distribution.
        weight_decay: Ends of the log-uniform distribution.
        label_smoothing: Ends of the uniform distribution.
        epochs: Ends of the distribution over integers.

    Returns:
        ``learning_rate``, ``weight_decay`` and ``label_smoothing`` (float64) and ``epochs`` (int64), each of shape
        ``(n,)``.

    Raises:
        ValueError: If ``n`` is negative, an interval is empty, one that is log-uniform does not lie above 0, smoothing
            not within [0, 1], or epochs are below 1.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.1, Table 8.
    """
    if n < 0:
        raise ValueError(f"Expected `n` to be at least 0 but got {n}.")
    least, largest = np.finfo(np.float64).tiny, np.finfo(np.float64).max
    for name, (low, high), bottom, top, where in (
        ("learning_rate", learning_rate, least, largest, "above 0"),
        ("weight_decay", weight_decay, least, largest, "above 0"),
        ("label_smoothing", label_smoothing, 0, 1, "within [0, 1]"),
        ("epochs", epochs, 1, largest, "of at least 1"),
    ):
        if not bottom <= low <= high <= top:
            raise ValueError(f"Expected `{name}` to be an interval (low, high) {where} but got {(low, high)}.")
    # One row a network, so that the first rows do not depend on how many follow.
    uniform = np.random.default_rng(seed).random((n, 4)).T
    return {
        "learning_rate": _log_uniform(uniform[0], *learning_rate),
        "weight_decay": _log_uniform(uniform[1], *weight_decay),
        "label_smoothing": label_smoothing[0] + uniform[2] * (label_smoothing[1] - label_smoothing[0]),
        "epochs": epochs[0] + np.floor(uniform[3] * (epochs[1] - epochs[0] + 1)).astype(np.int64),
    }


def _log_uniform(uniform: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.clip(low * (high / low) ** uniform, low, high)
