"""Choose the best permutation of a group: linear assignment problems, jointly for blocks and the units within them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_symmetry.permutation.spec import Group, PermutationSpec


def best_assignment(gain: Tensor) -> tuple[Tensor, float]:
    """Return the permutation q that maximises ``sum_i gain[i, q[i]]``, and how much more that is than the identity.

    Args:
        gain: Similarities of the units of the one network (rows) and the other (columns).
    """
    gain = gain.double().cpu()
    _, columns = linear_sum_assignment(gain.numpy(), maximize=True)
    chosen = torch.from_numpy(columns)
    value = gain.gather(1, chosen[:, None]).sum() - gain.diagonal().sum()
    return chosen, value.item()


def best_blocks(outside: Tensor, inside: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor], float]:
    """Return the best permutation of blocks, with the best permutations within each at its new place.

    Args:
        outside: Similarities of whole blocks, of shape ``(n, n)``, but for the units of the slots.
        inside: For each slot the similarities of all units of all blocks, of shape ``(n, d, n, d)``.

    Returns:
        The permutation q of the blocks; for each slot an array ``(n, d)`` whose row h permutes the units within block
        ``q[h]`` when it has come to place h; and how much more the similarity is than that of the identity.
    """
    value = outside.double().cpu().clone()
    now = value.diagonal().sum()
    count = len(value)
    chosen: dict[int, Tensor] = {}
    for slot, gains in inside.items():
        blocks = gains.double().cpu().permute(0, 2, 1, 3).contiguous()  # (n, n, d, d)
        now += blocks.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).sum()
        chosen[slot] = torch.empty(count, count, blocks.shape[-1], dtype=torch.long)
        for i in range(count):
            for j in range(count):
                _, columns = linear_sum_assignment(blocks[i, j].numpy(), maximize=True)
                chosen[slot][i, j] = torch.from_numpy(columns)
                value[i, j] += blocks[i, j].gather(1, chosen[slot][i, j][:, None]).sum()
    _, columns = linear_sum_assignment(value.numpy(), maximize=True)
    outer = torch.from_numpy(columns)
    rows = torch.arange(count)
    total = value[rows, outer].sum() - now
    return outer, {slot: table[rows, outer] for slot, table in chosen.items()}, total.item()


def top_groups(spec: PermutationSpec) -> list[Group]:
    """Return the groups that are chosen by themselves; those within blocks are chosen with their blocks."""
    return [group for group in spec.groups.values() if group.block_of is None]


def update(
    spec: PermutationSpec, permutations: dict[str, Tensor], group: Group, outer: Tensor, inner: Mapping[int, Tensor]
) -> dict[str, Tensor]:
    """Return the permutations after those of one group, and of the units within its blocks, were composed with them."""
    second = {group.name: outer}
    for slot, table in inner.items():
        second.update(zip(spec.blocks[group.name][slot], table, strict=True))
    if not inner and group.name not in spec.blocks:
        return {**permutations, group.name: permutations[group.name][outer]}
    return spec.compose(permutations, second)
