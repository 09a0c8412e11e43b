"""Sums of units over scalars, against the units of each scalar."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_symmetry.metanets.scalar_sets import summed_units

SHIFTS = {"as initialised": 0.0, "moderate": 0.7, "mostly positive": 3.0, "mostly zero": -1.5}


def setting(shift: float, hidden: int = 24, dtype: torch.dtype = torch.float64):
    """Return scalars, u, e and a normalisation whose shifts are about ``shift``, of both signs if it is moderate."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    norm = nn.LayerNorm(hidden).double()
    norm.weight.data.copy_(draw(hidden))
    if shift:
        norm.bias.data.copy_(0.7 * draw(hidden) + (shift if abs(shift) > 1 else 0))
    found = 2 * draw(3, 200), draw(hidden), draw(hidden)
    return [value.to(dtype) for value in found], norm.to(dtype)


def direct(x, u, e, norm):
    return norm(x.unsqueeze(-1) * u + e).relu().sum(1)


@pytest.mark.parametrize("name", SHIFTS)
def test_sums_are_those_of_single_scalars(name):
    (x, u, e), norm = setting(SHIFTS[name])
    assert norm(x.unsqueeze(-1) * u + e).gt(0).any()
    torch.testing.assert_close(summed_units(x.sort(1).values, u, e, norm), direct(x, u, e, norm), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("name", SHIFTS)
def test_gradients_are_those_of_single_scalars(name):
    (x, u, e), norm = setting(SHIFTS[name])
    other = copy.deepcopy(norm)
    weights = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for function, layer in ((lambda x, *rest: summed_units(x.sort(1).values, *rest), norm), (direct, other)):
        leaves = [value.clone().requires_grad_() for value in (x, u, e)]
        (function(*leaves, layer) * weights).sum().backward()
        found.append([*(leaf.grad for leaf in leaves), layer.weight.grad, layer.bias.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", ["one unit", "equal slopes", "equal offsets", "parallel", "zero gain", "ties"])
def test_degenerate_units(case):
    (x, u, e), norm = setting(0.7, 1 if case == "one unit" else 24)
    if case == "equal slopes":
        u = torch.ones_like(u)
    elif case == "equal offsets":
        e = torch.full_like(e, 0.3)
    elif case == "parallel":
        e = -0.5 * u  # all units are zero at x = 0.5
    elif case == "zero gain":
        norm.weight.data[::2] = 0
    elif case == "ties":
        x = x.round()
    torch.testing.assert_close(summed_units(x.sort(1).values, u, e, norm), direct(x, u, e, norm), rtol=1e-9, atol=1e-8)


def test_single_precision_and_outliers():
    (x, u, e), norm = setting(0.7, dtype=torch.float32)
    x[0, :3] = torch.tensor([1e4, -1e6, 0.0])
    expected = direct(x.double(), u.double(), e.double(), copy.deepcopy(norm).double())
    found = summed_units(x.sort(1).values, u, e, norm)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-4)


def test_no_scalar_of_no_row():
    (_, u, e), norm = setting(0.7)
    assert summed_units(torch.zeros(0, 5).double(), u, e, norm).shape == (0, 24)
