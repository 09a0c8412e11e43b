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
"""States that are means of gradients (Adam and its kin, centred RMSprop); Muon's ``momentum_buffer`` is one too."""

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""States that are means or sums of squared gradients, entry by entry (Adam and its kin, RMSprop, Adagrad)."""

SIZES = ("exp_inf",)
"""States that are sizes of gradients, entry by entry: their squares are mapped as second moments (Adamax)."""

AVERAGES = ("ax",)
"""States that are averages of the parameter itself (ASGD)."""

FACTORED = ("row_var", "col_var")
"""Means of squared gradients over the last axis and over the one before it (Adafactor)."""

WITHOUT_RULE: dict[type[Optimizer], str] = {torch.optim.Adadelta: "acc_delta", torch.optim.Rprop: "step_size"}
"""Optimizers of which a state has no known form for other parameters: what it is of, are steps entry by entry."""


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
    are mapped with the bias taken out, and get it back. Of an average of the parameter it is the distance from the
    parameter that is mapped, as a step, to first order. Adafactor's second moments are mapped as the matrix
    :math:`s_{ij} = r_i c_j / \bar r` that it takes them for, and become rows and columns again.

    Args:
        optimizer: The optimizer.
        group: The parameter's group.
        old: The old parameter.
        new: The new parameters.
        moments: How moments become those of the new parameters.

    Raises:
        UnknownStateError: If there is a state that has no rule.
    """
    if (unknown := state_without_rule(optimizer, old)) is not None:
        raise UnknownStateError(
            f"{type(optimizer).__name__} keeps {unknown!r} of each entry of a weight, which has no known form for its "
            "factors: use moments='reset'."
        )
    state = optimizer.state.get(old, {})
    result: list[dict[str, Any]] = [{} for _ in new]
    for key, value in state.items():
        if key in FACTORED:
            values = [_reduced(key, part) for part in moments.squares(_outer(state), None)]
        elif not isinstance(value, Tensor) or value.numel() == 1:
            values = [value.clone() if isinstance(value, Tensor) else value for _ in new]
        else:
            values = _mapped(_kind(optimizer, key), group, state, key, old, new, moments)
        for one, parameter, part in zip(result, new, values, strict=True):
            one[key] = _like(part, value, parameter) if isinstance(value, Tensor) else part
    return result


def state_without_rule(optimizer: Optimizer, parameter: nn.Parameter) -> str | None:
    """Return the name of a state of a parameter that cannot be carried on to others; None if there is none.

    Args:
        optimizer: The optimizer; of those :data:`WITHOUT_RULE` it is known before they have states.
        parameter: The parameter, which the optimizer holds.
    """
    for kind, key in WITHOUT_RULE.items():
        if isinstance(optimizer, kind):
            return key
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.numel() > 1:
            if key not in FACTORED and (_kind(optimizer, key) is None or value.shape != parameter.shape):
                return key
        elif not (value is None or isinstance(value, Tensor | bool | int | float | str)):
            return key
    return None


def _kind(optimizer: Optimizer, key: str) -> tuple[str, ...] | None:
    """Return which kind of state it is; None if it is not known."""
    if key == "momentum_buffer" and any(base.__name__ == "Muon" for base in type(optimizer).__mro__):
        return MEANS  # its step is the nearest orthogonal matrix, whatever the scale
    return next((kind for kind in (DIRECTIONS, MEANS, SQUARES, SIZES, AVERAGES) if key in kind), None)


def _mapped(
    kind: tuple[str, ...] | None,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    key: str,
    old: nn.Parameter,
    new: Sequence[nn.Parameter],
    moments: MomentMap,
) -> Sequence[Tensor]:
    """Return a state of the old parameter's shape for each of the new ones."""
    value = _exact(state[key])
    if kind is DIRECTIONS:
        return moments.direction(value)
    if kind is MEANS:
        return moments.gradient(value)
    if kind is AVERAGES:
        apart = moments.direction(value - _exact(old.detach()))
        return [_exact(parameter.detach()) + part for parameter, part in zip(new, apart, strict=True)]
    mean, correction = _mean_and_correction(group, state)
    if kind is SIZES:  # a largest value has no bias
        return [part.sqrt() for part in moments.squares(value.square(), mean)]
    return [part * correction for part in moments.squares(value / correction, mean)]


def _outer(state: Mapping[str, Any]) -> Tensor:
    """Return Adafactor's second moments as it computes them."""
    rows, columns = (_exact(state[key]) for key in FACTORED)
    return rows @ columns / rows.mean(-2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


def _reduced(key: str, squares: Tensor) -> Tensor:
    return squares.mean(-1 if key == "row_var" else -2, keepdim=True)


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
