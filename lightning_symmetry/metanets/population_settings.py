"""How a population of networks is trained: what all of its networks share, and the rate of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_symmetry.metanets.zoo_factory import imported

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
HYPERPARAMETERS = ("learning_rate", "weight_decay", "label_smoothing", "epochs", "seed")


@dataclass(frozen=True)
class PopulationSettings:
    r"""What all networks of a population share.

    Attributes:
        optimizer: ``"sgd"`` (:class:`torch.optim.SGD`: weight decay is added to the gradient) or ``"adamw"``
            (:class:`torch.optim.AdamW`: weights shrink by themselves).
        momentum: Of SGD.
        nesterov: Of SGD.
        betas: Of AdamW.
        eps: Of AdamW.
        batch_size: Samples of each network in a step. The last batch of an epoch has what is left, as with a
            ``DataLoader(drop_last=False)``.
        warmup: Share :math:`w` of a network's :math:`T` steps over which its rate rises: step :math:`t = 0, 1, \dots`
            is done at the peak rate times :math:`\min(t / (w T), (T - t) / (T - w T))`, so the first step of a warm-up
            changes nothing. 0 begins at the peak.
        augment: Called as ``augment(images, generator)`` with each batch ``(B, *sample)`` of each network and the
            network's own generator, the one that drew its order of samples; or ``"module:function"``.

    Raises:
        ValueError: If a value is out of its range.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.1; the schedule is that of FFCV's
    CIFAR-10 script, which it names.
    """

    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    batch_size: int = 128
    warmup: float = 0.2
    augment: Augmentation | str | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f"Expected `optimizer` to be 'sgd' or 'adamw' but got {self.optimizer!r}.")
        if self.batch_size < 1:
            raise ValueError(f"Expected `batch_size` to be at least 1 but got {self.batch_size}.")
        for name in ("momentum", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Expected `{name}` to lie in [0, 1] but got {getattr(self, name)}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("Expected `momentum` above 0 with `nesterov` but got 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Expected `betas` to be two numbers in [0, 1) but got {self.betas}.")
        if not self.eps >= 0:
            raise ValueError(f"Expected `eps` to be at least 0 but got {self.eps}.")
        object.__setattr__(self, "betas", tuple(self.betas))  # a list, where they were read from JSON

    def augmentation(self) -> Augmentation | None:
        """Return the augmentation as a function, imported where it was named.

        Returns:
            The function, or None.

        Raises:
            ValueError: If it cannot be imported.
        """
        if isinstance(self.augment, str):
            try:
                return imported(self.augment)
            except ValueError as error:
                raise ValueError(
                    f"Expected `augment` to be 'module:function', both importable, but got {self.augment!r}."
                ) from error
        return self.augment


def learning_rate_factor(step: Any, steps: Any, warmup: float) -> Any:
    """Return what the peak rate is multiplied by in a step: up linearly from 0, then down to 0 at the end.

    Args:
        step: Number of steps done before this one; a number or an array.
        steps: Number of all steps of the network; a number or an array.
        warmup: Share of them over which the rate rises.

    Returns:
        The factor, of the shape of the arguments; 0 for steps behind the end.
    """
    step, steps = np.asarray(step, np.float64), np.asarray(steps, np.float64)
    peak = warmup * steps
    rise = np.divide(step, peak, out=np.ones(np.broadcast(step, peak).shape), where=peak > 0)
    fall = np.divide(steps - step, steps - peak, out=np.zeros(rise.shape), where=steps > peak)
    return np.clip(np.where(step < peak, rise, fall), 0.0, 1.0)[()]


def checked_hyperparameters(hyperparameters: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
    """Return the hyper-parameters as arrays of shape ``(count,)``.

    Args:
        hyperparameters: ``learning_rate``, ``weight_decay``, ``label_smoothing``, ``epochs`` and ``seed``; others are
            left out.
        count: Number of networks.

    Returns:
        The first three as float64, the others as int64.

    Raises:
        ValueError: If one is missing, has another shape or a value out of its range.
    """
    if missing := [name for name in HYPERPARAMETERS if name not in hyperparameters]:
        raise ValueError(f"Expected `hyperparameters` to have {', '.join(HYPERPARAMETERS)} but {missing} are missing.")
    checked = {}
    for name in HYPERPARAMETERS:
        given = np.asarray(hyperparameters[name])
        if given.shape != (count,):
            raise ValueError(
                f"Expected `{name}` to have one value for each of {count} networks but got shape {given.shape}."
            )
        whole = name in ("epochs", "seed")
        values = given.astype(np.int64 if whole else np.float64)
        low = 1 if name == "epochs" else 0
        high = 1.0 if name == "label_smoothing" else np.inf
        valid = np.isfinite(given.astype(np.float64)) & (values == given)
        valid &= (values >= low) & (values <= high) | (name == "seed")
        if not valid.all():
            place = int(np.flatnonzero(~valid)[0])
            what = "an integer" if whole else "a finite number"
            bounds = "" if name == "seed" else f" of at least {low}" + (" and at most 1" if high == 1 else "")
            raise ValueError(f"Expected `{name}` to be {what}{bounds} but got {given[place]} for network {place}.")
        checked[name] = values
    return checked
