"""How asymmetric a network is in practice: what the exchange of two units does to the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.landscape.batches import to_device
from lightning_symmetry.landscape.steps import Step, cross_entropy_per_sample, supervised_step
from lightning_symmetry.permutation.constants import PlainNetwork, plain_network
from lightning_symmetry.permutation.spec import Group
from lightning_symmetry.surgery import device_of, evaluating


@dataclass(frozen=True)
class EffectiveAsymmetry:
    """Changes of the loss when two units are exchanged and the constants are not.

    Attributes:
        loss: Mean loss of the network as it is.
        pairs: For each group the pairs of units, of shape ``(pairs, 2)``.
        losses: For each group the mean loss after the exchange of each pair, in float64.
    """

    loss: float
    pairs: dict[str, Tensor] = field(repr=False)
    losses: dict[str, Tensor] = field(repr=False)

    @property
    def changes(self) -> dict[str, Tensor]:
        """The absolute change of the loss of each pair, by group."""
        return {name: (losses - self.loss).abs() for name, losses in self.losses.items()}

    @property
    def mean(self) -> dict[str, float]:
        """Mean absolute change by group."""
        return {name: float(change.mean()) for name, change in self.changes.items()}

    @property
    def median(self) -> dict[str, float]:
        """Median absolute change by group."""
        return {name: float(change.quantile(0.5)) for name, change in self.changes.items()}

    @property
    def max(self) -> dict[str, float]:
        """Largest absolute change by group."""
        return {name: float(change.max()) for name, change in self.changes.items()}

    def __str__(self) -> str:
        rows = [("group", "pairs", "mean", "median", "max")]
        mean, median, largest = self.mean, self.median, self.max
        for name, pairs in self.pairs.items():
            numbers = (f"{value[name]:.3g}" for value in (mean, median, largest))
            rows.append((name, str(len(pairs)), *numbers))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"absolute change of the loss {self.loss:.6g} when two units are exchanged", *lines])


@torch.no_grad()
def effective_asymmetry(
    net: nn.Module,
    dataloader: Iterable[Any],
    example_input: Any = None,
    *,
    pairs: int = 20,
    groups: Sequence[str] | None = None,
    loss: Callable[[Any, Any], Tensor] = cross_entropy_per_sample,
    step: Step = supervised_step,
    transfer: Callable[[Any], Any] | None = None,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> EffectiveAsymmetry:
    r"""Measure how much the loss changes when two units are exchanged and the constants stay in place.

    .. math:: |L(M \odot (P W Q^\top) + (1 - M) \odot F) - L(W)|

    Two units i and j of a group of the plain network are exchanged wherever they stand: rows of weights, biases and
    norms, columns of the next weights. Then the constants of layers with fixed entries are written back, and FiGLU's F
    is not touched at all. Without constants nothing changes but rounding. A network whose constants are as small as its
    trainable entries hardly changes either: it has no symmetry by structure
    (:func:`~lightning_symmetry.permutation.symmetries.symmetries`), but almost one in practice.

    Each batch is loaded once. The network is evaluated in evaluation mode on a copy, and left as it was.

    Args:
        net: The network; it is evaluated on its own device.
        dataloader: Batches; any iterable.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``net.example_input_array``.
        pairs: Number of pairs of units of each group, drawn without replacement; all if there are no more.
        groups: Names of the groups. Default: all of the plain network. Units within blocks (attention heads) are
            exchanged within their block, blocks as a whole.
        loss: ``loss(output, target)``: a value for each sample, or a scalar, which is taken as the mean over the
            ``len(target)`` samples of the batch. Default: cross entropy.
        step: ``step(net, batch) -> (output, target)``. Default: batches are ``(input, target)``.
        transfer: Applied to each batch; default: to the device of the network.
        generator: Generator of the pairs. Default: a new one with seed 0.
        progress: Whether to show a progress bar.

    Returns:
        The changes; print it for a table.

    Raises:
        ValueError: If ``pairs`` is less than 1, there is no such group or none at all, or no data.
    """
    if pairs < 1:
        raise ValueError(f"Expected `pairs` to be at least 1 but got {pairs}.")
    network = plain_network(net, example_input)
    spec = network.spec
    names = list(spec.groups) if groups is None else list(groups)
    if not names:
        raise ValueError(f"The network has no units to exchange.\n{spec.report()}")
    if unknown := [name for name in names if name not in spec.groups]:
        raise ValueError(f"There is no group {unknown[0]!r}; the plain network has {', '.join(spec.groups)}.")
    generator = generator or torch.Generator().manual_seed(0)
    chosen = {name: _draw(spec.groups[name].size, pairs, generator) for name in names}
    swaps = [(name, pair) for name in names for pair in chosen[name]]
    device = device_of(net)
    transfer = transfer or (lambda batch: to_device(batch, device))
    exchange = _Exchange(network)
    totals = torch.zeros(1 + len(swaps), dtype=torch.float64)
    count = 0
    with evaluating(network.net), tqdm(desc="exchanges", disable=not progress, leave=False) as bar:
        for batch in dataloader:
            batch = transfer(batch)
            bar.reset(len(totals))
            for number in range(len(totals)):
                swapped = exchange(*swaps[number - 1]) if number else contextlib.nullcontext()
                with swapped:
                    output, target = step(network.net, batch)
                    samples = len(target)
                    if samples:
                        totals[number] += loss(output, target).double().mean().cpu() * samples
                bar.update()
            count += samples
    if not count:
        raise ValueError("The dataloader gave no samples to measure the loss on.")
    means = totals / count
    split = means[1:].split([len(chosen[name]) for name in names])
    return EffectiveAsymmetry(float(means[0]), chosen, dict(zip(names, split, strict=True)))


class _Exchange:
    """Exchanges units of the plain network in place, for a time.

    Args:
        network: The plain network and its constants.
    """

    def __init__(self, network: PlainNetwork) -> None:
        self.network = network
        self.state: dict[str, Tensor] = network.net.state_dict()

    @contextlib.contextmanager
    def __call__(self, name: str, pair: Tensor) -> Iterator[None]:
        """Exchange two units of a group."""
        spec, constants = self.network.spec, self.network.constants
        group: Group = spec.groups[name]
        permutation = torch.arange(group.size)
        permutation[pair] = pair.flip(0)
        before: dict[str, Tensor] = {}
        seen = set()
        for tensor in dict.fromkeys(place.tensor for place in group.places):
            if self.state[tensor].data_ptr() in seen:  # a tied tensor is met under several names
                continue
            seen.add(self.state[tensor].data_ptr())
            old = before[tensor] = self.state[tensor].clone()
            new = spec.permute(tensor, old, {name: permutation})
            own = constants.get(tensor)
            if own is not None:
                new = torch.where(own.fixed, own.values, new)
            self.state[tensor].copy_(new)
        try:
            yield
        finally:
            for tensor, old in before.items():
                self.state[tensor].copy_(old)


def _draw(size: int, pairs: int, generator: torch.Generator) -> Tensor:
    """Draw pairs of units without replacement, uniformly, of shape ``(pairs, 2)``."""
    total = size * (size - 1) // 2
    if total <= pairs:
        return torch.combinations(torch.arange(size))
    found: dict[tuple[int, ...], None] = {}
    while len(found) < pairs:
        pair = torch.randperm(size, generator=generator, device=generator.device)[:2]
        found[tuple(sorted(pair.tolist()))] = None
    return torch.tensor(list(found))
