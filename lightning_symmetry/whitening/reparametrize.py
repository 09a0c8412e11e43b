"""New whitening coefficients for a whole network, and their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.whitening.coefficients import WhiteningError
from lightning_symmetry.whitening.collect import whitened_layers
from lightning_symmetry.whitening.layer import HasWhitening, State
from lightning_symmetry.whitening.statistics import InputStatistics
from lightning_symmetry.whitening.units import Units


def reparametrize(
    net: nn.Module,
    statistics: Mapping[str, InputStatistics],
    eps: float,
    *,
    relative: bool = False,
    unit_rows: int | None = None,
) -> dict[str, str]:
    r"""Give each layer that there are statistics of new coefficients; the function stays what it is.

    .. math:: c = \mu, \quad U = (\Sigma + \epsilon I)^{-1/2}, \quad V = W U^{-1}, \quad d = b + W c

    Args:
        net: A network with whitened layers.
        statistics: Statistics by the layer's name, from
            :func:`~lightning_symmetry.whitening.collect.collect_statistics`.
        eps: Damping, which bounds the multiplier of the learning rate at ``1 / eps``: of an input direction that the
            samples do not show, 1 / eps is what it gets.
        relative: Whether ``eps`` is in units of each layer's mean variance, which gives layers very different bounds.
        unit_rows: PRONG+: from now on watch so many rows of each training batch, for :func:`rescale_units` to be called
            after each optimizer step. None: no units are rescaled.

    Returns:
        The layers that keep their old coefficients, by name, each with the reason: too few samples, values that are not
        finite, a decomposition that failed.

    Raises:
        ValueError: If ``eps`` is not positive and finite, a name is not that of a whitened layer, or units of explicit
            parameters are to be rescaled.

    Source: Natural Neural Networks (2015), Algorithm 1, lines 5 to 10.
    """
    if not eps > 0 or not math.isfinite(eps):
        raise ValueError(f"Expected `eps` to be positive and finite but got {eps}.")
    layers = _named(net, statistics)
    failed = {}
    for name, layer in layers.items():
        try:
            fresh = statistics[name].whitening(eps, relative=relative)
            units = None if unit_rows is None else Units.of(fresh, statistics[name], unit_rows)
            layer.set_whitening(fresh, units)
        except WhiteningError as error:
            failed[name] = str(error)
    return failed


@torch.no_grad()
def rescale_units(
    net: nn.Module, momentum: float = 0.9, reduce: Callable[[Tensor], Tensor] = lambda sums: sums
) -> None:
    r"""Rescale whitened units by their running standard deviations; the function stays what it is (PRONG+).

    .. math:: U' = D U, \quad V' = V D^{-1}, \quad D_{jj} = v_j^{-1/2}, \qquad\text{so that}\qquad P' = U D^2 U

    with the variances v of :class:`~lightning_symmetry.whitening.units.Units`, from what training forward passes have
    shown since the last call: those in training mode and with gradients. Call it after each optimizer step, once for
    all the batches that are accumulated in it. Momentum on the canonical gradients needs no transport here either.

    Args:
        net: A network with whitened layers, reparametrised with ``unit_rows``.
        momentum: Weight of the past in the running average, for each step.
        reduce: Returns the sum of a flat tensor over all processes, once for all layers. Default: there is one.

    Source: Natural Neural Networks (2015), section 3.
    """
    layers = [layer for layer in whitened_layers(net).values() if layer.units is not None]
    if not layers:
        return
    reduced = reduce(torch.cat([layer.units.sums for layer in layers]))
    for layer, sums in zip(layers, reduced.split([layer.units.sums.numel() for layer in layers]), strict=True):
        layer.rescale_units(sums.to(layer.units.sums), momentum)


def whitening_state(net: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the coefficients of all whitened layers, and V and d of explicit ones, so that resuming is exact.

    Where units are rescaled their running variances belong to it, in a table ``"units"`` of the layer's.
    """
    return {name: layer.whitening_state() for name, layer in whitened_layers(net).items()}


def load_whitening_state(net: nn.Module, state: Mapping[str, State]) -> None:
    """Take back what :func:`whitening_state` returned. Load the ``state_dict`` of the network before, not after.

    Raises:
        ValueError: If a name is not that of a whitened layer.
    """
    for name, layer in _named(net, state).items():
        layer.load_whitening_state(state[name])


@torch.no_grad()
def largest_eigenvalue(layer: HasWhitening, statistics: InputStatistics, steps: int = 50) -> float:
    r"""Return the largest eigenvalue of the whitened covariance, the most of all groups.

    .. math:: \lambda_{\max}(U \Sigma U) = \lambda_{\max}(\Sigma P)

    It is at most 1 right after a reparametrisation with the same statistics, and says on fresh samples how far the
    coefficients are off. By power iteration in float64, which comes from below.

    Args:
        layer: A whitened layer.
        statistics: Statistics of its input, in the mode ``"full"`` or ``"diagonal"`` (the variances alone then count).
        steps: Number of iterations.

    Raises:
        ValueError: If the statistics hold no variances.
    """
    _, covariance = statistics.moments()
    if covariance is None:
        raise ValueError("Statistics of the mode 'center' hold no variances.")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(layer.groups, 1, statistics.size, generator=generator, dtype=torch.float64)
    rows, value = rows.to(covariance.device), covariance.new_zeros(layer.groups, 1, 1)
    for _ in range(steps):
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        rows = layer.precondition_rows(rows)
        rows = rows * covariance.unsqueeze(1) if covariance.ndim == 2 else rows @ covariance
        value = rows.norm(dim=-1)
    return float(value.max())


def _named(net: nn.Module, table: Mapping[str, object]) -> dict[str, HasWhitening]:
    layers = whitened_layers(net)
    if unknown := [name for name in table if name not in layers]:
        raise ValueError(f"{type(net).__name__} has no whitened layer called {unknown[0]!r}.")
    return {name: layers[name] for name in table}
