"""Evaluate loss and metrics along the segment between two networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from tqdm.auto import tqdm

from lightning_symmetry.landscape.batch_norm import BatchNormStatistics
from lightning_symmetry.landscape.batches import BatchGroups, to_device
from lightning_symmetry.landscape.repair import Repairs
from lightning_symmetry.landscape.result import PathResult, as_positions
from lightning_symmetry.landscape.segment import Segment
from lightning_symmetry.landscape.steps import Step, cross_entropy_per_sample, supervised_step

BatchNorm = Literal["keep", "recompute", "repair"]


def evaluate_path(
    a: nn.Module,
    b: nn.Module,
    dataloader: Iterable[Any],
    alphas: int | list[float] | Tensor = 25,
    *,
    loss: Callable[[Any, Any], Tensor] | None = cross_entropy_per_sample,
    metrics: Mapping[str, Metric] | None = None,
    batch_norm: BatchNorm = "keep",
    train_loader: Iterable[Any] | None = None,
    step: Step = supervised_step,
    transfer: Callable[[Any], Any] | None = None,
    progress: bool = True,
) -> PathResult:
    r"""Evaluate the mean loss and metrics at points of :math:`(1 - \alpha)\theta_a + \alpha\theta_b`.

    Each batch is loaded once for all positions. Losses are summed over samples in float64. The networks, their
    modes and running statistics, and torch's global random state are left as they were.

    Args:
        a: Network at alpha = 0. It is evaluated on its own device.
        b: Network at alpha = 1.
        dataloader: Batches; any iterable.
        alphas: Number of uniform positions from 0 to 1, or the positions.
        loss: ``loss(output, target)``: a value for each sample, which is summed, or a scalar, which is taken as the
            mean over the ``len(target)`` samples of the batch. None: ``step`` returns the mean loss of the batch and
            its number of samples. Default: cross entropy.
        metrics: torchmetrics by name, updated with ``(output, target)``, each of which computes one number. They are
            not changed.
        batch_norm: ``"keep"`` interpolates the running statistics with the parameters; ``"recompute"`` takes them
            anew at each position over ``train_loader`` (REPAIR's reset); ``"repair"`` also brings the units of hidden
            layers to interpolated means and standard deviations, at all positions but 0 and 1, whose networks stay as
            they are: :func:`~lightning_symmetry.landscape.repair`, which does without batch normalisation too.
        train_loader: Batches for ``"recompute"`` and ``"repair"``, without augmentation best. ``"repair"`` passes over
            them three times and once for each layer that it corrects; up to 256 MiB are loaded once.
        step: ``step(net, batch) -> (output, target)``. Default: batches are ``(input, target)``.
        transfer: Applied to each batch once; default: to the device of ``a``.
        progress: Whether to show a progress bar.

    Returns:
        The curves and their measures.

    Raises:
        ValueError: If the networks cannot be interpolated, there is no data, a metric is no single number, or
            ``"recompute"`` or ``"repair"`` has no ``train_loader`` or nothing to correct.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), sections 5.1 and 5.4.
    """
    positions = as_positions(alphas)
    values, curves, count = path_values(
        a,
        b,
        dataloader,
        positions,
        loss=loss,
        metrics=metrics,
        batch_norm=batch_norm,
        train_loader=train_loader,
        step=step,
        transfer=transfer,
        progress=progress,
    )
    return PathResult(positions, values, curves, count)


@torch.no_grad()
def path_values(
    a: nn.Module,
    b: nn.Module,
    dataloader: Iterable[Any],
    positions: Tensor,
    *,
    loss: Callable[[Any, Any], Tensor] | None,
    metrics: Mapping[str, Metric] | None,
    batch_norm: BatchNorm,
    train_loader: Iterable[Any] | None,
    step: Step,
    transfer: Callable[[Any], Any] | None,
    progress: bool,
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return loss and metrics at any positions, of which one process of several may have a part, and the samples.

    Arguments are those of :func:`evaluate_path`. Without positions nothing is loaded.
    """
    if len(positions) == 0:
        return positions.clone(), {name: positions.clone() for name in metrics or {}}, 0
    segment = Segment(a, b)
    net = segment.point.eval()
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    transfer = transfer or (lambda batch: to_device(batch, device))
    totals = torch.zeros(len(positions), dtype=torch.float64)
    counts = [0] * len(positions)
    if loss is None and metrics:
        raise ValueError("With loss=None `step` returns no output: metrics cannot be updated.")
    meters = [{name: _meter(metric).to(device) for name, metric in (metrics or {}).items()} for _ in positions]
    with torch.random.fork_rng(devices=[]):
        correct = _correction(segment, positions, batch_norm, train_loader, transfer, step, progress)
        with tqdm(total=len(positions), desc="path", disable=not progress, leave=False) as bar:
            for batches in BatchGroups(dataloader, transfer):
                bar.reset(len(positions))
                for i, alpha in enumerate(positions.tolist()):
                    segment.move_to(alpha)
                    correct(i)
                    for batch in batches:
                        first, second = step(net, batch)
                        value, count = loss_sum(loss, first, second)
                        totals[i] += value
                        counts[i] += count
                        for metric in meters[i].values():
                            metric.update(first, second)
                    bar.update()
    if not counts[0]:
        raise ValueError("The dataloader gave no samples to evaluate the path on.")
    values = {name: torch.stack([_number(name, meter[name].compute()) for meter in meters]) for name in metrics or {}}
    return totals / torch.tensor(counts), values, counts[0]


