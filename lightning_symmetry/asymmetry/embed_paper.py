r"""The paper's embedding of one linear map: blocks of 24 neurons, in triples of equal ones.

Block i stands for row i of the n x n map W. Twelve of its neurons, no two of which are fixed at the same input, become
three copies each of :math:`W_i + c`, :math:`-W_i - c`, :math:`c` and :math:`-c` (eqs. 49-52), with which
:math:`\eta((W_i+c)x) - \eta(-(W_i+c)x) - [\eta(cx) - \eta(-cx)] = W_i x`. The other twelve, again not fixed at the same
inputs, become copies of one d (eq. 59). A constant of ``A'`` on one of three copies is cancelled on another (App.
B.3.3).

The paper takes rows 24 i to 24 i + 23 as block i, of which at most one pair may intersect. By its bound, about
``38,000 n_fix^4 / n`` blocks have two such pairs, so n must be far larger than that. As neurons can be numbered in any
way, the twelves are chosen here by the masks, one neuron for each at a time by a bipartite matching. The formulas are
the paper's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_symmetry.asymmetry.embed_matching import constants_of, match, numbers
from lightning_symmetry.asymmetry.linear import AsymmetricLinear

NEURONS = 24  # of a block
_SIGN_OF_W = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)  # of the four triples, eqs. 49-52
_SIGN_OF_C = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
_COEFFICIENT = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)  # eq. 55


def paper_map(weight: Tensor, b: AsymmetricLinear, a: AsymmetricLinear, title: str) -> tuple[Tensor, Tensor]:
    r"""Find the entries with which ``A' eta(B' x) = [W 0; 0 0] x``.

    Args:
        weight: W, of shape ``(m, D)`` and type float64.
        b: The layer B', of shape ``(24 blocks, n)``, with at least m blocks.
        a: The layer A', of shape ``(rows, 24 blocks)``, with at least m rows.
        title: What to call the map in an error.

    Returns:
        The weights of B' and A'.

    Raises:
        ValueError: If the masks do not admit it: which block, and why.
    """
    fixed, constants = constants_of(b)
    mimic, spare = _twelves(fixed, title).tensor_split(2)

    w = torch.zeros(len(mimic), b.in_features, dtype=torch.float64)
    w[: weight.shape[0], : weight.shape[1]] = weight
    w_sign, c_sign = _SIGN_OF_W.repeat_interleave(3), _SIGN_OF_C.repeat_interleave(3)
    c = torch.zeros_like(w)
    for j in range(12):  # c_ij of eq. 39, with B equal to the multiple of W_i that it mimics where it is fixed
        rows = mimic[:, j]
        c += c_sign[j] * torch.where(fixed[rows], constants[rows] - w_sign[j] * w, 0.0)
    d = constants[spare].sum(1)
    weight_b = torch.empty_like(constants)
    for j in range(12):
        weight_b[mimic[:, j]] = w_sign[j] * w + c_sign[j] * c
        weight_b[spare[:, j]] = d
    # Equal to the constants already, but for rounding.
    return torch.where(fixed, constants, weight_b), _corrected(mimic, spare, a, title)


def _twelves(fixed: Tensor, title: str) -> Tensor:
    """Partition the rows of B' into sets of 12, such that no two rows of a set are fixed at the same input.

    The first halves of all blocks come first, then their second halves. Each takes one row of each twelfth of the rows.

    Args:
        fixed: Where B' is fixed, of shape ``(24 blocks, n)``.
        title: What to call the map in an error.

    Returns:
        Rows of B', of shape ``(2 blocks, 12)``.

    Raises:
        ValueError: If a set cannot be filled.
    """
    rounds = torch.arange(len(fixed)).view(12, -1)
    count = rounds.shape[1]
    used = torch.zeros(count, fixed.shape[1], dtype=torch.bool)
    sets = torch.empty(count, 12, dtype=torch.long)
    for j, rows in enumerate(rounds):
        compatible = used.float() @ fixed[rows].t().float() == 0
        choice = match(compatible)
        if (choice < 0).any():
            index = int((choice < 0).nonzero()[0])
            raise ValueError(
                f"{title}: block {index % (count // 2)} cannot be filled. One of its two sets of 12 neurons has {j}, "
                f"fixed at the inputs {numbers(used[index])}, and needs another that is fixed at none of these: "
                f"{int(compatible[index].sum())} of the {count} rows of B' left are not, and other blocks need them."
            )
        sets[:, j] = rows[choice]
        used |= fixed[sets[:, j]]
    return sets


def _corrected(mimic: Tensor, spare: Tensor, a: AsymmetricLinear, title: str) -> Tensor:
    """Give each triple of copies the sum of coefficients that it needs, by its first free copy (App. B.3.3).

    Raises:
        ValueError: If a row of A' is fixed on all three copies.
    """
    fixed, constants = constants_of(a)
    blocks, rows = len(mimic), len(fixed)
    triples = torch.cat([mimic, spare], 1).view(blocks, 8, 3)
    free = ~fixed[:, triples]
    if not free.any(-1).all():
        row, block, triple = (~free.any(-1)).nonzero()[0].tolist()
        raise ValueError(
            f"{title}: row {row} of A' is fixed on all three copies of triple {triple} of block {block} (neurons "
            f"{triples[block, triple].tolist()}): no copy is left to cancel them."
        )
    wanted = torch.zeros(rows, blocks, 8, dtype=torch.float64)
    diagonal = range(min(rows, blocks))
    wanted[diagonal, diagonal, :4] = _COEFFICIENT
    correction = wanted - constants[:, triples].sum(-1)
    copy = free.int().argmax(-1, keepdim=True)
    neuron = triples.expand(rows, -1, -1, -1).gather(-1, copy).flatten(1)
    return constants.scatter(1, neuron, correction.flatten(1))
