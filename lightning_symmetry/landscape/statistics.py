"""Monotonicity and convexity of many loss curves: means, deviations and tests between kinds of networks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import ttest_ind
from torch import Tensor

from lightning_symmetry.landscape.result import PathResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "max_increase": "Delta",
    "percent_monotonic": "monotonic %",
    "local_convexity": "local convexity",
    "global_convexity": "global convexity",
}


@dataclass(frozen=True, eq=False)
class KindStatistics:
    """The curves of one kind of networks.

    Means, deviations and p-values are by measure: ``"max_increase"`` (Delta, in units of the loss),
    ``"percent_monotonic"`` (of 0 and 100, one for each curve), ``"local_convexity"`` and ``"global_convexity"``
    (shares).

    Attributes:
        results: The curves that count, as they were given: those that are finite everywhere.
        left_out: Number of those that are not.
        values: The measures of each curve, float64, of shape ``(number,)``.
        mean: Their means.
        deviation: Their standard deviations, of a sample: the sum of squares is divided by ``number - 1``.
        p_value: p-values of two-sided t-tests of the same mean as the reference's; empty for the reference. NaN where
            both kinds have one value throughout: without any spread a t-test says nothing.
    """

    results: tuple[PathResult, ...]
    left_out: int
    values: dict[str, Tensor]
    mean: dict[str, float]
    deviation: dict[str, float]
    p_value: dict[str, float]

    @property
    def number(self) -> int:
        """Number of curves that count."""
        return len(self.results)

    def lowest(self, count: int) -> list[PathResult]:
        """Return the curves of lowest loss at their end, lowest first."""
        return sorted(self.results, key=lambda result: result.loss[-1].item())[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, without the curves, ready for JSON."""
        return {
            "number": self.number,
            "left_out": self.left_out,
            "mean": dict(self.mean),
            "deviation": dict(self.deviation),
            "p_value": dict(self.p_value),
        }


