"""Choose the permutation of a group that acts on two axes of one tensor, such as the weight of a recurrence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_symmetry.permutation.assignment import best_assignment
from lightning_symmetry.permutation.spec import Place

_MOST_STEPS = 30


def relaxed_assignment(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], places: Sequence[Place], generator: torch.Generator | None = None
) -> Tensor:
    r"""Return a permutation of ``b`` that brings it close to ``a``: a good one, not always the best.

    .. math:: \max_P \sum_t \langle \theta_a^{(t)}, P \theta_b^{(t)} \rangle

    with P on every axis of the places is a quadratic assignment problem. P is relaxed to doubly stochastic matrices,
    from their centre goes to and fro between the best vertex for the gradient and the best point on the way to it, and
    is rounded to a permutation in the end.

    Args:
        a: Tensors by name.
        b: Those to permute.
        places: Where the units stand.
        generator: Where given the start is half way from the centre to a random permutation.

    Source: Vogelstein et al., Fast approximate quadratic programming for graph matching (2015).
    """
    by_tensor: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_tensor[place.tensor].append(place)
    size = len(places[0].index)
    first = a[places[0].tensor]
    mix = torch.full((size, size), 1 / size, dtype=first.dtype, device=first.device)
    if generator is not None:
        mix = (mix + _matrix(torch.randperm(size, generator=generator), mix)) / 2
    for _ in range(_MOST_STEPS):
        gain = _gradient(a, b, by_tensor, mix)
        vertex = _matrix(best_assignment(gain)[0], mix)
        slope = float(((vertex - mix) * gain).sum(dtype=torch.float64))
        value, end = _value(a, b, by_tensor, mix), _value(a, b, by_tensor, vertex)
        if slope <= 1e-3 * max(abs(value), abs(end)):
            break
        bend = end - value - slope
        step = min(1.0, -slope / (2 * bend)) if bend < 0 else 1.0
        mix = mix + step * (vertex - mix)
    return best_assignment(mix)[0]


def _matrix(permutation: Tensor, like: Tensor) -> Tensor:
    return torch.eye(len(permutation), dtype=like.dtype)[permutation].to(like.device)


def _gradient(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], places: Mapping[str, list[Place]], mix: Tensor
) -> Tensor:
    """Return the derivative of the value by the matrix: of each axis, while the others stay."""
    total = torch.zeros_like(mix)
    for name, own in places.items():
        for place in own:
            others = b[name]
            for other in own:
                if other is not place:
                    others = _mixed(others, other, mix)
            total += rows(a[name], place) @ rows(others, place).T
    return total


def _value(a: Mapping[str, Tensor], b: Mapping[str, Tensor], places: Mapping[str, list[Place]], mix: Tensor) -> float:
    total = 0.0
    for name, (first, *others) in places.items():
        mixed = b[name]
        for place in others:
            mixed = _mixed(mixed, place, mix)
        total += float(((rows(a[name], first) @ rows(mixed, first).T) * mix).sum(dtype=torch.float64))
    return total


def _mixed(tensor: Tensor, place: Place, mix: Tensor) -> Tensor:
    """Return a tensor whose units are linear combinations of those it had."""
    moved = tensor.movedim(place.axis, 0).clone()
    for positions in place.index.T.to(tensor.device):
        moved[positions] = torch.tensordot(mix, moved[positions], 1)
    return moved.movedim(0, place.axis)


def rows(tensor: Tensor, place: Place) -> Tensor:
    """Return the entries that belong to each unit, of shape ``(units, entries)``."""
    moved = tensor.movedim(place.axis, 0)
    index = place.index
    whole = index.shape[1] == 1 and len(index) == len(moved)
    if not (whole and bool((index[:, 0] == torch.arange(len(index))).all())):
        moved = moved[index.flatten().to(tensor.device)]
    return moved.reshape(len(index), -1)
