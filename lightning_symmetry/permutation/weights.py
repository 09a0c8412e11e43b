"""Weight matching: permute one network so that its weights are as close as possible to another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.permutation.assignment import best_assignment, best_blocks, top_groups, update
from lightning_symmetry.permutation.quadratic import relaxed_assignment, rows
from lightning_symmetry.permutation.spec import Group, PermutationSpec, Place, check_shapes

_NOT_WEIGHTS = ("running_mean", "running_var")  # statistics of the data; their scale would outweigh the weights


@dataclass(frozen=True)
class Match:
    """Permutations of a network that bring it close to another.

    Attributes:
        permutations: One for each group of the spec, to apply to the second network.
        before: Similarity before.
        after: Similarity after.
        sweeps: How often all groups were gone through.
    """

    permutations: dict[str, Tensor]
    before: float
    after: float
    sweeps: int = 1


def match_weights(
    a: nn.Module | Mapping[str, Tensor],
    b: nn.Module | Mapping[str, Tensor],
    spec: PermutationSpec,
    *,
    restarts: int | None = None,
    generator: torch.Generator | None = None,
    max_sweeps: int = 100,
    progress: bool = False,
) -> Match:
    r"""Find permutations P of ``b`` that bring its weights close to those of ``a``.

    .. math:: \max_P \sum_t \langle \theta_a^{(t)}, (P \theta_b)^{(t)} \rangle

    over all tensors that are permuted but running statistics, which minimises :math:`\|\theta_a - P \theta_b\|`.
    Coordinate descent: given all other permutations that of one group solves a linear assignment problem; blocks
    (attention heads) are assigned together with the units within them. A group that acts twice on a tensor, such as the
    weight of a recurrence, makes that a quadratic problem, which is solved approximately. A step is only taken where it
    increases the similarity, so that the descent ends.

    Args:
        a: The network, or state dict, to come close to.
        b: The one to permute; neither is changed.
        spec: The symmetries, from :func:`trace_permutations` of either.
        restarts: How often to descend; the best end counts. The first goes through the groups to and fro, the others
            in random orders (and, with quadratic problems, from random elements). Default: from 8 for small networks
            to 1 for those with a thousand units a layer.
        generator: Source of the random orders; by default they are the same every time.
        max_sweeps: Most sweeps of a descent.
        progress: Whether to show a progress bar over the restarts.

    Raises:
        ValueError: If the networks are not of the spec's architecture, have weights that are not finite, or nothing
            can be permuted.

    Source: Ainsworth, Hayase, Srinivasa: Git Re-Basin (2023), section 3.2.
    """
    theirs, ours = _state(a), _state(b)
    for state in (theirs, ours):
        check_shapes(spec.shapes, {name: tensor.shape for name, tensor in state.items()}, "the traced network")
    if not spec.groups:
        raise ValueError(spec.why_nothing())
    restarts = _affordable_restarts(spec) if restarts is None else restarts
    for name, value in (("restarts", restarts), ("max_sweeps", max_sweeps)):
        if value < 1:
            raise ValueError(f"Expected `{name}` to be at least 1 but got {value}.")
    for title, state in (("first", theirs), ("second", ours)):
        check_finite({name: state[name] for name in spec.moved}, f"the {title} network")
    generator = generator or torch.Generator().manual_seed(0)
    best: Match | None = None
    for restart in tqdm(range(restarts), desc="weight matching", disable=not progress, leave=False):
        found = _Descent(theirs, ours, spec).run(generator if restart else None, max_sweeps)
        if best is None or found.after > best.after:
            best = found
    return best


def _affordable_restarts(spec: PermutationSpec) -> int:
    """Return how many descents are done in about a second, from 1 to 8; it depends on the sizes alone."""
    work = 0  # of the assignments
    for group in top_groups(spec):
        twice = len({place.tensor for place in group.places}) < len(group.places)
        work += group.size**3 * (20 if twice else 1)
    return max(1, min(8, int(1e9 / max(work, 1))))


def _state(net: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = net.state_dict() if isinstance(net, nn.Module) else net
    return {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}


def check_finite(state: Mapping[str, Tensor], title: str) -> None:
    """Check that there is neither NaN nor infinity in tensors, but for running statistics.

    Raises:
        ValueError: If there is; the message names the first tensor.
    """
    for name, tensor in state.items():
        if not name.endswith(_NOT_WEIGHTS) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of {title} is not finite (it has diverged), so that nothing is similar to it.")


class _Descent:
    """One coordinate descent.

    ``self.b`` holds the second network's tensors as they are permuted so far.
    """

    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], spec: PermutationSpec) -> None:
        self.spec = spec
        names = [name for name in spec.moved if not name.endswith(_NOT_WEIGHTS)]
        dtype = torch.float32
        for name in names:
            dtype = torch.promote_types(dtype, a[name].dtype.to_real())
        self.a = {name: _real(a[name]).to(dtype) for name in names}
        self.b = {name: _real(b[name]).to(a[name].device, dtype) for name in names}
        self.rounding = 1e-12 if dtype == torch.float64 else 1e-6
        self.permutations = spec.identity()
        self.rows: dict[str, Tensor] = {}
        self.places = {
            name: [place for place in group.places if place.tensor in self.a] for name, group in spec.groups.items()
        }
        sizes = {name: float(self.a[name].norm() * self.b[name].norm()) for name in names}
        self.touched = {name: self._touched(group) for name, group in spec.groups.items()}
        self.scale = {name: sum(sizes[tensor] for tensor in tensors) for name, tensors in self.touched.items()}
        self.exact = {name: self._is_exact(group) for name, group in spec.groups.items()}

    def similarity(self, names: Iterable[str] | None = None) -> float:
        """Return the inner product of the two networks' tensors."""
        chosen = self.a if names is None else names
        return sum(float((self.a[name] * self.b[name]).sum(dtype=torch.float64)) for name in chosen)

    def run(self, generator: torch.Generator | None, max_sweeps: int) -> Match:
        """Descend until no group can be improved, through the groups to and fro, or in random orders."""
        before = self.similarity()
        if generator is not None and not all(self.exact.values()):
            self.permutations = self.spec.random(generator)
            self.b = {name: self.spec.permute(name, tensor, self.permutations) for name, tensor in self.b.items()}
        groups = self._coordinates()
        touched = [self.touched[group.name].keys() for group in groups]
        open_ = [True] * len(groups)  # groups whose surroundings have changed since they were last assigned
        sweeps = 0
        while any(open_) and sweeps < max_sweeps:
            sweeps += 1
            order = range(len(groups)) if sweeps % 2 else reversed(range(len(groups)))
            if generator is not None:
                order = torch.randperm(len(groups), generator=generator).tolist()
            for number in order:
                if open_[number]:
                    open_[number] = False
                    if self._improve(groups[number], generator):
                        for other in range(len(groups)):
                            if not touched[number].isdisjoint(touched[other]):
                                open_[other] |= other != number or not self.exact[groups[number].name]
        return Match(self.permutations, before, self.similarity(), sweeps)

    def _coordinates(self) -> list[Group]:
        """Return the groups that are assigned: all but those within blocks that are assigned with their blocks."""
        alone = []
        for name, group in self.spec.groups.items():
            within = group.block_of is not None
            joint = within and self.exact[group.block_of] and self.spec.groups[group.block_of].block_of is None
            if self.touched[name] and not joint:
                alone.append(group)
        return alone

    def _members(self, group: Group) -> list[tuple[int | None, str]]:
        """Return the slot and the name of the groups that are assigned together."""
        kinds = enumerate(self.spec.blocks.get(group.name, ()))
        return [(None, group.name), *((slot, name) for slot, kind in kinds for name in kind)]

    def _touched(self, group: Group) -> dict[str, None]:
        """Return the tensors that a step moves, in order."""
        return {place.tensor: None for _, name in self._members(group) for place in self.places[name]}

    def _is_exact(self, group: Group) -> bool:
        """Whether the gain of the group, and of the units in its blocks, is a sum over single units.

        It is not where a tensor has two axes that a step moves, or an entry is within two slots.
        """
        axes: dict[str, set[int]] = {}
        owner: dict[tuple[str, int, int], int] = {}
        for slot, name in self._members(group):
            for place in self.places[name]:
                axes.setdefault(place.tensor, set()).add(place.axis)
                if slot is not None:
                    for position in place.index.flatten().tolist():
                        if owner.setdefault((place.tensor, place.axis, position), slot) != slot:
                            return False
        deeper = any(name in self.spec.blocks for slot, name in self._members(group) if slot is not None)
        return not deeper and all(len(found) == 1 for found in axes.values())

    def _improve(self, group: Group, generator: torch.Generator | None) -> bool:
        least = self.rounding * max(self.scale[group.name], 1e-30)
        kinds = self.spec.blocks.get(group.name, ())
        if kinds:
            inside = {slot: self._gain_inside(names) for slot, names in enumerate(kinds)}
            outer, inner, gained = best_blocks(self._gain_of_blocks(group, kinds), inside)
            if gained > least and self._take(group, outer, inner):
                return True
            if self.exact[group.name]:
                return False
        if not self.exact[group.name]:
            outer = relaxed_assignment(self.a, self.b, self.places[group.name], generator)
            if self._take(group, outer, {}):
                return True
        outer, gained = best_assignment(self._gain(group))
        return gained > least and self._take(group, outer, {})

    def _take(self, group: Group, outer: Tensor, inner: Mapping[int, Tensor]) -> bool:
        """Permute the tensors; undo it where the gain was not exact and there is none after all."""
        step = {group.name: outer}
        for slot, table in inner.items():
            step.update(zip(self.spec.blocks[group.name][slot], table, strict=True))
        touched = self.touched[group.name]
        previous = {name: self.b[name] for name in touched}
        old = None if self.exact[group.name] else self.similarity(touched)
        self.b.update((name, self.spec.permute(name, self.b[name], step)) for name in touched)
        if old is not None and self.similarity(touched) <= old + self.rounding * self.scale[group.name]:
            self.b.update(previous)
            return False
        self.permutations = update(self.spec, self.permutations, group, outer, inner)
        return True

    def _gain(self, group: Group) -> Tensor:
        """Return the similarity of each unit of ``a`` with each of ``b``."""
        places = self.places[group.name]
        if group.name not in self.rows:
            self.rows[group.name] = torch.cat([rows(self.a[place.tensor], place) for place in places], dim=1)
        return self.rows[group.name] @ torch.cat([rows(self.b[place.tensor], place) for place in places], dim=1).T

    def _gain_inside(self, names: tuple[str, ...]) -> Tensor:
        """Return the similarity of all units of one slot in all blocks, of shape ``(n, d, n, d)``."""
        count, size = len(names), self.spec.groups[names[0]].size
        total = 0
        for number in range(len(self.places[names[0]])):
            joint = [self.places[name][number] for name in names]
            place = Place(joint[0].tensor, joint[0].axis, torch.cat([p.index for p in joint]))
            total = total + rows(self.a[place.tensor], place) @ rows(self.b[place.tensor], place).T
        if isinstance(total, int):
            total = torch.zeros(count * size, count * size)
        return total.view(count, size, count, size)

    def _gain_of_blocks(self, group: Group, kinds: tuple[tuple[str, ...], ...]) -> Tensor:
        """Return the similarity of blocks over the positions that are not permuted within them."""
        taken: dict[tuple[str, int], set[int]] = {}
        for name in (name for kind in kinds for name in kind):
            for place in self.places[name]:
                taken.setdefault((place.tensor, place.axis), set()).update(place.index.flatten().tolist())
        total = torch.zeros(group.size, group.size)
        for place in self.places[group.name]:
            covered = taken.get((place.tensor, place.axis), set())
            kept = [k for k in range(place.index.shape[1]) if int(place.index[0, k]) not in covered]
            if kept:
                rest = Place(place.tensor, place.axis, place.index[:, kept])
                total = total + (rows(self.a[place.tensor], rest) @ rows(self.b[place.tensor], rest).T).cpu()
        return total


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor of real numbers; a last axis of two holds complex ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
