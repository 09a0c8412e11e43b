"""Evaluate loss and metrics along the segment between two networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from tqdm.auto import tqdm

from lightning_symmetry.landscape.batch_norm import BatchNormStatistics
from lightning_symmetry.landscape.result import PathResult, as_positions
from lightning_symmetry.landscape.segment import Segment

Step = Callable[[nn.Module, Any], tuple[Tensor, Any]]
_HELD_BYTES = 256 * 2**20  # batches kept at a time, so that parameters are interpolated once for many of them


def supervised_step(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return output and target of an ``(input, target)`` batch.

    Raises:
        TypeError: If the batch is something else.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"Expected batches (input, target) but got {type(batch).__name__}; say with `step` how the network is "
            "called: step(net, batch) -> (output, target)."
        )
    return net(batch[0]), batch[1]


def graph_step(mask: str) -> Step:
    """Return a step for one transductive graph, whose nodes are selected by ``mask`` (e.g. ``"test_mask"``)."""

    def step(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return net(batch.x, batch.edge_index)[batch[mask]], batch.y[batch[mask]]

    return step


def cross_entropy_per_sample(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each sample."""
    return F.cross_entropy(output, target, reduction="none")


def evaluate_path(
    a: nn.Module,
    b: nn.Module,
    dataloader: Iterable[Any],
    alphas: int | list[float] | Tensor = 25,
    *,
    loss: Callable[[Any, Any], Tensor] | None = cross_entropy_per_sample,
    metrics: Mapping[str, Metric] | None = None,
    batch_norm: Literal["keep", "recompute"] = "keep",
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
            anew at each position over ``train_loader`` (REPAIR's reset).
        train_loader: Batches for ``"recompute"``, without augmentation best.
        step: ``step(net, batch) -> (output, target)``. Default: batches are ``(input, target)``.
        transfer: Applied to each batch once; default: to the device of ``a``.
        progress: Whether to show a progress bar.

    Returns:
        The curves and their measures.

    Raises:
        ValueError: If the networks cannot be interpolated, there is no data, a metric is no single number, or
            ``"recompute"`` has no ``train_loader`` or nothing to recompute.

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
    batch_norm: Literal["keep", "recompute"],
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
    transfer = transfer or (lambda batch: _to_device(batch, device))
    totals = torch.zeros(len(positions), dtype=torch.float64)
    counts = [0] * len(positions)
    if loss is None and metrics:
        raise ValueError("With loss=None `step` returns no output: metrics cannot be updated.")
    meters = [{name: _meter(metric).to(device) for name, metric in (metrics or {}).items()} for _ in positions]
    with torch.random.fork_rng(devices=[]):
        statistics, recomputed = None, None
        if batch_norm == "recompute":
            statistics = BatchNormStatistics(net)
            recomputed = _recompute(segment, positions, statistics, train_loader, transfer, step, progress)
        elif batch_norm != "keep":
            raise ValueError(f"Expected `batch_norm` to be 'keep' or 'recompute' but got {batch_norm!r}.")
        with tqdm(total=len(positions), desc="path", disable=not progress, leave=False) as bar:
            for batches in _groups(dataloader, transfer):
                bar.reset(len(positions))
                for i, alpha in enumerate(positions.tolist()):
                    segment.move_to(alpha)
                    if recomputed is not None:
                        statistics.load(recomputed[i])
                    for batch in batches:
                        first, second = step(net, batch)
                        value, count = _loss_sum(loss, first, second)
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


def _loss_sum(loss: Callable[[Any, Any], Tensor] | None, first: Any, second: Any) -> tuple[Tensor, int]:
    """Return the summed loss and the number of samples of one batch; without samples the mean loss is undefined."""
    value, count = (first, second) if loss is None else (loss(first, second), len(second))
    if count == 0:
        return torch.zeros((), dtype=torch.float64), 0
    return value.cpu().double().mean() * count, count


def _recompute(
    segment: Segment,
    positions: Tensor,
    statistics: BatchNormStatistics,
    train_loader: Iterable[Any] | None,
    transfer: Callable[[Any], Any],
    step: Step,
    progress: bool,
) -> list[list[Tensor]]:
    """Take batch-norm statistics anew at each position, loading each training batch once."""
    if not statistics.layers:
        raise ValueError("batch_norm='recompute', but the network has no batch normalisation with running statistics.")
    if train_loader is None:
        raise ValueError("batch_norm='recompute' needs `train_loader`, the batches to take the statistics from.")
    states: list[Any] = [None] * len(positions)
    for batches in tqdm(_groups(train_loader, transfer), desc="batch norm", disable=not progress, leave=False):
        for i, alpha in enumerate(positions.tolist()):
            net = segment.move_to(alpha)
            states[i] = statistics.update(states[i], batches, lambda batch, net=net: step(net, batch))
    if states[0] is None:
        raise ValueError("`train_loader` gave no batches to take batch-norm statistics from.")
    return states


def _groups(loader: Iterable[Any], transfer: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Gather batches up to a limit of memory."""
    group: list[Any] = []
    held = 0
    for batch in loader:
        group.append(transfer(batch))
        held += _num_bytes(group[-1])
        if held > _HELD_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _num_bytes(batch: Any) -> int:
    if hasattr(batch, "nbytes"):  # a tensor or an array
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(_num_bytes, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(_num_bytes, batch))
    if hasattr(batch, "to_dict"):  # a torch-geometric graph
        return _num_bytes(batch.to_dict())
    return _num_bytes(vars(batch)) if is_dataclass(batch) else 0


def _to_device(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
