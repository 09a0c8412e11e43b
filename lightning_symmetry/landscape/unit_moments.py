"""Mean and standard deviation of each unit of a layer over data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn


class UnitMoments:
    r"""Mean and variance of each unit of one layer, in float64, gathered over batches.

    Sums of squared deviations of two parts are merged as

    .. math:: M = M_1 + M_2 + (\bar x_2 - \bar x_1)^2 \frac{n_1 n_2}{n_1 + n_2}

    which loses nothing to cancellation where the mean is large.

    Attributes:
        count: Values that each unit had: samples times positions (of an image, of a sequence).
        calls: Calls of the layer.
        batches: Batches in which the layer was listened to.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
    """

    def __init__(self) -> None:
        self.count = self.calls = self.batches = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._eps = 0.0

    def update(self, output: Tensor, axis: int) -> None:
        """Add values of any shape whose units are along ``axis``."""
        self.calls += 1
        self._eps = max(self._eps, torch.finfo(output.dtype).eps)
        if output.device.type == "mps":  # which has no float64
            output = output.cpu()
        values = output.detach().double().movedim(axis, 0).flatten(1) if output.ndim > 1 else output.double()[:, None]
        count = values.shape[1]
        if count == 0:
            return
        variance, mean = torch.var_mean(values, dim=1, correction=0)
        total = self.count + count
        step = mean - self._mean
        self._squares = self._squares + variance * count + step.square() * (self.count * count / total)
        self._mean = self._mean + step * (count / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        """Mean of each unit."""
        return self._mean

    @property
    def std(self) -> Tensor:
        """Standard deviation of each unit, without Bessel's correction."""
        return (self._squares / self.count).sqrt()

    def correction(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return scale and shift that bring the units to a mean and a standard deviation.

        .. math:: s = \sigma_\mathrm{target} / \sigma, \quad t = \mu_\mathrm{target} - s \mu

        A unit that is constant but for rounding, of its values or of weights that cancelled, is only shifted. One
        whose statistics are not finite is left alone.
        """
        rounding = 4 * self._eps * (self.mean.abs() + self.std + std)
        constant = self.std <= rounding
        scale = torch.where(constant, 1.0, std / torch.where(constant, 1.0, self.std))
        shift = mean - scale * self.mean
        finite = torch.isfinite(scale) & torch.isfinite(shift)
        return torch.where(finite, scale, 1.0), torch.where(finite, shift, 0.0)


class _Enough(BaseException):
    """Ends a forward pass; no error, so that a step which catches errors lets it through."""


def measure(
    net: nn.Module,
    axes: Mapping[str, int],
    moments: Mapping[str, UnitMoments],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    stop: bool = False,
) -> None:
    """Run batches and add what the layers give to their moments.

    Args:
        net: The network that ``run`` calls.
        axes: Axis of the units by the name of the layer.
        moments: Moments to update by the name of the layer.
        batches: Batches.
        run: Calls the network on one of them.
        stop: Whether a batch ends as soon as the first layer has been called.
    """

    def listen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            moments[name].update(output, axes[name])
            if stop:
                raise _Enough

        return hook

    handles = []
    try:
        handles += [net.get_submodule(name).register_forward_hook(listen(name)) for name in axes]
        for batch in batches:
            for name in axes:
                moments[name].batches += 1
            with torch.no_grad(), suppress(_Enough):
                run(batch)
    finally:
        for handle in handles:
            handle.remove()
