"""What an optimizer knows of a parameter, for the parameters that take its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DIRECTIONS = ("momentum_buffer",)
"""States that are steps of the parameter up to a factor (SGD, RMSprop)."""

MEANS = ("exp_avg", "grad_avg")
"""States that are means of gradients (Adam and its kin, centred RMSprop)."""

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""States that are means or sums of squared gradients, entry by entry (Adam and its kin, RMSprop, Adagrad)."""


class MomentMap(Protocol):
    """How what is known of one parameter becomes that of several; each method returns one tensor for each of them.

    It is called with float64 tensors on the CPU; results are brought to the type and device of the state.
    """

    def direction(self, direction: Tensor) -> Sequence[Tensor]:
        """Map a step of the parameter."""

    def gradient(self, gradient: Tensor) -> Sequence[Tensor]:
        """Map a gradient."""

    def squares(self, squares: Tensor, mean: Tensor | None) -> Sequence[Tensor]:
        """Map the second moment of a gradient, given its mean if that is known."""


class UnknownStateError(ValueError):
    """A state of an optimizer for which no rule is known."""


@torch.no_grad()
def carried_states(
    optimizer: Optimizer, group: Mapping[str, Any], old: nn.Parameter, new: Sequence[nn.Parameter], moments: MomentMap
) -> list[dict[str, Any]]:
    r"""Return the states of new parameters that carry on those of an old one.

    Directions, means and second moments are mapped; numbers of steps and other scalars are copied, each parameter
    getting tensors of its own, on the same device, so that ``fused``, ``foreach`` and ``capturable`` go on. Adam's
    means :math:`m_t, s_t` are biased towards zero, by :math:`1 - \beta_1^t` and :math:`1 - \beta_2^t`: second moments
    are mapped with the bias taken out, and get it back.

    Args:
        optimizer: The optimizer.
        group: The parameter's group.
        old: The old parameter.
        new: The new parameters.
        moments: How moments become those of the new parameters.

    Raises:
        UnknownStateError: If there is a state of the parameter's shape that has no rule.
    """
    state = optimizer.state.get(old, {})
    result: list[dict[str, Any]] = [{} for _ in new]
    for key, value in state.items():
        values: Sequence[Any]
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != old.shape:
            values = [value.clone() if isinstance(value, Tensor) else value for _ in new]
        elif key in DIRECTIONS:
            values = moments.direction(_exact(value))
        elif key in MEANS:
            values = moments.gradient(_exact(value))
        elif key in SQUARES:
            mean, correction = _mean_and_correction(group, state)
            values = [part * correction for part in moments.squares(_exact(value) / correction, mean)]
        else:
            raise UnknownStateError(
                f"{type(optimizer).__name__} keeps {key!r} of each entry of a weight, which has no known form for its "
                "factors: use moments='reset'."
            )
        for one, parameter, part in zip(result, new, values, strict=True):
            one[key] = _like(part, value, parameter) if isinstance(value, Tensor) else part
    return result


def fresh_states(optimizer: Optimizer, group: Mapping[str, Any], new: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the states of parameters that the optimizer has not seen; empty where it makes them at the first step.

    Args:
        optimizer: The optimizer.
        group: The group that they are in.
        new: The parameters.
    """
    if not isinstance(optimizer, torch.optim.Adagrad):
        return [{} for _ in new]
    settings = {key: value for key, value in group.items() if key in optimizer.defaults}
    made = torch.optim.Adagrad([{**settings, "params": list(new)}])  # it makes them when it is built
    return [dict(made.state[parameter]) for parameter in new]


def _mean_and_correction(group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Tensor | None, float]:
    """Return the mean of the gradient and the bias of the second moment, as far as they are known."""
    step, betas = float(state.get("step", 0)), group.get("betas")
    if "exp_avg" in state and betas is not None and step > 0:
        beta1, beta2 = (float(beta) for beta in betas)
        return _exact(state["exp_avg"]) / (1 - beta1**step), 1 - beta2**step
    mean = state.get("grad_avg")
    return None if mean is None else _exact(mean), 1.0


def _exact(value: Tensor) -> Tensor:
    return value.to("cpu", torch.float64)


def _like(part: Tensor, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a state in the type and on the device of the old one, laid out as the parameter is."""
    part = part.to(value.device, value.dtype)
    if part.shape != parameter.shape:
        return part.clone()
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(part)
