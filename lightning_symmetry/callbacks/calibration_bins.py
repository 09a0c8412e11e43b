"""Bins of confidence, kept as sums: expected and maximum calibration error, likelihood and Brier score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Outputs = Literal["logits", "probabilities"]


class Scores(NamedTuple):
    """What each sample gives, as vectors over N samples.

    ``confidence`` is the largest probability and ``hit`` whether its class is the target; of binary outputs the
    probability of class 1 and whether the target is 1. ``correct`` is whether the prediction is, in either case.
    """

    confidence: Tensor
    hit: Tensor
    correct: Tensor
    nll: Tensor
    brier: Tensor
    num_classes: int
    binary: bool


def score(output: Tensor, target: Tensor, outputs: Outputs = "logits", class_dim: int = -1, repeats: int = 0) -> Scores:
    r"""Return the scores of a batch.

    With probabilities p, target y and one-hot targets e: the negative log likelihood :math:`-\ln p_y` and the Brier
    score :math:`|p - e_y|^2`; of binary outputs :math:`(p_1 - y)^2`. A logit is always taken for one, also where all
    lie between 0 and 1.

    Args:
        output: Logits or probabilities, with one class dimension; without one, or with one class, they are binary.
        target: Classes, of the other dimensions or flattened; negative ones are ignored.
        outputs: What the outputs are.
        class_dim: The class dimension of outputs of several dimensions.
        repeats: How many of the last entries of the outputs' first dimension are left out.

    Returns:
        The scores, in float32, or float64 if the outputs are.

    Raises:
        MisconfigurationException: If shapes, types or values do not fit.
    """
    output = output.detach()
    output = output if output.dtype == torch.float64 else output.float()
    rows = output.unsqueeze(-1) if output.ndim < 2 else output.movedim(class_dim, -1)
    lead, classes = rows.shape[:-1], rows.shape[-1]
    flat = 1 in (len(lead), target.ndim) and lead.numel() == target.numel()
    if not (flat or target.shape == lead or (classes == 1 and target.shape == output.shape)):
        raise MisconfigurationException(
            f"Expected targets of shape {tuple(lead)} for outputs of shape {tuple(output.shape)} with classes in "
            f"dimension {class_dim} but got {tuple(target.shape)}. Name the submodule that gives the logits with "
            "`predictor=`, or the dimension of classes with `class_dim=`."
        )
    rows, target = rows.reshape(-1, classes), target.to(output.device).reshape(-1)
    if repeats:
        kept = lead.numel() // lead[0] * (lead[0] - repeats)
        rows, target = rows[:kept], target[:kept]
    if target.is_floating_point() and bool((target != target.round()).any()):
        raise MisconfigurationException("Expected targets to be classes but got fractions. Soft labels have no hits.")
    known = target >= 0
    rows, target = rows[known], target[known].long()
    if len(target) and int(target.max()) >= max(classes, 2):
        raise MisconfigurationException(
            f"Expected targets below the number of classes, {max(classes, 2)}, but got {int(target.max())}."
        )
    if outputs == "probabilities":
        _check_probabilities(rows)
    return _binary(rows[:, 0], target, outputs) if classes == 1 else _multiclass(rows, target, outputs)


def _check_probabilities(rows: Tensor) -> None:
    outside = bool(((rows < 0) | (rows > 1)).any())
    if outside or (rows.shape[1] > 1 and bool(((rows.sum(1) - 1).abs() > 1e-2).any())):
        raise MisconfigurationException(
            "Expected outputs to be probabilities, which lie between 0 and 1 and sum to 1, but they do not. "
            "Use outputs='logits'."
        )


def _multiclass(rows: Tensor, target: Tensor, outputs: Outputs) -> Scores:
    log_probabilities = rows.log_softmax(1) if outputs == "logits" else rows.log()
    probabilities = rows.softmax(1) if outputs == "logits" else rows
    confidence, predicted = probabilities.max(1)
    hit = predicted == target
    true = probabilities.gather(1, target[:, None])[:, 0]
    brier = probabilities.square().sum(1) - 2 * true + 1
    nll = -log_probabilities.gather(1, target[:, None])[:, 0]
    return Scores(confidence, hit, hit, nll, brier, rows.shape[1], False)


def _binary(values: Tensor, target: Tensor, outputs: Outputs) -> Scores:
    hit = target == 1
    if outputs == "logits":
        probability, nll = values.sigmoid(), F.softplus(torch.where(hit, -values, values))
    else:
        probability, nll = values, -torch.where(hit, values, 1 - values).log()
    brier = (probability - hit.to(values)).square()
    return Scores(probability, hit, (probability > 0.5) == hit, nll, brier, 2, True)


@dataclass(frozen=True)
class CalibrationResult:
    """Calibration over a data set; its lists run over bins of equal width from 0 to 1.

    Attributes:
        count: Number of samples in each bin.
        confidence: Mean confidence in each bin, NaN in empty ones.
        hits: Share of hits in each bin, NaN in empty ones.
        ece: Expected calibration error.
        mce: Maximum calibration error.
        nll: Mean negative log likelihood, in nats.
        brier: Mean Brier score.
        accuracy: Share of correct predictions.
        num_samples: Number of samples.
        num_classes: Number of classes; 2 for binary outputs.
        binary: Whether confidence is the probability of class 1, and a hit a sample of class 1.
        epoch: Number of finished epochs.
        step: Number of optimizer steps.
    """

    count: list[int]
    confidence: list[float]
    hits: list[float]
    ece: float
    mce: float
    nll: float
    brier: float
    accuracy: float
    num_samples: int
    num_classes: int
    binary: bool = False
    epoch: int = 0
    step: int = 0

    def figure(self, title: str = "") -> Figure:
        """Return the reliability diagram above the histogram of confidences."""
        from lightning_symmetry.callbacks.calibration_figure import reliability_figure

        return reliability_figure(self, title)


class CalibrationBins(Metric):
    r"""Sums over M bins of equal width, of which a calibration error is made.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{N} |a_b - c_b|, \qquad \mathrm{MCE} = \max_b |a_b - c_b|

    with the number of samples :math:`n_b`, the share of hits :math:`a_b` and the mean confidence :math:`c_b` of bin
    :math:`b`, which is :math:`[b/M, (b+1)/M)`, the last one closed. These are torchmetrics' ``CalibrationError`` with
    ``norm="l1"`` and ``"max"``, except that it holds every confidence until the end, and puts those that are exactly 1
    into a bin of their own. The state here is of 3 M + 5 numbers, which are summed over processes.

    Args:
        num_bins: Number of bins M.
        dtype: In what to sum.

    Source: On Calibration of Modern Neural Networks (Guo et al., 2017), equations 3 and 5.
    """

    full_state_update = False

    def __init__(self, num_bins: int = 15, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(compute_with_cache=False)
        self.num_bins = num_bins
        self.add_state("bins", torch.zeros(3, num_bins, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("totals", torch.zeros(3, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("kind", torch.zeros(2, dtype=torch.long), dist_reduce_fx="max")

    def update(self, scores: Scores) -> None:
        """Add the scores of a batch."""
        confidence = scores.confidence
        edges = torch.linspace(0, 1, self.num_bins + 1, dtype=confidence.dtype, device=confidence.device)
        index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, self.num_bins - 1)
        rows = torch.stack([torch.ones_like(confidence), confidence, scores.hit.to(confidence)])
        self.bins = self.bins.index_add(1, index.to(self.bins.device), rows.to(self.bins))
        sums = [part.to(self.totals).sum() for part in (scores.nll, scores.brier, scores.correct)]
        self.totals = self.totals + torch.stack(sums)
        self.kind = torch.tensor([scores.num_classes, int(scores.binary)], device=self.kind.device)

    def compute(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {"bins": self.bins, "totals": self.totals, "kind": self.kind}

    def result(self, epoch: int = 0, step: int = 0) -> CalibrationResult:
        """Return the measures; in a distributed run of all processes, each of which must call this."""
        sums = self.compute()
        count, confidence, hits = sums["bins"].cpu().double()
        total = count.sum()
        gaps = (hits - confidence).abs()
        nll, brier, accuracy = (sums["totals"].cpu().double() / total).tolist()
        apart = (gaps / count)[count > 0]
        classes, binary = sums["kind"].tolist()
        return CalibrationResult(
            count=[round(n) for n in count.tolist()],
            confidence=(confidence / count).tolist(),
            hits=(hits / count).tolist(),
            ece=float(gaps.sum() / total),
            mce=float(apart.max()) if len(apart) else float("nan"),
            nll=nll,
            brier=brier,
            accuracy=accuracy,
            num_samples=round(float(total)),
            num_classes=classes,
            binary=bool(binary),
            epoch=epoch,
            step=step,
        )
