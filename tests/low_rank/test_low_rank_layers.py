"""Factorised linear layers, convolutions and embeddings against plain layers with the product as weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from low_rank_reference import best_error, kernel_matrices, random_factors
from torch import nn
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_symmetry import LowRankConv2d, LowRankEmbedding, LowRankLinear
from lightning_symmetry.low_rank import LowRankConv1d, LowRankLayer

MODES = ["zeros", "reflect", "replicate", "circular"]
SCHEMES = ["kxk-1x1", "1xk-kx1"]


def assert_same_map(low, x):
    """Compare values and gradients with those of the plain layer, whose weight is the product."""
    plain = low.to_layer()
    y, expected = low(x), plain(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    pair = torch.autograd.grad((low.canonical_weight() * plain.weight.grad).sum(), [low.left, low.right])
    torch.testing.assert_close(low.left.grad, pair[0])
    torch.testing.assert_close(low.right.grad, pair[1])
    if low.bias is not None:
        torch.testing.assert_close(low.bias.grad, plain.bias.grad)


@settings(deadline=None, max_examples=250)
@given(
    scheme=st.sampled_from(SCHEMES),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["same", "valid"])),
    mode=st.sampled_from(MODES),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.integers(1, 3),
    bias=st.booleans(),
    batch=st.sampled_from([None, 1, 3]),
    rank=st.sampled_from([1, 2, 1.0]),
)
def test_convolutions(scheme, kernel, stride, padding, mode, dilation, groups, bias, batch, rank):
    if padding == "same":
        stride = (1, 1)
        assume(mode == "zeros" or all(d * (k - 1) // 2 < 6 for d, k in zip(dilation, kernel, strict=True)))
    plain = nn.Conv2d(
        2 * groups, 3 * groups, kernel, stride, padding, dilation, groups, bias, mode, dtype=torch.float64
    )
    smallest = min(kernel_matrices(plain.weight, groups, scheme)[0].shape)
    rank = rank if isinstance(rank, float) else min(rank, smallest)
    low = random_factors(LowRankConv2d.from_layer(plain, rank, scheme=scheme))
    shape = (2 * groups, 8, 9)
    assert_same_map(low, torch.randn(shape if batch is None else (batch, *shape), dtype=torch.float64))
    left, right = low.factors()
    for group, matrix in enumerate(kernel_matrices(low.canonical_weight(), groups, scheme)):
        torch.testing.assert_close(left[group] @ right[group].T, matrix)
    for given_, packed in zip((low.left, low.right), low.pack(left, right), strict=True):
        assert torch.equal(given_, packed)


@settings(deadline=None, max_examples=60)
@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.one_of(st.integers(0, 3), st.sampled_from(["same", "valid"])),
    mode=st.sampled_from(MODES),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 3),
    bias=st.booleans(),
)
def test_one_dimensional_convolutions(kernel, stride, padding, mode, dilation, groups, bias):
    stride = 1 if padding == "same" else stride
    sizes = 2 * groups, 3 * groups, kernel, stride, padding, dilation, groups, bias, mode
    low = random_factors(LowRankConv1d.from_layer(nn.Conv1d(*sizes, dtype=torch.float64), 1))
    assert_same_map(low, torch.randn(2, 2 * groups, 9, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_linear(shape, bias, rank):
    torch.manual_seed(0)
    low = LowRankLinear.from_layer(nn.Linear(8, 6, bias, dtype=torch.float64), rank)
    assert (low.left.shape, low.right.shape) == ((6, rank), (8, rank))
    assert_same_map(low, torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (40,), (0,)])
@pytest.mark.parametrize("padding", [None, 2, 8])
@pytest.mark.parametrize("zero", [True, False])
def test_embedding(shape, padding, zero):
    torch.manual_seed(0)
    plain = nn.Embedding(9, 5, padding, dtype=torch.float64)
    if not zero:
        nn.init.normal_(plain.weight)
    low = LowRankEmbedding.from_layer(plain, 3)
    indices = torch.randint(0, 9, shape)
    back = low.to_layer()
    assert back.padding_idx == plain.padding_idx
    torch.testing.assert_close(low(indices), back(indices))
    weights = torch.randn_like(low(indices))
    (low(indices) * weights).sum().backward()
    factors = [low.left.detach().requires_grad_(), low.right.detach().requires_grad_()]
    rows = torch.arange(9).ne(-1 if padding is None else padding)[:, None]
    table = torch.where(rows, factors[0], factors[0].detach()) @ factors[1].T
    expected = torch.autograd.grad((table[indices] * weights).sum(), factors)
    torch.testing.assert_close(low.left.grad, expected[0])
    torch.testing.assert_close(low.right.grad, expected[1])
    if padding is not None and zero:
        assert not low.canonical_weight()[padding].any()
        assert not low.left.grad[padding].any()


def test_a_sparse_embedding_has_sparse_gradients_of_its_table():
    plain = nn.Embedding(50, 8, sparse=True)
    low = LowRankEmbedding.from_layer(plain, 2)
    indices = torch.randint(0, 50, (60,))
    low(indices).sum().backward()
    assert low.left.grad.is_sparse
    dense = LowRankEmbedding.from_layer(nn.Embedding.from_pretrained(plain.weight.detach(), freeze=False), 2)
    dense(indices).sum().backward()
    torch.testing.assert_close(low.left.grad.to_dense(), dense.left.grad)
    torch.testing.assert_close(low.right.grad, dense.right.grad)
    assert low.to_layer().sparse


ORDERS = {
    "linear": (lambda: LowRankLinear(12, 10, 9), (12,)),
    "linear without bias": (lambda: LowRankLinear(12, 10, 9, bias=False), (12,)),
    "convolution": (lambda: LowRankConv2d(4, 12, 3, 11, padding=1, padding_mode="circular"), (4, 6, 6)),
    "separable": (lambda: LowRankConv2d(8, 8, 3, 20, "1xk-kx1", stride=2, padding=1), (8, 6, 6)),
}


@pytest.mark.parametrize("case", ORDERS)
def test_both_orders_are_the_same_map(case):
    make, shape = ORDERS[case]
    torch.manual_seed(0)
    low = make().double()
    x = torch.randn(400, *shape, dtype=torch.float64)
    shapes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                shapes.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    def first_factors(x):
        shapes.clear()
        with torch.no_grad(), Watch():
            y = low(x)
        return y, not {tuple(low.left.shape), tuple(low.factors()[0].shape)}.isdisjoint(shapes)

    (together, first), (single, not_first) = first_factors(x), first_factors(x[:1])
    assert (first, not_first) == (True, False)
    torch.testing.assert_close(together[:1], single)
    assert_same_map(low, x[:20])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_truncation_of_a_kernel_is_the_best_one(scheme, groups):
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 12, 3, groups=groups)
    low = LowRankConv2d.from_layer(plain, 3, scheme=scheme)
    error = float((low.canonical_weight() - plain.weight).detach().double().norm())
    best = [best_error(m, 3) for m in kernel_matrices(plain.weight, groups, scheme)]
    assert error == pytest.approx(sum(b**2 for b in best) ** 0.5, rel=1e-4)


LAYERS = {
    "linear": (lambda **k: LowRankLinear(6, 5, 2, **k), lambda: torch.randn(3, 6)),
    "convolution": (lambda **k: LowRankConv2d(4, 6, 3, 2, groups=2, padding=1, **k), lambda: torch.randn(2, 4, 5, 5)),
    "separable": (lambda **k: LowRankConv2d(4, 6, 3, 2, "1xk-kx1", **k), lambda: torch.randn(2, 4, 5, 5)),
    "one-dimensional": (lambda **k: LowRankConv1d(4, 6, 3, 2, padding="same", **k), lambda: torch.randn(2, 4, 5)),
    "embedding": (lambda **k: LowRankEmbedding(7, 5, 2, padding_idx=1, **k), lambda: torch.randint(0, 7, (4,))),
}


@pytest.mark.parametrize("case", LAYERS)
def test_constructors_draw_like_plain_layers_do(case):
    make, sample = LAYERS[case]
    torch.manual_seed(0)
    low = make(dtype=torch.float64)
    assert isinstance(low, LowRankLayer)
    assert low.training
    assert low.left.dtype == torch.float64
    assert low(sample() if case == "embedding" else sample().double()).dtype == torch.float64
    torch.manual_seed(0)
    assert torch.equal(make(dtype=torch.float64).left, low.left)
    assert make(device="meta").right.is_meta
    if case == "embedding":
        assert not low.canonical_weight()[1].any()
    assert f"rank={low.rank}" in repr(low)


def test_random_factors_have_the_variance_of_the_usual_initialisation():
    for low, variance in [
        (LowRankLinear(400, 300, 40), 1 / 1200),
        (LowRankConv2d(40, 100, 3, 30), 1 / 1080),
        (LowRankConv2d(40, 100, 3, 30, "1xk-kx1"), 1 / 1080),
        (LowRankEmbedding(1000, 64, 16), 1.0),
    ]:
        assert float(low.canonical_weight().detach().var()) == pytest.approx(variance, rel=0.1)
    layer = nn.Linear(400, 300)
    for scale in (3.0, 0.0):  # the scale is the weight's, and zero factors would never be trained
        nn.init.normal_(layer.weight, std=scale)
        low = LowRankLinear.from_layer(layer, 40, "random")
        variance = scale**2 or 1 / 1200
        assert float(low.canonical_weight().detach().square().mean()) == pytest.approx(variance, rel=0.1)
    layer = nn.Linear(8, 8)
    cases = [(0, "a"), (0, "b"), (1, "a")]
    seeds = [LowRankLinear.from_layer(layer, 2, "random", seed=seed, name=name).left for seed, name in cases]
    assert not torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])
    state = torch.get_rng_state()
    assert torch.equal(LowRankLinear.from_layer(layer, 2, "random", seed=0, name="a").left, seeds[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case", ["linear", "convolution", "separable"])
def test_derivatives_in_forward_and_reverse_mode(case):
    make, sample = LAYERS[case]
    low = make(dtype=torch.float64)
    names, values = zip(*low.named_parameters(), strict=True)
    x = sample().double()

    def function(*parameters):
        return torch.func.functional_call(low, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(function, [v.detach().requires_grad_() for v in values], check_forward_ad=True)


def test_errors():
    with pytest.raises(ValueError, match="rank 9 is beyond the full rank 6 of a 6 x 8 matrix"):
        LowRankLinear.from_layer(nn.Linear(8, 6), 9)
    with pytest.raises(ValueError, match="rank 7 is beyond the full rank 6"):
        LowRankLinear(8, 6, 7)
    with pytest.raises(ValueError, match="`scheme` to be 'kxk-1x1' or '1xk-kx1' but got '1x1'"):
        LowRankConv2d(4, 4, 3, 2, "1x1")
    with pytest.raises(ValueError, match="Only a two-dimensional convolution has the scheme"):
        LowRankConv1d(4, 4, 3, 2, "1xk-kx1")


def test_the_forward_pass_is_two_convolutions():
    low = LowRankConv2d(6, 8, 3, 2, padding=1, stride=2)
    x = torch.randn(2, 6, 7, 7)
    expected = F.conv2d(F.conv2d(x, low.right, None, 2, 1), low.left, low.bias)
    assert torch.equal(low(x), expected)
