"""Moments and directions of a weight in its factors, compared with dense float64 references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_symmetry.surgery.factor_moments import factor_direction, factor_gradient, factor_squares

N, M = 7, 5
KINDS = {
    "spectral": lambda left, right: _balanced(left, right),
    "any": lambda left, right: (left, right),
    "uneven": lambda left, right: (3 * left, right / 5),
}


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vt = torch.linalg.svd(left @ right.mT, full_matrices=False)
    rank = left.shape[-1]
    root = s[..., :rank].sqrt().unsqueeze(-2)
    return u[..., :rank] * root, vt.mT[..., :rank] * root


def case(rank: int, kind: str, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.randn(groups, size, rank, generator=generator).double() for size in (N, M)]
    return torch.randn(groups, N, M, generator=generator).double(), *KINDS[kind](*draw)


def jacobian(left: Tensor, right: Tensor) -> Tensor:
    """Of the product's entries in those of the factors, of shape (N M, (N + M) r)."""
    parts = torch.autograd.functional.jacobian(lambda u, v: u @ v.T, (left, right))
    return torch.cat([part.flatten(2).flatten(0, 1) for part in parts], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_direction_is_the_least_of_the_nearest(rank, kind):
    direction, left, right = case(rank, kind)
    ours = factor_direction(direction, left, right)
    for group in range(2):
        expected = torch.linalg.pinv(jacobian(left[group], right[group])) @ direction[group].flatten()
        found = torch.cat([part[group].flatten() for part in ours])
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("rank", [2, 5])
def test_the_product_moves_by_the_projection_on_the_tangent_space(rank):
    direction, left, right = case(rank, "spectral")
    du, dv = factor_direction(direction, left, right)
    p, q = (torch.linalg.qr(factor).Q for factor in (left, right))
    inside = p @ p.mT @ direction @ q @ q.mT
    projected = p @ p.mT @ direction + direction @ q @ q.mT - inside
    torch.testing.assert_close(du @ right.mT + left @ dv.mT, projected, rtol=1e-9, atol=1e-10)
    balance = left.mT @ du + du.mT @ left - right.mT @ dv - dv.mT @ right
    assert balance.abs().max() < 1e-10
    if rank == M:
        torch.testing.assert_close(projected, direction, rtol=1e-9, atol=1e-10)


def test_small_singular_values_do_not_blow_the_direction_up():
    direction, left, right = case(3, "spectral")
    scale = torch.tensor([1.0, 1e-4, 0.0]).double()
    for factors in ((left * scale, right * scale), (left, right * scale), (left * 0, right), (left * 0, right * 0)):
        parts = factor_direction(direction, *factors)
        assert all(part.isfinite().all() for part in parts)
        largest = max(float(torch.linalg.matrix_norm(f, 2).max()) for f in factors) or 1.0
        bound = float(direction.norm()) * 10**1.5 * 10**1.5 / min(largest, 1.0)
        assert max(float(part.norm()) for part in parts) < bound


def test_gradients_follow_the_chain_rule():
    gradient, left, right = case(3, "any")
    leaves = left.requires_grad_(), right.requires_grad_()
    expected = torch.autograd.grad(((leaves[0] @ leaves[1].mT) * gradient).sum(), leaves)
    for ours, value in zip(factor_gradient(gradient, left, right), expected, strict=True):
        torch.testing.assert_close(ours.detach(), value)


def test_second_moments_are_those_of_uncorrelated_noise():
    """Compared with the covariance of vec(G), which is diagonal, mapped through vec(G V) = J vec(G)."""
    mean, left, right = case(3, "any", groups=1)
    variance = mean.roll(1, -1).square()
    means, noise = factor_squares(variance + mean.square(), mean, left, right)
    for index, map_ in enumerate((lambda g: g @ right[0], lambda g: g.T @ left[0])):
        j = torch.autograd.functional.jacobian(map_, mean[0]).flatten(2).flatten(0, 1)
        second = (j @ variance[0].flatten().diag() @ j.T).diag() + (j @ mean[0].flatten()).square()
        torch.testing.assert_close((means[index] + noise[index])[0].flatten(), second)
    unknown = factor_squares(variance, None, left, right)
    assert not unknown[0][0].any()
    torch.testing.assert_close(unknown[1][0], variance @ right.square())


def test_second_moments_are_no_less_than_the_first_ones_squared():
    mean, left, right = case(4, "any")
    means, noise = factor_squares(mean.square() * 0.5, mean, left, right)  # less than the mean allows: rounding, decay
    for square, rest, first in zip(means, noise, factor_gradient(mean, left, right), strict=True):
        assert bool((square + rest >= first.square()).all())