@dataclass(frozen=True, eq=False)
class PathStatistics:
    """Statistics of the loss curves of several kinds of networks; :func:`path_statistics` makes it.

    Attributes:
        kinds: The statistics of each kind by name.
        reference: The kind with which the others are compared.
        equal_var: Whether tests took the variances of two kinds to be the same (Student's) or not (Welch's).
    """

    kinds: dict[str, KindStatistics]
    reference: str
    equal_var: bool

    def __getitem__(self, kind: str) -> KindStatistics:
        if kind not in self.kinds:
            raise KeyError(f"Expected one of the kinds {list(self.kinds)} but got {kind!r}.")
        return self.kinds[kind]

    def table(self, digits: int = 3) -> str:
        """Return a Markdown table of mean ± deviation and p-value, one row a kind (Table 4)."""
        rows = [["kind", "curves", "left out", *TITLES.values()]]
        for kind, found in self.kinds.items():
            cells = [_cell(found, measure, digits) for measure in TITLES]
            rows.append([kind, str(found.number), str(found.left_out), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the curves as plain numbers, ready for JSON."""
        kinds = {kind: found.to_dict() for kind, found in self.kinds.items()}
        return {"reference": self.reference, "equal_var": self.equal_var, "kinds": kinds}

    def plot(self, count: int = 20) -> Figure:
        """Draw the curves that end in the lowest loss, one panel a kind (figure 5).

        Args:
            count: Number of curves of each kind.

        Returns:
            The figure.

        Raises:
            ValueError: If ``count`` is less than 1.
        """
        from matplotlib.figure import Figure

        if count < 1:
            raise ValueError(f"Expected `count` to be at least 1 but got {count}.")
        figure = Figure(figsize=(3.4 * len(self.kinds) + 0.4, 3.2), layout="constrained")
        panels = figure.subplots(1, len(self.kinds), sharey=True, squeeze=False)[0]
        for ax, (kind, found) in zip(panels, self.kinds.items(), strict=True):
            shown = found.lowest(count)
            for result in shown:
                ax.plot(result.alphas, result.loss, linewidth=1, alpha=0.7)
            ax.set_title(f"{kind}: {len(shown)} of {found.number}")
            ax.set_xlabel(r"$\alpha$")
        panels[0].set_ylabel("loss")
        return figure


def path_statistics(
    results: Mapping[str, Sequence[PathResult]], reference: str = "standard", *, equal_var: bool = False
) -> PathStatistics:
    r"""Compare the monotonicity and the convexity of the loss curves of several kinds of networks.

    Of each kind: mean and deviation over its curves of the largest increase :math:`\Delta`, of whether the curve is
    monotonic (:math:`\Delta \le 0`), and of local and global convexity. Of each kind but the reference: for each of
    these a two-sided t-test of two independent samples with the reference's, for percent monotonic over zeros and
    ones. p-values are not corrected for the number of tests.

    Curves with a loss that is not finite are left out and counted.

    Args:
        results: Curves by kind, all at the same positions, on which :math:`\Delta` depends.
        reference: The kind to compare with.
        equal_var: False is Welch's test, which holds for unlike variances: asymmetric networks have smaller ones.
            True is Student's, which pools the variances of the two kinds. With as many curves of both kinds the
            statistic is the same and only the degrees of freedom differ. The paper does not say which it took.

    Returns:
        The statistics.

    Raises:
        ValueError: If there is no such kind, a kind has fewer than two finite curves, or positions differ or are
            fewer than three.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.4, Table 4, figure 5;
    Welch, The generalization of Student's problem when several different population variances are involved (1947).
    """
    if reference not in results:
        raise ValueError(f"Expected `reference` to be one of the kinds {list(results)} but got {reference!r}.")
    _check_positions(results)
    finite = {kind: tuple(r for r in found if bool(r.loss.isfinite().all())) for kind, found in results.items()}
    for kind, kept in finite.items():
        if len(kept) < 2:
            raise ValueError(
                f"Expected at least 2 finite curves of each kind, for a deviation, but got {len(kept)} of {kind!r} "
                f"({len(results[kind]) - len(kept)} not finite)."
            )
    values = {kind: _measures(kept) for kind, kept in finite.items()}
    kinds = {}
    for kind, ours in values.items():
        tests = {} if kind == reference else {m: _t_test(ours[m], values[reference][m], equal_var) for m in TITLES}
        kinds[kind] = KindStatistics(
            results=finite[kind],
            left_out=len(results[kind]) - len(finite[kind]),
            values=ours,
            mean={measure: value.mean().item() for measure, value in ours.items()},
            deviation={measure: value.std().item() for measure, value in ours.items()},
            p_value=tests,
        )
    return PathStatistics(kinds, reference, equal_var)


def _measures(results: Sequence[PathResult]) -> dict[str, Tensor]:
    rows = [(r.max_increase, 100.0 * r.is_monotonic, r.local_convexity, r.global_convexity) for r in results]
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return dict(zip(TITLES, columns, strict=True))


def _t_test(ours: Tensor, theirs: Tensor, equal_var: bool) -> float:
    """Return the two-sided p-value, NaN where no value differs from the others of its kind."""
    if all(bool((sample == sample[0]).all()) for sample in (ours, theirs)):
        return math.nan
    with warnings.catch_warnings():  # one kind without spread, which is as it should be with 100 % monotonic
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        return float(ttest_ind(ours.numpy(), theirs.numpy(), equal_var=equal_var).pvalue)


def _check_positions(results: Mapping[str, Sequence[PathResult]]) -> None:
    first: tuple[str, Tensor] | None = None
    for kind, found in results.items():
        for result in found:
            if len(result.alphas) < 3:
                raise ValueError(
                    f"Expected at least 3 positions, of which one is inside, but a curve of {kind!r} has "
                    f"{len(result.alphas)}."
                )
            first = first or (kind, result.alphas)
            if result.alphas.shape != first[1].shape or not torch.allclose(result.alphas, first[1], rtol=0, atol=1e-9):
                raise ValueError(
                    f"Expected all curves at the same positions, but {first[0]!r} has {_described(first[1])} and "
                    f"{kind!r} {_described(result.alphas)}."
                )


def _described(alphas: Tensor) -> str:
    return f"{len(alphas)} from {alphas[0]:g} to {alphas[-1]:g}"


def _cell(found: KindStatistics, measure: str, digits: int) -> str:
    places = max(digits - 2, 0) if measure == "percent_monotonic" else digits
    text = f"{found.mean[measure]:.{places}f}"
    if measure != "percent_monotonic":
        text += f" ± {found.deviation[measure]:.{places}f}"
    if measure not in found.p_value:
        return text
    p = found.p_value[measure]
    if math.isnan(p):
        return f"{text} (p undefined)"
    return f"{text} (p = {p:.3f})" if p >= 0.001 else f"{text} (p = {p:.0e})"
