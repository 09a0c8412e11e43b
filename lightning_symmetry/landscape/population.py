"""Evaluate the loss along the segments of many pairs of networks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from lightning_symmetry.landscape.batches import BatchGroups, to_device
from lightning_symmetry.landscape.path import loss_sum
from lightning_symmetry.landscape.population_ends import Ends, EndsLike
from lightning_symmetry.landscape.result import PathResult, as_positions
from lightning_symmetry.landscape.segment import Segment
from lightning_symmetry.landscape.steps import Step, cross_entropy_per_sample, supervised_step
from lightning_symmetry.surgery import constants_of, device_of, plain_copy

Loss = Callable[[Any, Any], Tensor] | None
Point = dict[str, Tensor]

# Many points under vmap are faster where the calls themselves cost most, one after another where each has enough to do:
# a grouped convolution is slower than as many plain ones. Processor time of one core, in microseconds a sample and
# point, one after another and 16 at once. Digits network of 7,514 weights, LN: 8 images 63 and 39, 16 images 35 and 31,
# 32 images 23 and 22, 64 images 18 and 25, 512 images 12 and 53. BN: 59 and 20, 32 and 15, 19 and 15, 13 and 21,
# 9 and 41. ResNet(blocks=1): 4 images 730 and 940, 64 images 470 and 2,100.
_SMALL_BATCH = 12 * 2**10  # bytes; 46 digits
_SMALL_NETWORK = 2**15  # entries of parameters and buffers
_CHUNK_BYTES = 2**17  # bytes of a batch times points; 512 digits
_MOST_AT_ONCE = 32


@torch.no_grad()
def evaluate_paths(
    network: nn.Module,
    starts: EndsLike,
    ends: EndsLike,
    dataloader: Iterable[Any],
    alphas: int | list[float] | Tensor = 25,
    *,
    loss: Loss = cross_entropy_per_sample,
    label_smoothing: float | Tensor = 0.0,
    step: Step = supervised_step,
    transfer: Callable[[Any], Any] | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
) -> list[PathResult]:
    r"""Evaluate the mean loss at points of :math:`(1 - \alpha)\theta_a + \alpha\theta_b` for K pairs of networks.

    Gives, to rounding, what :func:`~lightning_symmetry.landscape.evaluate_path` gives for each pair with
    ``batch_norm="keep"``. Each batch is loaded once for all pairs and positions; that batches are fixed and not
    augmented is up to the caller. Losses are summed over samples in float64. What is passed in, the modes of networks
    and torch's global random state are left as they were.

    A pair with an end that is not finite (a network that diverged) is not evaluated: its curve is NaN everywhere and
    its number of samples 0.

    Args:
        network: Their architecture and constants. They are evaluated on its device and in its type.
        starts: Networks at alpha = 0: K networks, or their stacked state, of shapes ``(K, *shape)`` by name: both
            dictionaries of ``torch.func.stack_module_state``, or the two in one. Constants may be missing.
        ends: Networks at alpha = 1, in the same or the other form.
        dataloader: Batches; any iterable.
        alphas: Number of uniform positions from 0 to 1, or the positions.
        loss: As in :func:`~lightning_symmetry.landscape.evaluate_path`. Default: cross entropy.
        label_smoothing: Label smoothing of the cross entropy, for all pairs or of shape ``(K,)``.
        step: ``step(net, batch) -> (output, target)``. Default: batches are ``(input, target)``.
        transfer: Applied to each batch once; default: to the device of ``network``.
        chunk_size: Points that are evaluated at once by ``torch.vmap``, with as much memory; 1 is one after another.
            Default: what was measured to be fastest on the CPU for such batches and networks, and one after another
            where the network cannot be vmapped.
        progress: Whether to show a progress bar.

    Returns:
        The curves, one a pair.

    Raises:
        ValueError: If there are no pairs, not as many starts as ends, architectures or constants differ, there is no
            data, or an argument is out of its range.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.4 and App. E.4.
    """
    positions = as_positions(alphas)
    first, second = Ends(network, starts, "starts"), Ends(network, ends, "ends")
    if len(first) != len(second) or len(first) == 0:
        raise ValueError(f"Expected as many `starts` as `ends`, at least one, but got {len(first)} and {len(second)}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"Expected `chunk_size` to be at least 1 but got {chunk_size}.")
    smoothing = _smoothing(label_smoothing, len(first), loss)
    losses = [loss, _uniform_cross_entropy] if bool(smoothing.any()) else [loss]
    device = device_of(network)
    groups = BatchGroups(dataloader, transfer or (lambda batch: to_device(batch, device)))
    with torch.random.fork_rng(devices=[]):
        diverged = torch.tensor([_diverged(Segment(first[pair], second[pair])) for pair in range(len(first))])
        sums = _Sums(plain_copy(network, keep_affine=True).eval(), step, losses, chunk_size)
        totals, count = _totals(sums, groups, first, second, (~diverged).nonzero().flatten(), positions, progress)
    weights = torch.stack([1 - smoothing, smoothing], dim=1)[:, None, : len(losses)]
    # The uniform part may be infinite where it does not count.
    curves = torch.where(weights == 0, 0, weights * totals).sum(2) / count
    curves[diverged] = torch.nan
    return [
        PathResult(positions, curve, num_samples=0 if gone else count)
        for curve, gone in zip(curves, diverged.tolist(), strict=True)
    ]


def _totals(
    sums: _Sums, groups: BatchGroups, first: Ends, second: Ends, pairs: Tensor, positions: Tensor, progress: bool
) -> tuple[Tensor, int]:
    """Return the summed losses, of shape ``(K, positions, losses)``, and the number of samples.

    Without pairs nothing is loaded.
    """
    totals = torch.zeros(len(first), len(positions), len(sums.losses), dtype=torch.float64)
    if len(pairs) == 0:
        return totals, 0
    count = 0
    with tqdm(total=len(pairs) * len(positions), desc="paths", disable=not progress, leave=False) as bar:
        for batches in groups:
            bar.reset(bar.total)
            size = sums.chunk_size(batches)
            points = _points(sums.net, first, second, pairs.tolist(), positions.tolist())
            while chunk := list(islice(points, size)):
                rows, columns, states = zip(*chunk, strict=True)
                values, samples = sums(states, batches)
                totals[rows, columns] += values
                bar.update(len(chunk))
            count += samples
    if count == 0:
        raise ValueError("The dataloader gave no samples to evaluate the paths on.")
    return totals, count


class _Call(nn.Module):
    """The summed losses and the number of samples of a batch, as float64."""

    def __init__(self, net: nn.Module, step: Step, losses: list[Loss]) -> None:
        super().__init__()
        self.net, self.step, self.losses = net, step, losses

    def forward(self, batch: Any) -> Tensor:
        first, second = self.step(self.net, batch)
        sums = [loss_sum(loss, first, second) for loss in self.losses]
        return torch.stack([value for value, _ in sums] + [torch.tensor(float(sums[0][1]), dtype=torch.float64)])


class _Sums:
    """The summed losses at some points, at once where that is faster and possible.

    Args:
        net: The network, whose parameters and buffers the points replace.
        step: Calls it.
        losses: Losses.
        chunk_size: How many points at once. None: by the rule above, and one after another where vmap fails.
    """

    def __init__(self, net: nn.Module, step: Step, losses: list[Loss], chunk_size: int | None) -> None:
        self.net, self.losses = net, losses
        self._call = _Call(net, step, losses)
        self._given, self._vmapped = chunk_size, True
        self._entries = sum(tensor.numel() for tensor in _changing(net).values())

    def chunk_size(self, batches: list[Any]) -> int:
        """Return how many points to evaluate at once."""
        if self._given is not None:
            return self._given
        size = max(sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) for batch in batches)
        if not 0 < size <= _SMALL_BATCH or self._entries > _SMALL_NETWORK or not self._vmapped:
            return 1
        return min(_MOST_AT_ONCE, _CHUNK_BYTES // size)

    def __call__(self, points: tuple[Point, ...], batches: list[Any]) -> tuple[Tensor, int]:
        """Return the sums, of shape ``(points, losses)``, and the number of samples."""
        sums = None
        if len(points) > 1 and self._vmapped:
            try:
                sums = self._at_once(points, batches)
            except RuntimeError:  # data-dependent control flow, or memory; an error of the network's own comes again
                if self._given is not None:
                    raise
                self._vmapped = False
        if sums is None:
            sums = torch.stack([self._one(point, batches) for point in points])
        return sums[:, :-1], int(sums[0, -1])

    def _one(self, point: Point, batches: list[Any]) -> Tensor:
        return sum(functional_call(self._call, point, (batch,)) for batch in batches)

    def _at_once(self, points: tuple[Point, ...], batches: list[Any]) -> Tensor:
        stack = {name: torch.stack([point[name] for point in points]) for name in points[0]}
        return vmap(partial(self._one, batches=batches), randomness="different")(stack)


def _points(
    net: nn.Module, first: Ends, second: Ends, pairs: list[int], alphas: list[float]
) -> Iterator[tuple[int, int, Point]]:
    """Yield the tensors of each pair at each position, as :class:`_Call` names them."""
    like = _changing(net)
    for pair in pairs:
        segment = Segment(first[pair], second[pair])
        for place, alpha in enumerate(alphas):
            here = _changing(segment.move_to(alpha))
            yield pair, place, {f"net.{name}": here[name].to(tensor, copy=True) for name, tensor in like.items()}


def _changing(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, but constants."""
    constants = constants_of(net)
    buffers = {name: buffer for name, buffer in net.named_buffers() if name not in constants}
    return {**dict(net.named_parameters()), **buffers}


