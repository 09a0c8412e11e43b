"""Asymmetric layers against loops in float64, and their round trips."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from asymmetry_reference import dense_weight, spoil
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from lightning_symmetry import AsymmetricConv1d, AsymmetricConv2d, AsymmetricLinear
from lightning_symmetry.asymmetry import AsymmetricLayer

PAD = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def linear_loop(layer, x):
    weight = dense_weight(layer)
    out = np.zeros((len(x), layer.out_features))
    for sample, row in itertools.product(range(len(x)), range(layer.out_features)):
        out[sample, row] = sum(weight[row, unit] * float(x[sample, unit]) for unit in range(layer.in_features))
        if layer.bias is not None:
            out[sample, row] += layer.bias[row].item()
    return out


def conv_loop(layer, x):
    """Convolve (N, C, H, W) or (N, C, L) with the dense weight."""
    x = x.double().numpy()
    weight = dense_weight(layer)
    flat = x.ndim == 3
    if flat:
        x, weight = x[:, :, None], weight[:, :, None]
    kernel = weight.shape[2:]

    def both(value):
        value = value if isinstance(value, tuple) else (value,)
        return (1, *value) if flat else value

    stride, dilation = both(layer.stride), both(layer.dilation)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = [(t // 2, t - t // 2) for t in total]
    else:
        padding = [(p, p) for p in (both(layer.padding) if not flat else (0, *layer.padding))]
    x = np.pad(x, [(0, 0), (0, 0), *padding], mode=PAD[layer.padding_mode])
    size = [(x.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    out = np.zeros((len(x), len(weight), *size))
    per_group, reads = len(weight) // layer.groups, weight.shape[1]
    for channel, i, j in itertools.product(range(len(weight)), *map(range, size)):
        group = channel // per_group
        rows = i * stride[0] + dilation[0] * np.arange(kernel[0])
        columns = j * stride[1] + dilation[1] * np.arange(kernel[1])
        patch = x[:, group * reads : (group + 1) * reads][:, :, rows][:, :, :, columns]
        out[:, channel, i, j] = (patch * weight[channel]).sum((1, 2, 3))
    if layer.bias is not None:
        out += layer.bias.detach().double().numpy()[:, None, None]
    return out[:, :, 0] if flat else out


CONV1D = {
    "plain": dict(n_fix=4),
    "no bias": dict(n_fix=4, bias=False),
    "groups": dict(n_fix=3, groups=2),
    "stride and dilation": dict(n_fix=4, stride=2, dilation=2, padding=3),
    "same": dict(n_fix=4, padding="same", dilation=2),
    "circular": dict(n_fix=4, padding=2, padding_mode="circular"),
    "filters": dict(n_fix=2, layout="filters"),
}
CONV2D = {
    "plain": dict(n_fix=7),
    "no bias": dict(n_fix=7, bias=False),
    "most entries": dict(n_fix=30),
    "groups": dict(n_fix=5, groups=2),
    "depthwise": dict(n_fix=4, groups=4, out_channels=4),
    "depthwise with multiplier": dict(n_fix=2, groups=4, out_channels=8),
    "stride and dilation": dict(n_fix=7, stride=(2, 1), dilation=(1, 2), padding=(1, 2)),
    "rectangular": dict(n_fix=3, kernel_size=(1, 3), padding=(0, 1)),
    "same": dict(n_fix=7, padding="same"),
    "same, even kernel": dict(n_fix=7, padding="same", kernel_size=(2, 3)),
    "reflect": dict(n_fix=7, padding=1, padding_mode="reflect"),
    "replicate": dict(n_fix=7, padding=(2, 1), padding_mode="replicate"),
    "circular": dict(n_fix=7, padding=1, padding_mode="circular"),
    "same, reflect": dict(n_fix=7, padding="same", padding_mode="reflect"),
    "filters": dict(n_fix=2, layout="filters"),
    "filters of groups": dict(n_fix=1, layout="filters", groups=2, out_channels=4),
}


def build(kind, case, dtype=torch.float64, seed=1):
    torch.manual_seed(2)
    if kind == "linear":
        return AsymmetricLinear(7, 5, kappa=1.5, dtype=dtype, seed=seed, **case)
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **case}
    layer = AsymmetricConv1d if kind == "conv1d" else AsymmetricConv2d
    return layer(kappa=1.5, dtype=dtype, seed=seed, **arguments)


LAYERS = {
    **{
        f"linear, {n}": ("linear", c) for n, c in {"plain": dict(n_fix=3), "no bias": dict(n_fix=6, bias=False)}.items()
    },
    **{f"conv1d, {n}": ("conv1d", c) for n, c in CONV1D.items()},
    **{f"conv2d, {n}": ("conv2d", c) for n, c in CONV2D.items()},
}
every_layer = pytest.mark.parametrize("case", LAYERS)


def sample(kind, dtype=torch.float64):
    shape = {"linear": (3, 7), "conv1d": (2, 4, 9), "conv2d": (2, 4, 6, 7)}[kind]
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_forward_is_equation_2(case, dtype):
    kind, arguments = LAYERS[case]
    layer, x = build(kind, arguments, dtype), sample(kind, dtype)
    spoil(layer)
    expected = torch.from_numpy(linear_loop(layer, x) if kind == "linear" else conv_loop(layer, x))
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5)
    assert torch.equal(layer.canonical_weight().double(), torch.from_numpy(dense_weight(layer)))


@every_layer
def test_masks_are_those_of_theorem_1(case):
    kind, arguments = LAYERS[case]
    layer = build(kind, arguments)
    fixed = (~layer.mask).sum(1)
    assert (fixed == layer.n_fix).all()
    assert (layer.mask.sum(1) >= 1).all()
    for rows in layer.mask.chunk(arguments.get("groups", 1)):
        assert len(torch.unique(rows, dim=0)) == len(rows)
    # Each channel filter is fixed whole or not at all in the layout of filters.
    trainable = layer.trainable_entries()
    if layer.layout == "filters" and kind != "linear":
        assert ((trainable.flatten(2).all(2)) | (~trainable).flatten(2).all(2)).all()
    assert layer.num_fixed == int((~trainable).sum())
    assert layer.num_trainable == int(trainable.sum()) + (0 if layer.bias is None else layer.bias.numel())
    assert layer.fixed_fraction == pytest.approx(float((~trainable).double().mean()))


@every_layer
def test_gradients(case):
    kind, arguments = LAYERS[case]
    layer, x = build(kind, arguments), sample(kind)[:1].requires_grad_()
    parameters = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    assert gradcheck(layer, x)
    assert gradgradcheck(layer, x)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    trainable = layer.trainable_entries()
    assert (grad[~trainable] == 0).all()
    assert (grad[trainable] != 0).all()

    # Gradients of all parameters are those of eq. 2 written out, to second order.
    constants = torch.from_numpy(dense_weight(layer))
    weight = layer.weight.detach().clone().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().clone().requires_grad_()
    plain = layer.to_layer()
    dense = {"weight": torch.where(trainable, weight, constants)} | ({} if bias is None else {"bias": bias})
    references = [weight, *([] if bias is None else [bias])]
    for found, wanted in zip(
        second_order(layer(x), [x, *parameters]),
        second_order(torch.func.functional_call(plain, dense, (x,)), [x, *references]),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def second_order(y, inputs):
    """Return first derivatives of a scalar of ``y`` and those of the sum of their squares."""
    first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    return [*(g.detach() for g in first), *second]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7)])
def test_fast_path_of_linear_layers(shape, bias):
    layer = build("linear", dict(n_fix=3, bias=bias))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = x @ torch.from_numpy(dense_weight(layer)).T + (layer.bias if bias else 0)
    out = layer(x)
    assert type(out.grad_fn).__name__ == "FixedLinearBackward"
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    out.square().sum().backward()
    assert (layer.weight.grad[~layer.mask] == 0).all()
    if 0 not in shape:
        assert gradcheck(layer, x)
        assert gradgradcheck(layer, x)


def test_gradcheck_of_the_trainable_entries_of_the_fast_path():
    layer, x = build("linear", dict(n_fix=3)), sample("linear").requires_grad_()
    trainable = layer.mask.nonzero(as_tuple=True)

    def function(x, entries, bias):
        # The module's own parameters are perturbed in place, as finite differences need it on the fast path.
        with torch.no_grad():
            layer.weight[trainable] = entries
            layer.bias.copy_(bias)
        return layer(x)

    entries, bias, step = layer.weight.detach()[trainable].clone(), layer.bias.detach().clone(), 1e-6
    (grad,) = torch.autograd.grad(function(x, entries, bias).square().sum(), layer.weight)
    for place in range(len(entries)):
        moved = [entries.clone().index_fill(0, torch.tensor(place), entries[place].item() + s) for s in (step, -step)]
        up, down = (function(x, e, bias).square().sum().item() for e in moved)
        assert grad[trainable][place].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_round_trip(case, training):
    kind, arguments = LAYERS[case]
    x = sample(kind, torch.float32)
    layer = build(kind, arguments, torch.float32).train(training)
    layer.weight.requires_grad_(training)
    spoil(layer)
    plain = layer.to_layer()
    assert not isinstance(plain, AsymmetricLayer)
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-5, atol=1e-5)
    assert plain.training == training
    assert plain.weight.requires_grad == training
    assert plain.weight.dtype == torch.float32
    before = plain.weight.detach().clone()
    back = type(layer).from_layer(plain, layer.n_fix, 1.5, layer.layout, seed=1)
    assert back.weight is plain.weight
    assert back.training == training
    assert back.weight.requires_grad == training
    assert torch.equal(back.weight, before)  # the same seed has the same constants
    assert torch.equal(back(x), layer(x))
    assert repr(back) == repr(layer)


@pytest.mark.parametrize(("kind", "plain"), [("linear", nn.Linear), ("conv1d", nn.Conv1d), ("conv2d", nn.Conv2d)])
def test_trainable_entries_are_initialised_as_the_plain_layer_initialises_them(kind, plain):
    arguments = (7, 5) if kind == "linear" else (4, 6, 3)
    torch.manual_seed(9)
    expected = plain(*arguments)
    torch.manual_seed(9)
    layer = {"linear": AsymmetricLinear, "conv1d": AsymmetricConv1d, "conv2d": AsymmetricConv2d}[kind](
        *arguments, n_fix=3, kappa=1.0
    )
    trainable = layer.trainable_entries()
    assert torch.equal(layer.weight[trainable], expected.weight[trainable])
    assert torch.equal(layer.bias, expected.bias)
    assert (layer.weight[~trainable] != expected.weight[~trainable]).all()


def test_round_trip_of_graph_linear():
    from torch_geometric.nn import Linear

    plain = Linear(8, 5, weight_initializer="glorot").double().eval()
    x = torch.randn(3, 8, dtype=torch.float64)
    layer = AsymmetricLinear.from_layer(plain, 3, 1.0)
    assert (layer.in_features, layer.out_features) == (8, 5)
    state = torch.get_rng_state()
    back = layer.to_layer()
    assert torch.equal(state, torch.get_rng_state())
    assert type(back) is Linear
    assert back.weight_initializer == "glorot"
    assert not back.training
    assert back.weight.dtype == torch.float64
    torch.testing.assert_close(back(x), layer(x))
    nobias = AsymmetricLinear.from_layer(Linear(8, 5, bias=False), 3, 1.0)
    assert nobias.to_layer().bias is None


def test_channels_last_weights():
    layer = AsymmetricConv2d(4, 6, 3, 7, 1.5).to(memory_format=torch.channels_last)
    expected = torch.from_numpy(dense_weight(layer)).float()
    spoil(layer)
    layer.restore_constants()
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(layer.weight, expected)


def test_kappa_scales_the_constants_and_keeps_the_masks():
    one, small, zero = (AsymmetricConv2d(4, 6, 3, 7, kappa, seed=5) for kappa in (1.0, 0.02, 0))
    assert torch.equal(one.mask, small.mask)
    assert torch.equal(one.mask, zero.mask)
    torch.testing.assert_close(small.fixed, 0.02 * one.fixed)
    assert (zero.fixed == 0).all()
    assert (zero.weight[~zero.trainable_entries()] == 0).all()


def test_both_layouts_of_a_linear_layer_are_the_same():
    entries, filters = (AsymmetricLinear(8, 5, 2, 1.0, layout=layout) for layout in ("entries", "filters"))
    assert torch.equal(entries.mask, filters.mask)
    assert torch.equal(entries.fixed, filters.fixed)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: AsymmetricLinear(8, 4, 0, 1.0),
            "AsymmetricLinear: n_fix must be at least 1, but got 0. Choose another",
        ),
        (
            lambda: AsymmetricLinear(8, 4, 8, 1.0),
            "n_fix=8 of 8 inputs leaves no trainable entry .* at most 7 .* skip it",
        ),
        (lambda: AsymmetricLinear(8, 4, 9, 1.0), "n_fix=9 of 8 inputs"),
        (
            lambda: AsymmetricLinear(8, 9, 1, 1.0),
            "9 rows need pairwise distinct masks, but only 8 subsets of 1 out of 8",
        ),
        (lambda: AsymmetricLinear(8, 4, 2, -1.0), "kappa must be positive .* but got -1.0"),
        (lambda: AsymmetricLinear(8, 4, 2, float("nan")), "kappa must be positive .* but got nan"),
        (lambda: AsymmetricLinear(8, 4, 2, float("inf")), "kappa must be positive .* but got inf"),
        (lambda: AsymmetricLinear(8, 4, 2, 1.0, layout="rows"), "`layout` to be 'entries' or 'filters' but got 'rows'"),
        (lambda: AsymmetricConv2d(3, 16, 3, 27, 1.0), "AsymmetricConv2d: n_fix=27 of 27 inputs .* at most 26"),
        (lambda: AsymmetricConv2d(3, 16, 3, 1, 1.0, layout="filters"), "16 rows .* only 3 subsets of 1 out of 3"),
        (lambda: AsymmetricConv2d(4, 4, 3, 1, 1.0, groups=4, layout="filters"), "n_fix=1 of 1 inputs"),
        (
            lambda: AsymmetricLinear.from_layer(nn.Linear(8, 4), 8, 1.0, name="encoder.0"),
            "Layer 'encoder.0': n_fix=8 .*overrides",
        ),
    ],
)
def test_errors_say_layer_numbers_and_way_out(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_refused_layer_is_left_as_it_was():
    plain = nn.Linear(8, 4)
    before = plain.weight.detach().clone()
    with pytest.raises(ValueError, match="n_fix"):
        AsymmetricLinear.from_layer(plain, 8, 1.0)
    assert torch.equal(plain.weight, before)
