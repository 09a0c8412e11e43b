"""Optimizers go on with the factors, whose momentum moves the product as that of the weight did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spectral_runs import OPTIMIZERS, Regression, assert_in_order, fit, loader, network
from torch import nn

from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import LowRankLinear


@pytest.mark.parametrize("moments", ["project", "reset"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_go_on(optimizer, moments):
    module = Regression(optimizer=optimizer)
    callback = SpectralFactorization(at_step=7, rank=0.25, moments=moments, skip=["net.4"])
    run = fit(module, callback, steps=20)
    assert [type(module.net[i]) for i in (0, 2, 4)] == [LowRankLinear, LowRankLinear, nn.Linear]
    assert module.net[0].rank == 3
    assert_in_order(run, module)
    dense = Regression(optimizer=optimizer)
    fit(dense, steps=20)
    assert module.losses[:7] == dense.losses[:7]
    assert callback.measured["low_rank/loss_before"] == pytest.approx(dense.losses[7], rel=1e-6)
    assert callback.measured["low_rank/loss_after"] == pytest.approx(module.losses[7], rel=1e-6)
    assert sum(module.losses[-5:]) < sum(module.losses[7:12])
    for state, parameter in ((run.optimizers[0].state[p], p) for p in module.net[0].parameters()):
        assert parameter.grad is not None
        if "step" in state:
            kept = moments == "project" or parameter is module.net[0].bias
            assert float(state["step"]) == (20 if kept else 13)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_factors_train(optimizer):
    module = Regression(optimizer=optimizer)
    fit(module, SpectralFactorization(at_step=3), steps=4)
    start = [p.detach().clone() for p in module.net[2].parameters()]
    again = Regression(optimizer=optimizer)
    fit(again, SpectralFactorization(at_step=3), steps=5)
    assert all(not torch.equal(a, b) for a, b in zip(start, again.net[2].parameters(), strict=True))


class Still(Regression):
    """Has a momentum, but hardly moves."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5, momentum=0.9)


def test_a_momentum_moves_the_product_as_it_moved_the_weight():
    """At full rank the momentum of the factors moves the product as that of W would have moved W, to first order."""
    moved = []
    for callbacks in ([], [SpectralFactorization(at_step=6, rank=1.0, min_saving=-1)]):
        module = Still(network().double())
        run = fit(module, *callbacks, steps=7, data=loader(torch.float64), precision="64-true")
        layer = module.net[2]
        kept = {p: state["momentum_buffer"] - p.grad for p, state in run.optimizers[0].state.items()}
        if callbacks:
            moved.append((kept[layer.left] @ layer.right.T + layer.left @ kept[layer.right].T).detach())
        else:
            moved.append(kept[layer.weight])
    assert float((moved[0] - moved[1]).norm() / moved[0].norm()) < 1e-3
