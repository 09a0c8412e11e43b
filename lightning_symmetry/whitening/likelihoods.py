"""Predictive distributions of a network: what its outputs mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

LikelihoodName = Literal["categorical", "mse", "bernoulli", "bernoulli_logits"]


@dataclass(frozen=True)
class Likelihood:
    """A predictive distribution whose negative log-likelihood is ``scale * loss(natural(output), target)``.

    In its natural parameters, the Hessian of each of these losses does not depend on the target: the generalised
    Gauss-Newton matrix is the Fisher matrix, whatever targets it is given.

    Attributes:
        loss: The loss, summed over the samples.
        scale: What it is multiplied with.
        natural: Maps outputs to natural parameters; classes stay on axis 1.
        target: Returns targets that the loss takes, of whatever value.
        excess: Outputs of each prediction that are redundant: one logit of a softmax.
    """

    loss: nn.Module
    scale: float
    natural: Callable[[Tensor], Tensor]
    target: Callable[[Tensor], Tensor]
    excess: int = 0

    def rank_bound(self, natural: Tensor, samples: int | None) -> int:
        """Return what the rank of the Fisher matrix cannot exceed, given the natural parameters of a batch."""
        excess = self.excess * natural[:, :1].numel()
        bound = natural.numel() - excess
        if samples is None:
            return bound
        # One gradient a sample and prediction: curvlinops takes each position of an output for a prediction.
        predictions = natural.numel() // natural.shape[1 if self.excess else -1]
        return min(bound, samples * predictions)


def likelihood_of(name: str) -> Likelihood:
    """Return a predictive distribution by its name.

    Raises:
        ValueError: If there is none.
    """
    if name == "categorical":
        return Likelihood(nn.CrossEntropyLoss(reduction="sum"), 1.0, _logits, _classes, excess=1)
    if name == "mse":
        return Likelihood(nn.MSELoss(reduction="sum"), 0.5, _with_axis, torch.zeros_like)
    if name in ("bernoulli", "bernoulli_logits"):
        natural = _log_odds if name == "bernoulli" else _with_axis
        return Likelihood(nn.BCEWithLogitsLoss(reduction="sum"), 1.0, natural, torch.zeros_like)
    raise ValueError(f"Expected `likelihood` to be one of {get_args(LikelihoodName)} but got {name!r}.")


def check_outputs(output: Tensor, name: str) -> None:
    """Check that a network's outputs can be what the likelihood takes them for.

    Raises:
        ValueError: If they cannot, or are not finite.
    """
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim == 0 or len(output) == 0:
        what = f"{output.dtype} of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"Expected the network to return real values, samples first, but got {what}.")
    if not bool(torch.isfinite(output).all()):
        raise ValueError("The network's outputs on the batch are not finite.")
    if name == "categorical" and (output.ndim < 2 or output.shape[1] < 2):
        raise ValueError(
            f"likelihood='categorical' takes logits (N, classes, ...) but the network returns {tuple(output.shape)}; "
            "for a single logit take 'bernoulli_logits'."
        )
    if name == "bernoulli" and not bool(((output >= 0) & (output <= 1)).all()):
        raise ValueError(
            "likelihood='bernoulli' takes probabilities, as a sigmoid gives, but the network returns values from "
            f"{output.min():.3g} to {output.max():.3g}; for logits take 'bernoulli_logits'."
        )


def _with_axis(output: Tensor) -> Tensor:
    return output.unsqueeze(1) if output.ndim == 1 else output


def _logits(output: Tensor) -> Tensor:
    return output


def _log_odds(output: Tensor) -> Tensor:
    # Within a rounding error of 0 or 1 the outcome counts as certain: no derivative, in place of 0 times infinity.
    return torch.logit(_with_axis(output), eps=torch.finfo(output.dtype).eps)


def _classes(natural: Tensor) -> Tensor:
    return natural.new_zeros((natural.shape[0], *natural.shape[2:]), dtype=torch.long)
