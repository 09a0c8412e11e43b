"""Fisher matrices in whitened coordinates against networks with (V, d) as their parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fisher_reference import fisher_by_loop
from torch import Tensor, nn

from lightning_symmetry.whitening.coordinates import transform_fisher
from lightning_symmetry.whitening.fisher import fisher_blocks, fisher_matrix

EXACT = {"rtol": 1e-10, "atol": 1e-10}


class ExplicitLinear(nn.Module):
    """``V U (h - c) + d`` as eq. 7 has it, with V and d the parameters."""

    def __init__(self, layer: nn.Linear, U: Tensor, c: Tensor) -> None:
        super().__init__()
        self.V = nn.Parameter((layer.weight @ torch.linalg.inv(U)).detach())
        self.d = nn.Parameter((layer.bias + layer.weight @ c).detach()) if layer.bias is not None else None
        self.U, self.c = U, c

    def forward(self, input: Tensor) -> Tensor:
        return F.linear((input - self.c) @ self.U.mT, self.V, self.d)


class ExplicitConv(nn.Module):
    """A whitening of each pixel, padded with U (0 - c), then a convolution with V and d."""

    def __init__(self, layer: nn.Conv2d, U: Tensor, c: Tensor) -> None:
        super().__init__()
        self.layer, self.U, self.c = layer, U, c
        weight = layer.weight.detach().unflatten(0, (layer.groups, -1))
        taps = layer.kernel_size[0] * layer.kernel_size[1]
        self.V = nn.Parameter(torch.einsum("gojyx,gji->goiyx", weight, torch.linalg.inv(U)).flatten(0, 1))
        shift = torch.einsum("gojyx,gj->go", weight, c).flatten()
        assert taps > 1
        self.d = nn.Parameter(layer.bias.detach() + shift)

    def forward(self, input: Tensor) -> Tensor:
        layer = self.layer
        padded = F.pad(input, [layer.padding[1]] * 2 + [layer.padding[0]] * 2).unflatten(1, (layer.groups, -1))
        white = torch.einsum("gij,ngjyx->ngiyx", self.U, padded - self.c[..., None, None]).flatten(1, 2)
        return F.conv2d(white, self.V, self.d, layer.stride, 0, layer.dilation, layer.groups)


def coefficients(*shape: int, center: bool = True) -> tuple[Tensor, Tensor]:
    """Any invertible U, not symmetric, so that U and its transpose are told apart."""
    U = torch.eye(shape[-1], dtype=torch.float64) + 0.5 * torch.randn(*shape, shape[-1], dtype=torch.float64)
    return U, torch.randn(shape, dtype=torch.float64) * center


def middle(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=bias), nn.Tanh(), nn.Linear(2, 3)).double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("likelihood", ["categorical", "mse"])
def test_a_linear_layer_equals_the_explicit_network(bias, likelihood):
    net, inputs = middle(bias), torch.randn(5, 3, dtype=torch.float64)
    U, c = coefficients(4, center=bias)
    explicit = nn.Sequential(net[0], net[1], ExplicitLinear(net[2], U, c), net[3], net[4])
    torch.testing.assert_close(explicit(inputs), net(inputs), **EXACT)
    names = ["2.V", "2.d"] if bias else ["2.V"]
    expected = fisher_by_loop(explicit, inputs, likelihood, names)
    settings = {"likelihood": likelihood, "progress": False}
    before = fisher_blocks(net, inputs, ["2"], **settings)["2"]
    assert (before - expected).abs().max() > 1e-2
    torch.testing.assert_close(transform_fisher(before, U, c, bias=bias), expected, **EXACT)
    whitening = {"2": (U, c if bias else None)}
    after = fisher_blocks(net, inputs, ["2"], whitening=whitening, **settings)["2"]
    torch.testing.assert_close(after, expected, **EXACT)


def test_the_whole_matrix_with_some_layers_whitened_equals_the_explicit_network():
    net, inputs = middle(), torch.randn(5, 3, dtype=torch.float64)
    first, last = coefficients(3), coefficients(2)
    explicit = nn.Sequential(ExplicitLinear(net[0], *first), *net[1:4], ExplicitLinear(net[4], *last))
    expected = fisher_by_loop(explicit, inputs, "categorical")
    actual = fisher_matrix(net, inputs, whitening={"4": last, "0": first}, columns=5, progress=False)
    torch.testing.assert_close(actual, expected, **EXACT)


def test_vec_goes_row_by_row_and_biases_follow():
    """Entry by entry: the derivative of (W, b) in (V, d), here by differences, is what transforms the matrix."""
    torch.manual_seed(0)
    U, c = coefficients(3)
    V, d = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def canonical(omega: Tensor) -> Tensor:
        W = omega[:6].reshape(2, 3) @ U
        return torch.cat([W.flatten(), omega[6:] - W @ c])

    omega = torch.cat([V[0], V[1], d])
    J = torch.stack([(canonical(omega + step) - canonical(omega - step)) / 2 for step in torch.eye(8).double()], 1)
    block = torch.randn(8, 8, dtype=torch.float64)
    block = block @ block.mT
    torch.testing.assert_close(transform_fisher(block, U, c), J.mT @ block @ J, **EXACT)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_equals_the_explicit_network(groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, (2, 3), padding=1, stride=2, groups=groups)
    net = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double()
    inputs = torch.randn(4, 2, 4, 6, dtype=torch.float64) + 1
    U, c = coefficients(groups, 2 // groups)
    explicit = nn.Sequential(ExplicitConv(conv, U, c), *net[1:])
    torch.testing.assert_close(explicit(inputs), net(inputs), **EXACT)
    expected = fisher_by_loop(explicit, inputs, "categorical", ["0.V", "0.d"])
    if groups == 1:
        U, c = U[0], c[0]
    block = fisher_matrix(net, inputs, ["0"], progress=False)
    torch.testing.assert_close(transform_fisher(block, U, c, weight_shape=conv.weight.shape), expected, **EXACT)
    after = fisher_matrix(net, inputs, ["0"], whitening={"0": (U, c)}, progress=False)
    torch.testing.assert_close(after, expected, **EXACT)


def test_errors_of_the_transform():
    U, block = torch.eye(3), torch.eye(8)
    with pytest.raises(ValueError, match="square matrix but got shape \\(8, 7\\)"):
        transform_fisher(block[:, :7], U)
    with pytest.raises(ValueError, match=r"`block` has size 8, but .* \(2, 3\) without bias has 6 parameters"):
        transform_fisher(block, U, bias=False)
    with pytest.raises(ValueError, match=r"Expected U of the layer to have shape \(4, 4\)"):
        transform_fisher(block, U, weight_shape=(2, 4))
    with pytest.raises(ValueError, match=r"Expected c of the layer to have 1 x 3 entries but got \(2,\)"):
        transform_fisher(block, U, torch.zeros(2))
    with pytest.raises(ValueError, match="not finite"):
        transform_fisher(block, U * float("inf"))
    with pytest.raises(ValueError, match="without a bias there is nothing to take the shift"):
        transform_fisher(torch.eye(6), U, torch.ones(3), bias=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.b(self.a(input).tanh())


@pytest.mark.parametrize(
    ("net", "name", "layers", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), "1", ["0"], r"layer '1', but the chosen ones are \['0'\]"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "1", None, "'1' is LayerNorm; only linear layers"),
        (Tied(), "b", None, "'b' shares its parameters with another chosen layer"),
    ],
)
def test_errors_of_the_argument(net, name, layers, message):
    with pytest.raises(ValueError, match=message):
        fisher_matrix(net, torch.randn(4, 3), layers, whitening={name: (torch.eye(3), None)}, progress=False)
