r"""The compact embedding of one linear map: pairs of opposite neurons, whose coefficients are solved for.

Let ``B'`` (H x n) feed ``A'`` (rows x H), and let the first D of the n inputs be live, the others constant. Neurons r
and s whose fixed live inputs are disjoint can be made a *pair*, :math:`B'_r = u` and :math:`B'_s = -u`: u is the
constant of r where r is fixed, minus the constant of s where s is fixed, and anything elsewhere. If a row of ``A'`` has
coefficients t and -t on a pair, that pair adds :math:`t \eta(u x) - t \eta(-u x) = t \, u x`, which is linear. So a
row computes :math:`W_i x` exactly once

1. each neuron on which a row of ``A'`` is fixed is in a pair, and no row is fixed on both neurons of a pair: then the
   constant says t for that pair (or -t), and the coefficients on all other neurons can be opposite, or zero;
2. the D equations :math:`\sum_g t_g u_g = W_i` can be solved for the t of the pairs on which row i is free.

Condition 1 is a matching of the neurons, found before any number is known. Given that, the entries of the matrix of
all u are independent and have a density (each is a constant of its own, up to sign, or drawn here), so any D of its
rows are independent with probability one, and condition 2 holds if there are D + n_fix pairs. A neuron in no pair is
free in all rows and gets coefficient zero.

Unlike the paper's construction this needs no copies: what a constant of ``A'`` adds is linear, as it falls on a pair,
and the other pairs make up for it. 2 (D + n_fix) neurons can be enough, instead of 24 n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_symmetry.asymmetry.embed_matching import constants_of, match, numbers
from lightning_symmetry.asymmetry.linear import AsymmetricLinear

_TRIES = 16  # random halvings of the neurons; a bipartite matching joins the halves
_REFINEMENTS = 2  # of the solution, whose last system has the squared condition number


def compact_map(
    weight: Tensor,
    b: AsymmetricLinear,
    a: AsymmetricLinear,
    dead: float,
    generator: torch.Generator,
    title: str,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Find the entries with which ``A' eta(B' x + p) = W x``, where x continues with n - D inputs of one value.

    Args:
        weight: W, of shape ``(m, D)`` and type float64.
        b: The layer B', of shape ``(H, n)``.
        a: The layer A', with m rows or more, which give zero.
        dead: Value of the last n - D inputs.
        generator: Generator of the entries that may be anything.
        title: What to call the map in an error.

    Returns:
        The weights of B' and A' and the bias p of B', which cancels the last n - D inputs.

    Raises:
        ValueError: If the masks do not admit it: which neuron or row, and why.
    """
    live = weight.shape[1]
    fixed_b, constants_b = constants_of(b)
    fixed_a, constants_a = constants_of(a)
    first, second = _pairs(fixed_b[:, :live], fixed_a, generator, title).unbind(1)

    spread = b.kappa or 1.0  # as large as the constants, so that no direction of u stands out
    u = torch.randn(len(first), live, generator=generator, dtype=torch.float64) * spread
    u = torch.where(fixed_b[first, :live], constants_b[first, :live], u)
    u = torch.where(fixed_b[second, :live], -constants_b[second, :live], u)
    weight_b = constants_b.clone()
    weight_b[first, :live], weight_b[second, :live] = u, -u

    target = torch.zeros(len(fixed_a), live, dtype=torch.float64)
    target[: len(weight)] = weight
    given = constants_a[:, first] - constants_a[:, second]
    fixed = fixed_a[:, first] | fixed_a[:, second]
    t = given + _solve(u, fixed, target - given @ u, title)
    weight_a = torch.zeros_like(constants_a)
    weight_a[:, first], weight_a[:, second] = t, -t
    return weight_b, weight_a, -dead * constants_b[:, live:].sum(1)


