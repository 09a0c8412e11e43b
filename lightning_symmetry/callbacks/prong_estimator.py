"""How PRONG turns statistics into coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_symmetry.callbacks.prong_measures import damped_condition, whitened_eigenvalue
from lightning_symmetry.whitening.coefficients import Whitening, WhiteningError
from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.statistics import InputStatistics
from lightning_symmetry.whitening.units import Units


class Estimator:
    """Sets the coefficients of whitened layers from statistics, or from a moving average of them.

    Args:
        eps: Damping.
        relative: Whether that is in units of each layer's mean variance.
        ema: Weight of the past in a moving average; None: there is none.
        unit_rows: Rows of a batch for the running variances of PRONG+; None: units are not rescaled.
    """

    def __init__(self, eps: float, relative: bool, ema: float | None, unit_rows: int | None = None) -> None:
        self.eps, self.relative, self.ema, self.unit_rows = eps, relative, ema, unit_rows
        self._average: dict[str, InputStatistics] = {}

    def update(
        self, layers: Mapping[str, HasWhitening], statistics: Mapping[str, InputStatistics], measure: bool
    ) -> tuple[dict[str, str], dict[str, float]]:
        """Set new coefficients.

        Args:
            layers: The whitened layers.
            statistics: Statistics of fresh samples by the layer's name.
            measure: Whether to measure.

        Returns:
            The layers that keep the coefficients that they have, with the reasons, and what was measured.
        """
        failed = {name: "it was not called" for name in layers if name not in statistics}
        conditions, eigenvalues = [], []
        for name, seen in statistics.items():
            try:
                fresh = self._whitening(seen)
                if measure and fresh.mode != "center":
                    conditions.append(damped_condition(fresh))
                    eigenvalues.append(whitened_eigenvalue(layers[name], seen, fresh))
                if self.ema is not None:
                    seen = self._averaged(name, seen)
                    fresh = self._whitening(seen)
                units = None if self.unit_rows is None else Units.of(fresh, seen, self.unit_rows)
                layers[name].set_whitening(fresh, units)
            except WhiteningError as error:
                failed[name] = str(error)
        if not conditions:
            return failed, {}
        return failed, {"condition": fmean(conditions), "largest_eigenvalue": max(eigenvalues)}

    def _averaged(self, name: str, seen: InputStatistics) -> InputStatistics:
        """Return the moving average, after what was seen has gone into it."""
        if name in self._average:
            self._average[name].discount(self.ema)
            self._average[name].merge(seen)
        else:
            self._average[name] = seen
        return self._average[name]

    def _whitening(self, statistics: InputStatistics) -> Whitening:
        return statistics.whitening(self.eps, relative=self.relative)

    def state_dict(self) -> dict[str, Any]:
        """Return the moving average."""
        return {name: tree_map(on_cpu, one.state_dict()) for name, one in self._average.items()}

    def load_state_dict(self, state: Mapping[str, Any], layers: Mapping[str, HasWhitening]) -> None:
        """Take back what :meth:`state_dict` returned, for the same layers."""
        for name, values in state.items():
            self._average[name] = layers[name].statistics()
            self._average[name].load_state_dict(values)


def on_cpu(value: Any) -> Any:
    """Bring a tensor to the CPU."""
    return value.detach().cpu() if isinstance(value, Tensor) else value
