"""Activation matching: permute one network so that its units behave like another's on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from lightning_symmetry.permutation.assignment import best_assignment, best_blocks, top_groups, update
from lightning_symmetry.permutation.axes import Axis
from lightning_symmetry.permutation.layout import free_atoms, normal, positions_of
from lightning_symmetry.permutation.spec import PermutationSpec, trace_permutations
from lightning_symmetry.permutation.terms import Atom, Concat, Term, Tree
from lightning_symmetry.permutation.trace import Call, operation, run_plainly, tensors_in
from lightning_symmetry.permutation.weights import Match

Inputs = Callable[[Any], Any]


def first_of_batch(batch: Any) -> Any:
    """Return what the network is called with for ``(input, target)`` batches, graphs, or inputs alone."""
    if hasattr(batch, "edge_index"):
        return batch.x, batch.edge_index
    return batch[0] if isinstance(batch, tuple | list) else batch


def match_activations(
    a: nn.Module,
    b: nn.Module,
    spec: PermutationSpec,
    dataloader: Iterable[Any],
    *,
    inputs: Inputs = first_of_batch,
    num_batches: int | None = None,
    progress: bool = False,
) -> Match:
    r"""Find permutations of ``b`` that bring its units' activations close to those of ``a``.

    .. math:: \max_P \sum_i \mathrm{corr}(z_i^{(a)}, z_{P(i)}^{(b)})

    over the samples, for each group by itself; blocks (attention heads) are assigned together with the units within
    them. Where a group's units are seen at several places (along a residual stream) their correlations are summed. All
    statistics come from one pass over the data, in evaluation mode.

    Args:
        a: The network to come close to.
        b: The one to permute; neither is changed.
        spec: The symmetries, from :func:`trace_permutations` of either.
        dataloader: Batches; any iterable.
        inputs: What the network is called with for a batch. Default: its first part, or a graph's nodes and edges.
        num_batches: Most batches to use; default all.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If there are no batches, nothing can be permuted, or the networks run different operations.

    Source: Ainsworth, Hayase, Srinivasa: Git Re-Basin (2023), section 3.1; Li et al., Convergent learning (2016).
    """
    if not spec.groups:
        raise ValueError(spec.why_nothing())
    batches = iter(dataloader)
    first = next(batches, None)
    if first is None:
        raise ValueError("The dataloader gave no batches to match activations on.")
    device = next((parameter.device for parameter in a.parameters()), torch.device("cpu"))
    taps = _taps(a, spec, _to(inputs(first), device))
    sums: dict[_Tap, _Correlation] = {}
    total = min(num_batches or len(dataloader), len(dataloader)) if hasattr(dataloader, "__len__") else num_batches
    bar = tqdm(chain([first], batches), total=total, desc="activation matching", disable=not progress, leave=False)
    for number, batch in enumerate(bar):
        if number == num_batches:
            break
        example = _to(inputs(batch), device)
        ours, theirs = (_Collector(taps) for _ in range(2))
        run_plainly(a, example, ours)
        run_plainly(b, example, theirs)
        for tap in taps:
            if tap not in ours.seen or tap not in theirs.seen:
                raise ValueError(f"The networks do not run the same operations: {tap.name} in {tap.module} is missing.")
            sums.setdefault(tap, _Correlation()).add(ours.seen[tap], theirs.seen[tap])
    return _assign(spec, taps, {tap: correlation.matrix() for tap, correlation in sums.items()})


@dataclass(frozen=True, eq=False)
class _Tap:
    """A place in the forward pass where units are seen.

    Attributes:
        call: Number of the operation.
        name: Its name.
        module: The module that runs it.
        output: Which of its outputs.
        axis: Axis of the units, counted from the end where the batch may come first.
        index: Positions of each unit along the axis, of shape ``(units, k)``.
        group: The group, or the group of blocks whose slots these units are.
        slot: The slot; None for the units of the group itself.
    """

    call: int
    name: str
    module: str
    output: int
    axis: int
    index: Tensor
    group: str
    slot: int | None


def _taps(net: nn.Module, spec: PermutationSpec, example: Any) -> list[_Tap]:
    """Find where each group's units are seen: where they come out of a product or a sum, else anywhere."""
    traced = trace_permutations(net, example)
    if set(traced.groups) != set(spec.groups):
        raise ValueError("The network has other symmetries on this data than `spec` says: trace it on a batch of it.")
    atom_of = {name: atom for atom, name in traced.names.items()}
    wanted: dict[tuple[str, int | None], list[Atom]] = {}
    for group in top_groups(traced):
        kinds = traced.blocks.get(group.name, ())
        wanted.update({(group.name, slot): [atom_of[name] for name in names] for slot, names in enumerate(kinds)})
        if not kinds:
            wanted[group.name, None] = [atom_of[group.name]]
    produced, anywhere = [], []
    for number, call in enumerate(traced.trace.calls):
        if call.flows:
            for output, axes in enumerate(call.axes):
                seen = list(_seen(number, call, output, axes, wanted))
                anywhere += seen
                produced += seen if call.produced else []
    known = {(tap.group, tap.slot) for tap in produced}
    return produced + [tap for tap in anywhere if (tap.group, tap.slot) not in known]