def _pairs(fixed_b: Tensor, fixed_a: Tensor, generator: torch.Generator, title: str) -> Tensor:
    """Match neurons into pairs that hold each neuron on which a row of A' is fixed.

    Args:
        fixed_b: Where the live inputs of B' are fixed, of shape ``(H, D)``.
        fixed_a: Where A' is fixed, of shape ``(rows, H)``.
        generator: Generator of the halvings that are tried.
        title: What to call the map in an error.

    Returns:
        Neurons of shape ``(pairs, 2)``.

    Raises:
        ValueError: If no such matching was found.
    """
    share_input = fixed_b.float() @ fixed_b.t().float() > 0
    share_row = fixed_a.t().float() @ fixed_a.float() > 0
    compatible = ~(share_input | share_row)
    needed = fixed_a.any(0)
    alone: list[int] = []
    for _ in range(_TRIES):
        order = torch.randperm(len(needed), generator=generator)
        order = order[needed[order].int().argsort(descending=True, stable=True)]
        left, right = order.tensor_split(2)
        partner = match(compatible[left][:, right])
        found = partner >= 0
        pairs = torch.stack([left[found], right[partner[found]]], 1)
        left_over = needed.clone()
        left_over[pairs.flatten()] = False
        if not left_over.any():
            return pairs
        alone = min(alone or numbers(left_over), numbers(left_over), key=len)
    neuron = min(alone, key=lambda j: int(compatible[j].sum()))
    raise ValueError(
        f"{title}: no pairing of the {len(needed)} neurons was found; {len(alone)} stay without a partner, of which "
        f"neuron {neuron} (row {neuron} of B', fixed at the live inputs {numbers(fixed_b[neuron])}; rows "
        f"{numbers(fixed_a[:, neuron])} of A' are fixed on it) could be paired with {int(compatible[neuron].sum())} "
        f"others: {int(share_input[neuron].sum()) - int(share_input[neuron, neuron])} share a fixed live input with "
        f"it, {int(share_row[neuron].sum()) - int(share_row[neuron, neuron])} a row of A' that is fixed on both."
    )


def _solve(u: Tensor, fixed: Tensor, target: Tensor, title: str) -> Tensor:
    r"""Solve ``t_i u = target_i`` for each row i, by the smallest t that is zero at the pairs F fixed in it.

    With u = Q R, t = z Q^T off F and :math:`y = \text{target} R^{-1}`, that is :math:`z (I - Q_F^T Q_F) = y`, or
    :math:`z = y + y Q_F^T (I - Q_F Q_F^T)^{-1} Q_F` by the matrix inversion lemma, of n_fix equations a row.

    Args:
        u: Directions, of shape ``(pairs, D)``.
        fixed: Which pairs are fixed, as many in each row; shape ``(rows, pairs)``.
        target: Shape ``(rows, D)``.
        title: What to call the map in an error.

    Returns:
        t, of shape ``(rows, pairs)``.

    Raises:
        ValueError: If the u of the other pairs do not span the inputs.
    """
    rows, pairs = fixed.shape
    index = fixed.nonzero()[:, 1].view(rows, -1)
    if pairs < u.shape[1] + index.shape[1]:
        raise ValueError(
            f"{title}: row 0 of A' is fixed on {index.shape[1]} of {pairs} pairs of neurons, and the others are too "
            f"few for {u.shape[1]} inputs."
        )
    q, r = torch.linalg.qr(u)
    q_fixed = q[index]
    small = torch.eye(index.shape[1], dtype=u.dtype) - q_fixed @ q_fixed.mT
    t = torch.zeros(rows, pairs, dtype=u.dtype)
    for _ in range(1 + _REFINEMENTS):
        y = torch.linalg.solve_triangular(r, target - t @ u, upper=True, left=False)
        inner = torch.linalg.solve_ex(small, q_fixed @ y.unsqueeze(2)).result
        z = y + (q_fixed.mT @ inner).squeeze(2)
        t += (z @ q.t()).masked_fill_(fixed, 0.0)
    miss = (t @ u - target).norm(dim=1)
    good = miss <= 1e-11 * (target.norm(dim=1) + t.norm(dim=1) * u.norm(dim=1).max())
    if not good.all():
        row = int((~good).nonzero()[0])
        raise ValueError(
            f"{title}: row {row} of A' cannot be solved. The {pairs - index.shape[1]} pairs of neurons free in it "
            f"do not span {u.shape[1]} inputs, or hardly."
        )
    return t
