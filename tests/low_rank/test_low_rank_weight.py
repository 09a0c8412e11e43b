"""Code that reads the ``weight`` of a factorised layer gets the product; code that wants to own one gets an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from low_rank_reference import random_factors
from torch import nn
from torch.nn.utils import prune

from lightning_symmetry import factorize, recompose
from lightning_symmetry.low_rank import LowRankConv2d, LowRankEmbedding, LowRankLinear
from lightning_symmetry.surgery import tied_parameters

LAYERS = {
    "linear": lambda: LowRankLinear(7, 5, 3),
    "embedding": lambda: LowRankEmbedding(9, 6, 2),
    "convolution": lambda: LowRankConv2d(4, 6, 3, 2, groups=2),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_the_product_and_no_parameter(kind):
    layer = random_factors(LAYERS[kind]().double())
    assert torch.equal(layer.weight, layer.canonical_weight())
    assert layer.weight.dtype == torch.float64
    gradients = torch.autograd.grad(layer.weight.square().sum(), (layer.left, layer.right))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert not any("weight" in key for key in (*layer.state_dict(), *dict(layer.named_parameters())))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.weight, layer.weight)
    doubled = {name: 2 * p for name, p in layer.named_parameters()}
    call = torch.func.functional_call(nn.Sequential(layer), {f"0.{n}": p for n, p in doubled.items()}, _input(kind))
    expected = copied.requires_grad_(False)
    for name, value in doubled.items():
        getattr(expected, name).copy_(value)
    torch.testing.assert_close(call, expected(_input(kind)))


def _input(kind: str) -> torch.Tensor:
    if kind == "embedding":
        return torch.arange(4)
    return torch.ones((2, 7) if kind == "linear" else (2, 4, 5, 5), dtype=torch.float64)


OWNERS = {
    "a parameter": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(5, 7))), KeyError),
    "a tensor": (lambda layer: setattr(layer, "weight", torch.ones(5, 7)), AttributeError),
    "registering": (lambda layer: layer.register_parameter("weight", nn.Parameter(torch.ones(5, 7))), KeyError),
    "tying": (lambda layer: setattr(nn.Linear(7, 5), "weight", layer.weight), TypeError),
    "freezing": (lambda layer: setattr(layer.weight, "requires_grad", False), RuntimeError),
    "an optimizer": (lambda layer: torch.optim.SGD([layer.weight], lr=0.1), ValueError),
    "weight norm": (lambda layer: nn.utils.parametrizations.weight_norm(layer), ValueError),
    "pruning": (lambda layer: prune.l1_unstructured(layer, "weight", 2), TypeError),
    "a state": (lambda layer: layer.load_state_dict({"weight": torch.ones(5, 7), "bias": layer.bias}), RuntimeError),
}


@pytest.mark.parametrize("case", OWNERS)
def test_what_wants_to_own_a_weight_fails(case):
    own, error = OWNERS[case]
    layer = LowRankLinear(7, 5, 3)
    names = list(dict(layer.named_parameters()))
    with pytest.raises(error):
        own(layer)
    assert list(dict(layer.named_parameters())) == names


class Language(nn.Module):
    """A head that is tied to the table by a function alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(30, 12, dtype=torch.float64), nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.table(x)).to(self.middle.weight.dtype)
        return F.linear(hidden, self.table.weight)


class TiedByParameter(Language):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 30, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(x)))


def test_functional_tying_goes_on():
    nets = [factorize(kind(), 4) for kind in (Language, TiedByParameter)]
    x = torch.arange(9).view(3, 3)
    gradients = []
    for net in nets:
        output = net(x)
        output.square().sum().backward()
        gradients.append((output.detach(), net.table.left.grad, net.table.right.grad))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)
    assert tied_parameters(nets[0]) == {}
    torch.testing.assert_close(recompose(nets[0])(x), gradients[0][0])
