"""Figure 2 of Natural Neural Networks: pictures of Fisher matrices, and their condition numbers during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_LABELS = {
    "condition": "condition number",
    "percent": "condition number, % of the first",
    "largest": "largest eigenvalue",
    "smallest": "smallest eigenvalue",
}


def draw_history(
    history: Sequence[dict[str, Any]], layer: str, quantity: str, ax: Axes, label: str | None = None, **style: Any
) -> None:
    """Draw a quantity of a layer against optimizer steps, on a logarithmic scale.

    A reparametrisation is a vertical line, from the old coordinates to the new ones at the same weights.

    Args:
        history: Rows of :attr:`FisherConditioning.history`.
        layer: Name of the layer.
        quantity: ``"condition"``, ``"percent"``, ``"largest"`` or ``"smallest"``.
        ax: Where to draw.
        label: Label of the curve.
        style: For ``ax.plot``.

    Raises:
        ValueError: If there is no such quantity or layer.
    """
    if quantity not in _LABELS:
        raise ValueError(f"Expected `quantity` to be one of {sorted(_LABELS)} but got {quantity!r}.")
    rows = [row for row in history if row["layer"] == layer]
    if not rows:
        raise ValueError(f"Nothing was measured of a layer called {layer!r}.")
    ax.plot([row["step"] for row in rows], [row[quantity] for row in rows], label=label, **style)
    ax.set(xlabel="optimizer steps", ylabel=_LABELS[quantity], yscale="log")


def history_figure(history: Sequence[dict[str, Any]], quantity: str) -> Figure:
    """Return a figure of a quantity of all layers; arguments and errors as for :func:`draw_history`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    ax = figure.subplots()
    for layer in dict.fromkeys(row["layer"] for row in history):
        draw_history(history, layer, quantity, ax, label=layer, marker="o", markersize=3)
    ax.legend()
    return figure


def show_matrix(matrix: Tensor, ax: Axes, decades: int = 6) -> AxesImage:
    """Show the absolute values of a matrix's entries, in units of the largest, on a logarithmic scale.

    Args:
        matrix: The matrix.
        ax: Where to draw.
        decades: Powers of ten below the largest entry that are told apart.

    Returns:
        The image, for a colour bar.
    """
    from matplotlib.colors import LogNorm

    values = (matrix.abs() / matrix.abs().max()).clamp_min(10.0**-decades)
    ax.set(xticks=[], yticks=[])
    return ax.imshow(values.numpy(), cmap="magma", norm=LogNorm(10.0**-decades, 1), interpolation="nearest")


def matrix_figure(matrix: Tensor, title: str) -> Figure:
    """Return a figure of one matrix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    ax = figure.subplots()
    image = show_matrix(matrix, ax)
    ax.set_title(title)
    figure.colorbar(image, ax=ax, label="|entry| / largest")
    return figure
