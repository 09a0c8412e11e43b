"""States of every kind of optimizer in the factors of a weight, compared with dense float64 formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_symmetry.callbacks.spectral_moments import replacements_between
from lightning_symmetry.low_rank import factorize
from lightning_symmetry.low_rank.conv import LowRankConv2d
from lightning_symmetry.surgery.factor_moments import factor_gradient, factor_squares
from lightning_symmetry.surgery.handover import hand_over
from lightning_symmetry.surgery.optimizer_states import UnknownStateError, state_without_rule

RANK = 3


def trained(optimizer: Any, layer: nn.Module, *shape: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a network of one layer after some steps, in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(layer).double()
    built = optimizer(net.parameters())
    for _ in range(5):
        built.zero_grad()
        net(torch.randn(9, *shape, dtype=torch.float64)).tanh().square().mean().backward()
        built.step()
    return net, built


def handed_over(optimizer: Any, rank: float = RANK) -> tuple[Any, dict[str, Any], Tensor, nn.Module]:
    """Return the optimizer, the state and value of a linear layer's weight as they were, and the factorised layer."""
    net, built = trained(optimizer, nn.Linear(7, 5, bias=False), 7)
    weight = net[0].weight
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in built.state[weight].items()}
    before = dict(net.named_modules())
    factorize(net, rank, min_saving=-1)
    hand_over([built], replacements_between(before, net), "project")
    return built, state, weight.detach(), net[0]


def factors(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.left.detach(), layer.right.detach()


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.AdamW, torch.optim.Adam])
def test_of_the_kin_of_adam(kind):
    optimizer, state, _, layer = handed_over(lambda p: kind(p, lr=1e-3))
    mean = state["exp_avg"] / (1 - 0.9**5)
    correction = 1 - 0.999**5
    means = factor_gradient(state["exp_avg"], *factors(layer))
    squares = factor_squares(state["exp_avg_sq"] / correction, mean, *factors(layer))
    for index, parameter in enumerate((layer.left, layer.right)):
        ours = optimizer.state[parameter]
        torch.testing.assert_close(ours["exp_avg"], means[index])
        torch.testing.assert_close(ours["exp_avg_sq"], correction * (squares[0][index] + squares[1][index]))
        scalars = {key for key, value in state.items() if value.ndim == 0}
        assert all(torch.equal(ours[key], state[key]) and ours[key] is not state[key] for key in scalars)
        assert ours.keys() == state.keys()


def test_of_adamax():
    """Sizes are mapped as second moments: those of noise alone add up in squares."""
    optimizer, state, _, layer = handed_over(lambda p: torch.optim.Adamax(p, lr=1e-3))
    mean = state["exp_avg"] / (1 - 0.9**5)
    squares = factor_squares(state["exp_inf"].square(), mean, *factors(layer))
    for index, parameter in enumerate((layer.left, layer.right)):
        ours = optimizer.state[parameter]["exp_inf"]
        torch.testing.assert_close(ours, (squares[0][index] + squares[1][index]).sqrt())
        assert bool((ours >= (optimizer.state[parameter]["exp_avg"] / (1 - 0.9**5)).abs() * (1 - 1e-12)).all())


def test_of_muon():
    """Its buffer is a mean of gradients."""
    optimizer, state, _, layer = handed_over(lambda p: torch.optim.Muon(p, lr=1e-3))
    for parameter, expected in zip(
        (layer.left, layer.right), factor_gradient(state["momentum_buffer"], *factors(layer)), strict=True
    ):
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], expected)


def test_of_asgd():
    """At full rank the average of the factors lies from them as that of the weight lay from it, to first order."""
    optimizer, state, weight, layer = handed_over(lambda p: torch.optim.ASGD(p, lr=0.1, t0=1), 1.0)
    left, right = factors(layer)
    apart = [optimizer.state[p]["ax"] - p.detach() for p in (layer.left, layer.right)]
    expected = state["ax"] - weight
    assert expected.norm() > 1e-3
    torch.testing.assert_close(apart[0] @ right.T + left @ apart[1].T, expected)


def test_of_adafactor():
    optimizer, state, _, layer = handed_over(lambda p: torch.optim.Adafactor(p, lr=1e-2))
    squares = state["row_var"] @ state["col_var"] / state["row_var"].mean()
    _, noise = factor_squares(squares, None, *factors(layer))
    for parameter, expected in zip((layer.left, layer.right), noise, strict=True):
        ours = optimizer.state[parameter]
        torch.testing.assert_close(ours["row_var"], expected.mean(1, keepdim=True))
        torch.testing.assert_close(ours["col_var"], expected.mean(0, keepdim=True))


@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_of_adafactor_for_kernels(scheme):
    """Its rows and columns are the last two axes of the kernel, which those of the factors are not."""
    net, optimizer = trained(lambda p: torch.optim.Adafactor(p, lr=1e-2), nn.Conv2d(4, 6, 3, groups=2), 4, 5, 5)
    state, before = dict(optimizer.state[net[0].weight]), dict(net.named_modules())
    factorize(net, 2, scheme=scheme, min_saving=-1)
    hand_over([optimizer], replacements_between(before, net), "project")
    kernels = state["row_var"] @ state["col_var"] / state["row_var"].mean(-2, keepdim=True)
    plain = before["0"]
    plain.weight = nn.Parameter(kernels)
    _, noise = factor_squares(LowRankConv2d.matrices_of(plain, scheme), None, *(f.detach() for f in net[0].factors()))
    for parameter, expected in zip((net[0].left, net[0].right), net[0].pack(*noise), strict=True):
        ours = optimizer.state[parameter]
        torch.testing.assert_close(ours["row_var"], expected.mean(-1, keepdim=True))
        torch.testing.assert_close(ours["col_var"], expected.mean(-2, keepdim=True))
    net(torch.randn(2, 4, 5, 5, dtype=torch.float64)).square().mean().backward()
    optimizer.step()  # shapes are those that it made itself
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    "value", [torch.ones(5, 7), torch.ones(5), torch.ones(2, 2), [torch.ones(5, 7)]], ids=["same", "row", "any", "list"]
)
def test_states_that_nobody_knows_are_not_copied(value):
    net, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), nn.Linear(7, 5, bias=False), 7)
    assert state_without_rule(optimizer, net[0].weight) is None
    optimizer.state[net[0].weight]["other"] = value
    assert state_without_rule(optimizer, net[0].weight) == "other"
    before = dict(net.named_modules())
    factorize(net, RANK, min_saving=-1)
    with pytest.raises(UnknownStateError, match="SGD keeps 'other'"):
        hand_over([optimizer], replacements_between(before, net), "project")
