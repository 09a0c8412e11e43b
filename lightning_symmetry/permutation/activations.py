"""Activation matching: permute one network so that its units behave like another's on data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from lightning_symmetry.landscape.batches import to_device
from lightning_symmetry.permutation.assignment import best_assignment, best_blocks, top_groups, update
from lightning_symmetry.permutation.axes import Axis
from lightning_symmetry.permutation.layout import free_atoms, normal, positions_of
from lightning_symmetry.permutation.running import run_plainly, tensors_in
from lightning_symmetry.permutation.spec import PermutationSpec, check_shapes, trace_permutations
from lightning_symmetry.permutation.terms import Atom, Concat, Term, Tree
from lightning_symmetry.permutation.trace import Call, operation
from lightning_symmetry.permutation.weights import Match, check_finite
from lightning_symmetry.surgery import device_of

Inputs = Callable[[Any], Any]
_MOST_PASSES = 5


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
    statistics come from one pass over the data, in evaluation mode; where units of several groups stand in one place
    (channels within the groups of a convolution, heads that share keys) some more passes, over batches that are kept
    in memory, align one after the other.

    Args:
        a: The network to come close to.
        b: The one to permute; neither is changed.
        spec: The symmetries, from :func:`trace_permutations` of either.
        dataloader: Batches; any iterable.
        inputs: What the network is called with for a batch. Default: its first part, or a graph's nodes and edges.
        num_batches: Most batches to use; default all.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If there are no batches, nothing can be permuted, the networks are not of the spec's architecture,
            run different operations, or have weights that are not finite.

    Source: Ainsworth, Hayase, Srinivasa: Git Re-Basin (2023), section 3.1; Li et al., Convergent learning (2016).
    """
    if num_batches is not None and num_batches < 1:
        raise ValueError(f"Expected `num_batches` to be at least 1 but got {num_batches}.")
    if not spec.groups:
        raise ValueError(spec.why_nothing())
    for title, net in (("first", a), ("second", b)):
        state = {name: tensor for name, tensor in net.state_dict().items() if isinstance(tensor, Tensor)}
        check_shapes(spec.shapes, {name: tensor.shape for name, tensor in state.items()}, "the traced network")
        check_finite({name: state[name] for name in spec.moved}, f"the {title} network")
    batches = islice(dataloader, num_batches)
    total = min(filter(None, (num_batches, length_hint(dataloader))), default=None)
    bar = tqdm(batches, "activation matching", total, disable=not progress, leave=False)
    if not _interlocked(spec):
        return _pass(a, b, spec, bar, inputs)
    kept = list(bar)
    match = _pass(a, b, spec, kept, inputs)
    moved = copy.deepcopy(b)
    for sweep in range(2, _MOST_PASSES + 1):
        moved.load_state_dict(spec.apply(b.state_dict(), match.permutations))
        step = _pass(a, moved, spec, kept, inputs)
        if not step.after > step.before + 1e-6:
            break
        match = Match(spec.compose(match.permutations, step.permutations), match.before, step.after, sweep)
    return match


def _interlocked(spec: PermutationSpec) -> bool:
    """Whether units are seen together whose permutations are chosen apart: some entry belongs to several groups."""
    for within in (False, True):
        positions: dict[tuple[str, int], list[Tensor]] = {}
        for group in spec.groups.values():
            if within == (group.block_of is not None):
                for place in group.places:
                    positions.setdefault((place.tensor, place.axis), []).append(place.index.flatten())
        if any(int(torch.cat(own).bincount().max()) > 1 for own in positions.values()):
            return True
    return False


def _pass(a: nn.Module, b: nn.Module, spec: PermutationSpec, batches: Iterable[Any], inputs: Inputs) -> Match:
    """Match by one pass over the data."""
    taps: dict[tuple[torch.Size, ...], list[_Tap]] = {}
    sums: dict[_Tap, _Correlation] = {}
    for batch in batches:
        example = to_device(inputs(batch), device_of(a))
        shapes = tuple(tensor.shape for tensor in tensors_in(example))
        if shapes not in taps:  # where units stand may depend on the size of a batch, as which operations run does
            taps[shapes] = _taps(a, spec, example)
        ours, theirs = (_Collector(taps[shapes]) for _ in range(2))
        run_plainly(a, example, ours)
        run_plainly(b, to_device(example, device_of(b)), theirs)
        for tap in taps[shapes]:
            if tap not in ours.seen or tap not in theirs.seen or ours.seen[tap].shape != theirs.seen[tap].shape:
                raise ValueError(
                    f"The networks do not run the same operations: {tap.name} in {tap.module} differs or is missing."
                )
            sums.setdefault(tap, _Correlation()).add(ours.seen[tap], theirs.seen[tap])
    if not sums:
        raise ValueError("The dataloader gave no batches to match activations on.")
    return _assign(spec, {tap: correlation.matrix() for tap, correlation in sums.items()})


@dataclass(frozen=True)
class _Tap:
    """A place in the forward pass where units are seen.

    Attributes:
        call: Number of the operation.
        name: Its name.
        module: The module that runs it.
        output: Which of its outputs.
        axis: Axis of the units.
        group: The group, or the group of blocks whose slots these units are.
        slot: The slot; None for the units of the group itself.
        index: Positions of each unit along the axis, of shape ``(units, k)``.
    """

    call: int
    name: str
    module: str
    output: int
    axis: int
    group: str
    slot: int | None
    index: Tensor = field(compare=False)


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
        if call.flows and call.name != "alias":  # views that have different names on different inputs
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
                yield _Tap(number, call.name, call.module, output, axis, group, slot, index)


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
                units = tensors_in(out)[tap.output]
                units = (torch.view_as_real(units) if units.is_complex() else units).movedim(tap.axis, 0)
                units = units[tap.index.flatten().to(units.device)].reshape(len(tap.index), -1)  # a copy
                self.seen[tap] = units.float() if units.dtype.itemsize < 4 or not units.is_floating_point() else units
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
            self.rounding = 4 * torch.finfo(a.dtype).eps
        a, b = a - self.centre[0].to(a.dtype), b - self.centre[1].to(b.dtype)
        new = [a.sum(1).double(), b.sum(1).double(), a.square().sum(1).double(), b.square().sum(1).double()]
        new.append((a @ b.T).double())
        self.sums = [old + value for old, value in zip(self.sums, new, strict=True)] if self.count else new
        self.count += a.shape[1]

    def matrix(self) -> Tensor:
        """Return the correlations; 0 for units that never change but by rounding, or are not finite."""
        a, b, aa, bb, ab = self.sums
        covariance = ab - torch.outer(a, b) / self.count
        scales = []
        for total, square, centre in ((a, aa, self.centre[0]), (b, bb, self.centre[1])):
            variance = square - total * total / self.count
            least = self.count * (self.rounding * centre.flatten()).square()
            scales.append(torch.where(variance > least, variance, 0).sqrt())
        scale = torch.outer(*scales)
        return torch.where((scale > 0) & scale.isfinite() & covariance.isfinite(), covariance / scale, 0).cpu()


def _assign(spec: PermutationSpec, correlations: dict[_Tap, Tensor]) -> Match:
    """Return the best permutations of each group, given the correlations of its units at each tap."""
    permutations = spec.identity()
    before = after = 0.0
    for group in top_groups(spec):
        sums: dict[int | None, Tensor] = {}
        for tap, correlation in correlations.items():
            if tap.group == group.name:
                sums[tap.slot] = sums.get(tap.slot, 0) + correlation
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
