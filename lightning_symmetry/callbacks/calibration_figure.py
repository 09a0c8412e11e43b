"""The reliability diagram."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_symmetry.callbacks.calibration_bins import CalibrationResult


def reliability_figure(result: CalibrationResult, title: str = "") -> Figure:
    """Return a figure of the share of hits against confidence by bin, above the histogram of confidences.

    A calibrated network has all bars on the diagonal; what is missing to the mean confidence of a bin, or is beyond it,
    is hatched.

    Args:
        result: What was measured.
        title: Stands before the expected calibration error.

    Returns:
        The figure.

    Source: On Calibration of Modern Neural Networks (Guo et al., 2017), figure 1.
    """
    from matplotlib.figure import Figure

    bins = len(result.count)
    width = 1 / bins
    filled = [b for b in range(bins) if result.count[b]]
    centres = [(b + 0.5) * width for b in filled]
    hits, means = ([values[b] for b in filled] for values in (result.hits, result.confidence))
    shares = [result.count[b] / result.num_samples for b in filled]
    figure = Figure(figsize=(4.5, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    what = "share of class 1" if result.binary else "accuracy"
    upper.bar(centres, hits, width, color="C0", edgecolor="black", linewidth=0.5, label=what)
    gaps = [mean - hit for mean, hit in zip(means, hits, strict=True)]
    style = {"facecolor": (0.8, 0.2, 0.2, 0.3), "edgecolor": (0.8, 0.2, 0.2, 0.9), "hatch": "//", "linewidth": 0.5}
    upper.bar(centres, gaps, width, bottom=hits, label="gap to confidence", **style)
    upper.plot([0, 1], [0, 1], "--", color="grey", linewidth=1)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel=what)
    upper.set_title(f"{title}{': ' if title else ''}ECE {100 * result.ece:.2f} %")
    upper.legend(loc="upper left", fontsize="small")
    lower.bar(centres, shares, width, color="C0", edgecolor="black", linewidth=0.5)
    accuracy = f"accuracy {100 * result.accuracy:.1f} %"
    if result.binary:
        lower.set(xlabel="probability of class 1", ylabel="share of samples", title=accuracy)
    else:
        confidence = sum(n * result.confidence[b] for b, n in enumerate(result.count) if n) / max(result.num_samples, 1)
        lower.axvline(result.accuracy, color="black", linestyle="-", linewidth=1, label=accuracy)
        lower.axvline(confidence, color="C3", linestyle="--", linewidth=1, label=f"confidence {100 * confidence:.1f} %")
        lower.set(xlabel="confidence", ylabel="share of samples")
        lower.legend(loc="upper left", fontsize="small")
    return figure