def _diverged(segment: Segment) -> bool:
    """Whether an end is not finite; infinities on which both agree (masks of attention) do not count."""
    start = {name: tensor.clone() for name, tensor in _changing(segment.move_to(0)).items()}
    end = _changing(segment.move_to(1))
    return any(
        not (start[name].isfinite().all() and tensor.isfinite().all()) and not torch.equal(start[name], tensor)
        for name, tensor in end.items()
    )


def _smoothing(label_smoothing: float | Tensor, count: int, loss: Loss) -> Tensor:
    smoothing = torch.as_tensor(label_smoothing, dtype=torch.float64, device="cpu")
    if smoothing.shape not in ((), (count,)):
        raise ValueError(
            f"Expected `label_smoothing` to be one number or of shape ({count},), one a pair, but got shape "
            f"{tuple(smoothing.shape)}."
        )
    if not bool(((smoothing >= 0) & (smoothing <= 1)).all()):
        raise ValueError(f"Expected `label_smoothing` to be within 0 and 1 but got {label_smoothing}.")
    if loss is not cross_entropy_per_sample and bool(smoothing.any()):
        raise ValueError("`label_smoothing` is that of the default loss, but another `loss` was given.")
    return smoothing.expand(count)


def _uniform_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy with the uniform distribution, of which label smoothing is the share."""
    return F.cross_entropy(output, target, reduction="none", label_smoothing=1.0)