def _meter(metric: Metric) -> Metric:
    """Return a fresh copy that sees this process only: a position is evaluated whole by one of several."""
    meter = metric.clone()
    meter.reset()
    for part in meter.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = _never
    return meter


def _never() -> bool:
    return False


def _number(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor | int | float) or torch.as_tensor(value).numel() != 1:
        raise ValueError(f"Expected the metric {name!r} to compute one number but got {value}.")
    return torch.as_tensor(value).cpu().double().reshape(())


def loss_sum(loss: Callable[[Any, Any], Tensor] | None, first: Any, second: Any) -> tuple[Tensor, int]:
    """Return the summed loss and the number of samples of one batch; without samples the mean loss is undefined."""
    value, count = (first, second) if loss is None else (loss(first, second), len(second))
    if count == 0:
        return torch.zeros((), dtype=torch.float64), 0
    return value.cpu().double().mean() * count, count


def _correction(
    segment: Segment,
    positions: Tensor,
    batch_norm: BatchNorm,
    train_loader: Iterable[Any] | None,
    transfer: Callable[[Any], Any],
    step: Step,
    progress: bool,
) -> Callable[[int], None]:
    """Return what corrects the network of the segment once it has been moved to the position of an index."""
    if batch_norm not in ("keep", "recompute", "repair"):
        raise ValueError(f"Expected `batch_norm` to be 'keep', 'recompute' or 'repair' but got {batch_norm!r}.")
    if batch_norm == "keep":
        return lambda index: None
    net, alphas = segment.point, positions.tolist()
    statistics = BatchNormStatistics(net)
    if batch_norm == "recompute" and not statistics.layers:
        raise ValueError("batch_norm='recompute', but the network has no batch normalisation with running statistics.")
    if train_loader is None:
        raise ValueError(f"batch_norm={batch_norm!r} needs `train_loader`, the batches to take the statistics from.")
    groups = BatchGroups(train_loader, transfer, "train_loader")
    if batch_norm == "recompute":
        shown = tqdm(groups, desc="batch norm", disable=not progress, leave=False)
        states = statistics.recompute(len(alphas), lambda i: segment.move_to(alphas[i]), shown, partial(step, net))
        return lambda index: statistics.load(states[index])
    between = [index for index, alpha in enumerate(alphas) if alpha not in (0, 1)]
    repairs = Repairs(net, [alphas[index] for index in between], lambda i: segment.move_to(alphas[between[i]]))
    if between:
        repairs.find(groups, step, segment.move_to, progress)
    return lambda index: repairs.apply(between.index(index)) if index in between else None
