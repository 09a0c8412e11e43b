"""Factors of eq. 3 in float32: at full rank the function, at less the best weight, against dense float64 references."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from low_rank_reference import best_error, kernel_matrices
from torch import nn

from lightning_symmetry import LowRankConv2d, LowRankEmbedding, LowRankLinear
from lightning_symmetry.low_rank import LowRankConv1d, LowRankLayer, LowRankMultiheadAttention

MODES = ["zeros", "reflect", "replicate", "circular"]


def assert_function_of(low: nn.Module, plain: nn.Module, *inputs: torch.Tensor) -> None:
    """Compare with the plain layer in float64, to 1e-5 of its largest output."""
    wide = copy.deepcopy(plain).double()
    with torch.no_grad():
        ours, expected = (
            net(*(x.to(kind) if x.is_floating_point() else x for x in inputs))
            for net, kind in ((low, torch.float32), (wide, torch.float64))
        )
    ours, expected = (y[0] if isinstance(y, tuple) else y for y in (ours, expected))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


def assert_best(low: LowRankLayer, plain: nn.Module, matrices: list[torch.Tensor]) -> None:
    """The error of the weight is the norm of the singular values that are left out, to 1e-4 of it."""
    error = float((low.canonical_weight().double() - plain.weight.double()).norm())
    best = sum(best_error(matrix, low.rank) ** 2 for matrix in matrices) ** 0.5
    rounding = 1e-6 * float(plain.weight.detach().norm())  # of factors in float32, where next to nothing is left out
    assert error == pytest.approx(best, rel=1e-4, abs=rounding)


@settings(deadline=None, max_examples=150)
@given(
    scheme=st.sampled_from(["kxk-1x1", "1xk-kx1"]),
    channels=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["same", "valid"])),
    mode=st.sampled_from(MODES),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_convolutions(scheme, channels, kernel, stride, padding, mode, dilation, groups, bias, seed, data):
    if padding == "same":
        stride = (1, 1)
        assume(mode == "zeros" or all(d * (k - 1) // 2 < 6 for d, k in zip(dilation, kernel, strict=True)))
    torch.manual_seed(seed)
    sizes = channels[0] * groups, channels[1] * groups, kernel, stride, padding, dilation, groups, bias, mode
    plain = nn.Conv2d(*sizes)
    matrices = kernel_matrices(plain.weight, groups, scheme)
    full = min(matrices[0].shape)
    whole = LowRankConv2d.from_layer(plain, full, scheme=scheme)
    assert_function_of(whole, plain, torch.randn(2, channels[0] * groups, 8, 9))
    assert_best(LowRankConv2d.from_layer(plain, data.draw(st.integers(1, full)), scheme=scheme), plain, matrices)


@settings(deadline=None, max_examples=40)
@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    mode=st.sampled_from(MODES),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 3),
    data=st.data(),
)
def test_one_dimensional_convolutions(kernel, stride, padding, mode, dilation, groups, data):
    plain = nn.Conv1d(3 * groups, 4 * groups, kernel, stride, padding, dilation, groups, True, mode)
    matrices = kernel_matrices(plain.weight, groups, "kxk-1x1")
    full = min(matrices[0].shape)
    assert_function_of(LowRankConv1d.from_layer(plain, full), plain, torch.randn(2, 3 * groups, 9))
    assert_best(LowRankConv1d.from_layer(plain, data.draw(st.integers(1, full))), plain, matrices)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 100), st.data())
def test_matrices(rows, columns, bias, seed, data):
    torch.manual_seed(seed)
    rank = data.draw(st.integers(1, min(rows, columns)))
    for kind, plain, x in (
        (LowRankLinear, nn.Linear(columns, rows, bias), torch.randn(5, columns)),
        (LowRankEmbedding, nn.Embedding(rows, columns), torch.arange(rows)),
    ):
        assert_function_of(kind.from_layer(plain, min(rows, columns)), plain, x)
        assert_best(kind.from_layer(plain, rank), plain, [plain.weight])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 100))
def test_attention(keys, values, fused, seed):
    torch.manual_seed(seed)
    sizes = {} if fused else {"kdim": keys, "vdim": values}
    plain = nn.MultiheadAttention(8, 2, batch_first=True, **sizes).eval()
    inputs = [torch.randn(2, length, size) for length, size in ((4, 8), (5, plain.kdim), (5, plain.vdim))]
    assert_function_of(LowRankMultiheadAttention.from_layer(plain, 1.0).eval(), plain, *inputs)
