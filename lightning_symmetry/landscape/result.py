"""The loss and the metrics along a segment."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_symmetry.landscape import measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class PathResult:
    """The loss and the metrics along a segment.

    Attributes:
        alphas: Positions, ascending, float64, of shape ``(n,)``.
        loss: Mean loss over all samples at each position, float64.
        metrics: The same for each metric.
        num_samples: Samples over which means were taken.
    """

    alphas: Tensor
    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    num_samples: int = 0

    @cached_property
    def midpoint_barrier(self) -> float:
        """Loss at the middle above the mean of the end points' (Table 1); NaN where the middle is no point."""
        if not bool(((self.alphas - 0.5).abs() < 1e-9).any()):
            return float("nan")
        return measures.midpoint_barrier(self.alphas, self.loss)

    @cached_property
    def max_barrier(self) -> float:
        """Largest height of the loss above the chord between the end points."""
        return measures.max_barrier(self.alphas, self.loss)

    @cached_property
    def max_increase(self) -> float:
        """Largest increase of the loss from one position to the next (Delta of section 5.4)."""
        return measures.max_increase(self.loss)

    @property
    def is_monotonic(self) -> bool:
        """Whether the loss never increases: monotonic linear interpolation."""
        return self.max_increase <= 0

    @cached_property
    def local_convexity(self) -> float:
        """Share of inner positions with a non-negative second difference."""
        return measures.local_convexity(self.alphas, self.loss)

    @cached_property
    def global_convexity(self) -> float:
        """Share of inner positions where the loss is not above the chord between the end points."""
        return measures.global_convexity(self.alphas, self.loss)

    def summary(self) -> dict[str, float]:
        """Return the measures by name."""
        return {
            "midpoint_barrier": self.midpoint_barrier,
            "max_barrier": self.max_barrier,
            "max_increase": self.max_increase,
            "is_monotonic": float(self.is_monotonic),
            "local_convexity": self.local_convexity,
            "global_convexity": self.global_convexity,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and lists, ready for JSON."""
        curves = {"alphas": self.alphas.tolist(), "loss": self.loss.tolist()}
        metrics = {name: values.tolist() for name, values in self.metrics.items()}
        return {**curves, "metrics": metrics, "num_samples": self.num_samples, **self.summary()}

    def plot(self, quantity: str = "loss", ax: Axes | None = None, label: str | None = None) -> Figure:
        """Draw the loss, or a metric, along the segment, with the chord between the end points.

        Args:
            quantity: ``"loss"`` or the name of a metric.
            ax: Axes to draw into; a new figure without.
            label: Label of the curve.

        Returns:
            The figure.

        Raises:
            ValueError: If there is no such quantity.
        """
        from matplotlib.figure import Figure

        curves = {"loss": self.loss, **self.metrics}
        if quantity not in curves:
            raise ValueError(f"Expected `quantity` to be one of {sorted(curves)} but got {quantity!r}.")
        if ax is None:
            ax = Figure(figsize=(5, 3.5), layout="constrained").subplots()
        values = curves[quantity]
        (line,) = ax.plot(self.alphas, values, marker="o", markersize=3, label=label)
        ends = measures.chord(self.alphas, values)
        ax.plot(self.alphas, ends, linestyle=":", linewidth=1, color=line.get_color())
        ax.set_xlabel(r"$\alpha$, from a (0) to b (1)")
        ax.set_ylabel(quantity)
        return ax.get_figure()


def as_positions(alphas: int | list[float] | Tensor) -> Tensor:
    """Return positions on the segment: uniform from 0 to 1 for a number, checked and sorted otherwise.

    Raises:
        ValueError: If there are fewer than two distinct positions, or one is not finite.
    """
    if isinstance(alphas, int):
        if alphas < 2:
            raise ValueError(f"A segment needs at least 2 points but got {alphas}.")
        return torch.linspace(0, 1, alphas, dtype=torch.float64)
    positions = torch.as_tensor(alphas, dtype=torch.float64).flatten().unique()
    if len(positions) < 2 or not torch.isfinite(positions).all():
        raise ValueError(f"Expected at least two distinct finite positions but got {alphas}.")
    return positions