def _seen(
    number: int, call: Call, output: int, axes: list[Axis], wanted: dict[tuple[str, int | None], list[Atom]]
) -> Iterator[_Tap]:
    """Yield the taps of one tensor that comes out of an operation."""
    for axis, known in enumerate(axes):
        if known.parents or known.size == 1:
            continue
        term = normal(known.table[()])
        inside = set(free_atoms(term))
        if not inside or _repeats(term):
            continue
        for (group, slot), units in wanted.items():
            if inside.issuperset(units):
                index = torch.cat([torch.cat(positions_of(term, unit), dim=1) for unit in units])
                yield _Tap(number, call.name, call.module, output, axis, index, group, slot)


def _repeats(term: Term) -> bool:
    """Whether units stand behind frozen blocks, such as samples: how many there are changes with the batch."""
    if isinstance(term, Tree):
        return isinstance(term.outer, Atom) and term.outer.frozen is not None
    return isinstance(term, Concat) and any(map(_repeats, term.parts))


class _Collector(TorchDispatchMode):
    """Keeps what comes out at the taps."""

    def __init__(self, taps: list[_Tap]) -> None:
        super().__init__()
        self._wanted: dict[int, list[_Tap]] = {}
        for tap in taps:
            self._wanted.setdefault(tap.call, []).append(tap)
        self._number = 0
        self.seen: dict[_Tap, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and keep its output, if wanted."""
        out = func(*args, **(kwargs or {}))
        for tap in self._wanted.get(self._number, ()):
            if operation(func)[0] == tap.name:
                units = tensors_in(out)[tap.output].movedim(tap.axis, 0)
                units = units[tap.index.flatten().to(units.device)].reshape(len(tap.index), -1)
                self.seen[tap] = units.float() if units.dtype.itemsize < 4 else units.clone()
        self._number += 1
        return out


class _Correlation:
    """Pearson correlation of two sets of units over samples that arrive batch by batch."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[Tensor] = []

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add samples: ``a`` and ``b`` of shape ``(units, samples)``."""
        b = b.to(a.device)
        if self.count == 0:
            self.centre = a.double().mean(1, keepdim=True), b.double().mean(1, keepdim=True)
        a, b = a - self.centre[0].to(a.dtype), b - self.centre[1].to(b.dtype)
        new = [a.sum(1).double(), b.sum(1).double(), a.square().sum(1).double(), b.square().sum(1).double()]
        new.append((a @ b.T).double())
        self.sums = [old + value for old, value in zip(self.sums, new, strict=True)] if self.count else new
        self.count += a.shape[1]

    def matrix(self) -> Tensor:
        """Return the correlations; 0 for units that never change."""
        a, b, aa, bb, ab = self.sums
        covariance = ab - torch.outer(a, b) / self.count
        scale = torch.outer(
            (aa - a * a / self.count).clamp_min(0).sqrt(), (bb - b * b / self.count).clamp_min(0).sqrt()
        )
        return torch.where(scale > 0, covariance / scale, 0).cpu()


def _assign(spec: PermutationSpec, taps: list[_Tap], correlations: dict[_Tap, Tensor]) -> Match:
    permutations = spec.identity()
    before = after = 0.0
    for group in top_groups(spec):
        sums: dict[int | None, Tensor] = {}
        for tap in taps:
            if tap.group == group.name:
                sums[tap.slot] = sums.get(tap.slot, 0) + correlations[tap]
        kinds = spec.blocks.get(group.name, ())
        inside = {
            slot: total.view(2 * (len(kinds[slot]), spec.groups[kinds[slot][0]].size))
            for slot, total in sums.items()
            if slot is not None
        }
        whole = sums.get(None, torch.zeros(group.size, group.size, dtype=torch.float64))
        if inside:
            outer, inner, gained = best_blocks(whole, inside)
            now = sum(float(gain.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum()) for gain in inside.values())
        else:
            outer, gained = best_assignment(whole)
            inner, now = {}, float(whole.diagonal().sum())
        before, after = before + now, after + now + gained
        permutations = update(spec, permutations, group, outer, inner)
    return Match(permutations, before, after)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to(part, device) for part in value)
    return value.to(device) if hasattr(value, "to") else value
