"""Optimizers of stacked parameters: each row steps as torch.optim would step it alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_symmetry.metanets.population_settings import PopulationSettings


class StackedOptimizer(Protocol):
    """What both optimizers do."""

    def step(self, weights: Tensor, grad: Tensor, rate: Tensor, decay: Tensor) -> None:
        """Update ``weights`` (K, P) in place; ``grad`` (K, P) is used up, rate and decay are (K, 1)."""

    def keep(self, rows: Tensor) -> None:
        """Keep only some networks."""


class StackedSGD:
    r"""SGD with momentum, as :class:`torch.optim.SGD`, for the rows of a matrix.

    .. math:: g' = g + \lambda_k w, \quad m \leftarrow \mu m + g', \quad w \leftarrow w - \eta_k m

    and with Nesterov's momentum :math:`g' + \mu m` for the last m.

    Args:
        weights: Parameters, shape ``(K, P)``.
        momentum: The momentum.
        nesterov: Whether it is Nesterov's.
    """

    def __init__(self, weights: Tensor, momentum: float, nesterov: bool) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self._average = torch.zeros_like(weights) if momentum > 0 else None

    def step(self, weights: Tensor, grad: Tensor, rate: Tensor, decay: Tensor) -> None:
        """Update the parameters in place.

        Args:
            weights: Parameters, shape ``(K, P)``.
            grad: Gradients, shape ``(K, P)``; they are used up.
            rate: Learning rates, shape ``(K, 1)``.
            decay: Weight decays, shape ``(K, 1)``.
        """
        update = grad.addcmul_(weights, decay)
        if self._average is not None:
            self._average.mul_(self._momentum).add_(update)
            update = update.add_(self._average, alpha=self._momentum) if self._nesterov else self._average
        weights.addcmul_(update, rate, value=-1)

    def keep(self, rows: Tensor) -> None:
        """Keep only some networks.

        Args:
            rows: Their numbers.
        """
        if self._average is not None:
            self._average = self._average[rows]


class StackedAdamW:
    r"""AdamW, as :class:`torch.optim.AdamW`, for the rows of a matrix.

    .. math::
        w \leftarrow (1 - \eta_k \lambda_k) w, \quad
        w \leftarrow w - \frac{\eta_k}{1 - \beta_1^t} \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Args:
        weights: Parameters, shape ``(K, P)``.
        betas: Decay of the averages m and v of the gradient and its square.
        eps: Added to the denominator.
    """

    def __init__(self, weights: Tensor, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps, self._steps = betas, eps, 0
        self._mean, self._square = torch.zeros_like(weights), torch.zeros_like(weights)

    def step(self, weights: Tensor, grad: Tensor, rate: Tensor, decay: Tensor) -> None:
        """Update the parameters in place.

        Args:
            weights: Parameters, shape ``(K, P)``.
            grad: Gradients, shape ``(K, P)``; they are used up.
            rate: Learning rates, shape ``(K, 1)``.
            decay: Weight decays, shape ``(K, 1)``.
        """
        self._steps += 1
        first, second = self._betas
        weights.mul_(1 - rate * decay)
        self._mean.lerp_(grad, 1 - first)
        self._square.mul_(second).addcmul_(grad, grad, value=1 - second)
        scale = (1 - second**self._steps) ** 0.5
        denominator = torch.sqrt(self._square, out=grad).div_(scale).add_(self._eps)
        weights.addcmul_(self._mean / denominator, rate / (1 - first**self._steps), value=-1)

    def keep(self, rows: Tensor) -> None:
        """Keep only some networks.

        Args:
            rows: Their numbers.
        """
        self._mean, self._square = self._mean[rows], self._square[rows]


def stacked_optimizer(settings: PopulationSettings, weights: Tensor) -> StackedOptimizer:
    """Return the optimizer that the settings name.

    Args:
        settings: The settings.
        weights: Parameters, shape ``(K, P)``.

    Returns:
        The optimizer.
    """
    if settings.optimizer == "sgd":
        return StackedSGD(weights, settings.momentum, settings.nesterov)
    return StackedAdamW(weights, settings.betas, settings.eps)
