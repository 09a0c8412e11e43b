"""Learning-rate schedules of the papers."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup(
    optimizer: Optimizer, steps: int, start: float = 0.0, shape: Literal["linear", "exponential"] = "linear"
) -> LambdaLR:
    """Return a schedule that rises to the optimizer's learning rate and stays there.

    Args:
        optimizer: The optimizer, with its peak learning rate.
        steps: Number of scheduler steps (epochs or optimizer steps) until the peak.
        start: First learning rate as a fraction of the peak. ``"exponential"`` needs more than 0: from 1e-4 to 1e-2
            in 20 epochs is ``warmup(optimizer, 20, 0.01, "exponential")``, a factor of 1.259 an epoch.
        shape: ``"linear"`` or ``"exponential"``.

    Raises:
        ValueError: If the shape is unknown, ``steps < 1``, or the start does not lie between 0 and 1.
    """
    if steps < 1:
        raise ValueError(f"Expected `steps` to be at least 1 but got {steps}.")
    if shape not in ("linear", "exponential"):
        raise ValueError(f"Expected `shape` to be 'linear' or 'exponential' but got {shape!r}.")
    if not 0 <= start <= 1 or (shape == "exponential" and start == 0):
        raise ValueError(f"Expected `start` to lie between 0 and 1 (exponential: above 0) but got {start}.")
    return LambdaLR(optimizer, partial(_factor, steps=steps, start=start, shape=shape))


def _factor(step: int, steps: int, start: float, shape: str) -> float:
    done = min(1.0, step / steps)
    return start + (1 - start) * done if shape == "linear" else start ** (1 - done)
