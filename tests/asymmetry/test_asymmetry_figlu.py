"""FiGLU against loops in float64, its propositions, and the lean form for images."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from lightning_symmetry import MLP, FiGLU, ResNet, asymmetrize
from lightning_symmetry.asymmetry import gated_images
from lightning_symmetry.networks import ChannelNorm


def figlu_loop(x, fixed, axis):
    """Return eq. 4 along an axis, entry by entry."""
    x = np.moveaxis(np.asarray(x, dtype=np.float64), axis, -1)
    fixed = np.asarray(fixed, dtype=np.float64)
    out = np.empty_like(x)
    for place in np.ndindex(x.shape[:-1]):
        for i in range(len(fixed)):
            inner = sum(fixed[i, j] * x[place][j] for j in range(len(fixed)))
            out[(*place, i)] = x[place][i] / (1 + math.exp(-inner))
    return torch.from_numpy(np.moveaxis(out, -1, axis))


def channels_last(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


INPUTS = {
    "features": (lambda: torch.randn(4, 5), -1),
    "tokens": (lambda: torch.randn(2, 3, 5), -1),
    "features on axis 1": (lambda: torch.randn(4, 5), 1),
    "sequences": (lambda: torch.randn(2, 5, 7), 1),
    "images": (lambda: torch.randn(2, 5, 3, 4), 1),
    "images, channels last": (lambda: channels_last(2, 5, 3, 4, dtype=torch.float32), 1),
    "one pixel": (lambda: torch.randn(6, 5, 1, 1), 1),
    "images in the last axis": (lambda: torch.randn(2, 3, 4, 5), -1),
    "volumes": (lambda: torch.randn(2, 5, 2, 2, 2), 1),
}
every_input = pytest.mark.parametrize("case", INPUTS)


@every_input
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("training", [True, False])
def test_forward_is_equation_4(case, dtype, training):
    torch.manual_seed(0)
    make, axis = INPUTS[case]
    x = make().to(dtype).requires_grad_(training)
    figlu = FiGLU(5, scale=2.0, channel_dim=axis, seed=3).to(dtype)
    expected = figlu_loop(x.detach(), figlu.fixed, axis)
    with torch.set_grad_enabled(training):
        out = figlu(x)
    assert out.shape == x.shape
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-6)


@every_input
def test_gradients(case):
    torch.manual_seed(0)
    make, axis = INPUTS[case]
    x = make()[:1].double().requires_grad_()
    figlu = FiGLU(5, channel_dim=axis).double()
    assert gradcheck(figlu, x)
    assert gradgradcheck(figlu, x)


def test_constants_are_normal_with_variance_scale_squared_over_dim():
    for dim, scale in ((300, 1.0), (200, 0.01)):
        fixed = FiGLU(dim, scale, seed=1).fixed.double() * math.sqrt(dim) / scale
        count = dim**2
        assert abs(fixed.mean()) < 5 / math.sqrt(count)
        assert abs(fixed.square().mean() - 1) < 5 * math.sqrt(2 / count)
    with torch.no_grad():  # App. E.1.2's scale is almost linear: gates within half a percent of a half
        x = torch.randn(50, 256)
        gates = FiGLU(256, 0.01)(x) / x
    assert (gates - 0.5).abs().mean() < 0.005


def permutation_equivariances(function, dim):
    """Return the pairs (P, Q) of permutations, not both the identity, with ``f(P x) = Q f(x)`` at random points."""
    x = torch.randn(40, dim, dtype=torch.float64)
    identity = tuple(range(dim))
    found = []
    for p, q in itertools.product(itertools.permutations(identity), repeat=2):
        equal = torch.allclose(function(x[:, list(p)]), function(x)[:, list(q)], rtol=0, atol=1e-9)
        if equal and (p, q) != (identity, identity):
            found.append((p, q))
    return found


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_proposition_4_no_permutation_equivariance(dim):
    torch.manual_seed(dim)
    assert permutation_equivariances(FiGLU(dim).double(), dim) == []
    # The search finds those that elementwise nonlinearities have: one for each permutation.
    assert len(permutation_equivariances(F.silu, dim)) == math.factorial(dim) - 1


def diagonal_equivariances(function, dim, values):
    """Return the diagonals A != I for which some diagonal B has ``f(A x) = B f(x)`` at random points."""
    x = torch.randn(60, dim, dtype=torch.float64)
    found = []
    for diagonal in itertools.product(values, repeat=dim):
        left, right = function(x * torch.tensor(diagonal, dtype=torch.float64)), function(x)
        beta = (left * right).sum(0) / right.square().sum(0)  # the best B by least squares
        if torch.allclose(left, beta * right, rtol=0, atol=1e-6) and set(diagonal) != {1.0}:
            found.append(diagonal)
    return found


@pytest.mark.parametrize("dim", [2, 3])
def test_proposition_5_no_diagonal_equivariance(dim):
    torch.manual_seed(dim)
    values = (-2.0, -1.0, -0.5, 0.5, 0.99, 1.0, 1.01, 3.0)
    assert diagonal_equivariances(FiGLU(dim).double(), dim, values) == []
    # ReLU has all positive ones.
    assert len(diagonal_equivariances(F.relu, dim, values)) == 5**dim - 1


def test_diagonal_equivariance_implies_the_identity_on_both_sides():
    torch.manual_seed(0)
    figlu, x = FiGLU(3).double(), torch.randn(60, 3, dtype=torch.float64)
    for beta in itertools.product((0.5, 1.0, 2.0), repeat=3):
        equal = torch.allclose(figlu(x), torch.tensor(beta, dtype=torch.float64) * figlu(x), atol=1e-6)
        assert equal == (set(beta) == {1.0})


PIECES = pytest.mark.parametrize("piece", [2**18, 40, 1], ids=["one piece", "several pieces", "pixel by pixel"])


@PIECES
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("contiguous_gradient", [True, False])
def test_lean_images_are_the_plain_expression(piece, with_norm, contiguous_gradient, monkeypatch):
    monkeypatch.setattr(gated_images, "_PIECE", piece)
    torch.manual_seed(0)
    figlu, norm = FiGLU(5, scale=2.0, channel_dim=1).double(), ChannelNorm(5, eps=1e-3).double()
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x = channels_last(3, 5, 4, 2).requires_grad_()
    inputs = [x, norm.weight, norm.bias] if with_norm else [x]
    out = figlu.after_layer_norm(x, norm) if with_norm else figlu(x)
    assert type(out.grad_fn).__name__ == "GatedImagesBackward"

    n = x
    if with_norm:
        centred = x - x.mean(1, keepdim=True)
        n = centred / (centred.square().mean(1, keepdim=True) + 1e-3).sqrt()
        n = n * norm.weight[:, None, None] + norm.bias[:, None, None]
    expected = torch.sigmoid(torch.einsum("ij,njhw->nihw", figlu.fixed, n)) * n
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    upstream = torch.randn(3, 5, 4, 2, dtype=torch.float64)
    if not contiguous_gradient:
        upstream = upstream.contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@PIECES
def test_gradcheck_of_lean_images(piece, monkeypatch):
    monkeypatch.setattr(gated_images, "_PIECE", piece)
    torch.manual_seed(0)
    figlu, norm = FiGLU(3, channel_dim=1).double(), ChannelNorm(3).double()
    x = channels_last(2, 3, 2, 2).requires_grad_()
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def normed(x, weight, bias):
        return gated_images.GatedImages.apply(x, figlu.fixed, weight, bias, norm.eps)

    def bare(x):
        return gated_images.GatedImages.apply(x, figlu.fixed, None, None, 0.0)

    for function, inputs in ((normed, (x, weight, bias)), (bare, (x,))):
        # Finite differences perturb the data in place and keep its layout.
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("frozen", ["x", "norm", "weight", "bias"])
def test_second_derivatives_with_frozen_inputs(frozen):
    torch.manual_seed(0)
    figlu, norm = FiGLU(4, channel_dim=1).double(), ChannelNorm(4).double()
    x = channels_last(2, 4, 3, 3).requires_grad_(frozen != "x")
    for name, p in norm.named_parameters():
        p.requires_grad_(frozen not in ("norm", name))
    inputs = [tensor for tensor in (x, norm.weight, norm.bias) if tensor.requires_grad]
    results = []
    for out in (figlu.after_layer_norm(x, norm), gated_images.gate_images(norm(x), figlu.fixed)):
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("arguments", [{"bias": False}, {"elementwise_affine": False}])
def test_norms_without_parameters(arguments):
    torch.manual_seed(0)
    figlu, norm = FiGLU(4, channel_dim=1).double(), ChannelNorm(4, **arguments).double()
    x = channels_last(2, 4, 3, 3).requires_grad_()
    found, wanted = figlu.after_layer_norm(x, norm), gated_images.gate_images(norm(x), figlu.fixed)
    torch.testing.assert_close(found, wanted)
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, wanted))
    torch.testing.assert_close(a, b)


def test_forward_mode_and_batched_gradients_of_images():
    torch.manual_seed(0)
    figlu, x = FiGLU(3, channel_dim=1).double(), channels_last(1, 3, 2, 2)
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(lambda x: gated_images.gate_images(x, figlu.fixed), x)
    torch.testing.assert_close(jacobian(figlu, x), expected)
    torch.testing.assert_close(jacobian(figlu, x, vectorize=True), expected)
    torch.testing.assert_close(jacobian(figlu, x, vectorize=True, strategy="forward-mode"), expected)
    torch.testing.assert_close(torch.func.jacrev(figlu)(x), expected)
    torch.testing.assert_close(torch.func.jacfwd(figlu)(x), expected)


def test_lean_images_keep_only_their_input():
    saved = []
    figlu, norm = FiGLU(4, channel_dim=1), ChannelNorm(4)
    x = channels_last(8, 4, 6, 6, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        figlu.after_layer_norm(x, norm)
    large = [t for t in saved if t.numel() >= x.numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("kind", ["mlp", "resnet"])
def test_pickle_deepcopy_vmap_compile_and_autocast(kind):
    torch.manual_seed(0)
    if kind == "mlp":
        net, x = asymmetrize(MLP(12, (16, 16), 4), "sigma"), torch.randn(5, 12)
    else:
        net, x = asymmetrize(ResNet(1), "sigma"), torch.randn(2, 3, 8, 8)
    expected = net(x)
    for clone in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(clone(x), expected)
    torch.testing.assert_close(torch.vmap(net)(x[:, None]).squeeze(1), expected, rtol=1e-4, atol=1e-5)
    parameters, buffers = torch.func.stack_module_state([net, clone])
    assert buffers  # the constants are stacked too
    both = torch.vmap(lambda p, b: torch.func.functional_call(net, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(both, torch.stack([expected, expected]), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = net(x)
    torch.testing.assert_close(low.float(), expected, rtol=0.1, atol=0.1)
    low.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("normed", [True, False])
def test_bfloat16_images(normed):
    torch.manual_seed(0)
    figlu, norm = FiGLU(8, channel_dim=1), ChannelNorm(8)
    x = channels_last(2, 8, 4, 4, dtype=torch.float32)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        at = x.to(dtype).requires_grad_()
        activation, layer = copy.deepcopy(figlu).to(dtype), copy.deepcopy(norm).to(dtype)
        out = activation.after_layer_norm(at, layer) if normed else activation(at)
        grads.append(torch.autograd.grad(out.square().sum(), at)[0].float())
    assert (grads[0] - grads[1]).norm() < 0.03 * grads[0].norm()


def test_gradients_of_a_residual_network_are_those_of_the_modules_called_one_by_one():
    torch.manual_seed(0)
    net = asymmetrize(ResNet(1, num_classes=4), "sigma").double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    net(x).square().sum().backward()
    fused = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for module in net.modules():  # a listener keeps norm and activation apart
        if isinstance(module, FiGLU):
            module.register_forward_hook(lambda *_: None)
    net(x).square().sum().backward()
    for p, wanted in zip(net.parameters(), fused, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FiGLU(0), "`dim` to be at least 1 but got 0"),
        (lambda: FiGLU(4, scale=0.0), "`scale` to be positive and finite but got 0.0"),
        (lambda: FiGLU(4, scale=float("inf")), "`scale` to be positive and finite but got inf"),
        (lambda: FiGLU(4)(torch.zeros(2, 5)), r"FiGLU has 4 channels, but axis -1 .* shape \(2, 5\) has 5"),
        (lambda: FiGLU(4, channel_dim=1)(torch.zeros(2, 5, 4)), r"axis 1 of the input of shape \(2, 5, 4\) has 5"),
    ],
)
def test_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()
