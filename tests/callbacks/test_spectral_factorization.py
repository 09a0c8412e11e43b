"""Training goes on where dense layers are replaced by factors: by hand, in what is logged, and without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spectral_runs import Regression, Rows, fit, loader, network, step_by_hand
from torch import Tensor, nn

from lightning_symmetry.callbacks import SpectralFactorization


def by_hand(net: nn.Sequential, steps: int, at: int, rate: float) -> list[Tensor]:
    """Plain SGD on W, then on its factors, from the gradient with respect to W alone; return weights and biases."""
    values = [p.detach().double().clone() for p in net.parameters()]
    weights, factors = range(0, len(values), 2), {}
    shown = list(loader(torch.float64))
    for step in range(steps):
        if step == at:
            for index in weights:
                u, s, vt = torch.linalg.svd(values[index], full_matrices=False)
                factors[index] = u @ s.sqrt().diag(), vt.T @ s.sqrt().diag()
        x, y = shown[step % len(shown)]
        leaves = [value.clone().requires_grad_() for value in values]
        for index in weights:
            x = F.linear(x, leaves[index], leaves[index + 1])
            x = x if index == weights[-1] else x.tanh()
        gradients = torch.autograd.grad((x - y).square().mean(), leaves)
        for index, gradient in enumerate(gradients):
            if index not in factors:
                values[index] = values[index] - rate * gradient
                continue
            u, v = factors[index]
            # Equation 1 of the paper, for the product; the factors follow.
            step_ = gradient @ v @ v.T + u @ u.T @ gradient
            values[index] = values[index] - rate * step_ + rate**2 * gradient @ v @ u.T @ gradient
            factors[index] = u - rate * gradient @ v, v - rate * gradient.T @ u
    return values


def test_full_rank_follows_the_papers_update_by_hand():
    module = Regression(network().double(), "sgd")
    expected = by_hand(module.net, 25, 10, 0.05)
    callback = SpectralFactorization(at_step=10, rank=1.0, min_saving=-1)
    fit(module, callback, steps=25, data=loader(torch.float64), precision="64-true")
    ours = [t for i in (0, 2, 4) for t in (module.net[i].canonical_weight(), module.net[i].bias)]
    for value, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(value.detach(), reference, rtol=1e-10, atol=1e-12)
    assert callback.measured["low_rank/loss_after"] == pytest.approx(
        callback.measured["low_rank/loss_before"], rel=1e-6
    )


class Drawn(Regression):
    """Has dropout and batch normalisation, and draws random numbers."""

    def __init__(self) -> None:
        net = network()
        super().__init__(nn.Sequential(*net[:2], nn.BatchNorm1d(16), nn.Dropout(0.3), *net[2:]))
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn = [*self.drawn, float(torch.rand(()))]
        return super().training_step(batch, batch_idx)


def test_measuring_leaves_no_trace():
    modules, rows = [], []
    for measure in (False, True):
        module = Drawn()
        torch.manual_seed(3)
        logger = Rows()
        callback = SpectralFactorization(at_step=4, measure_loss=measure)
        fit(module, callback, steps=10, logger=logger, log_every_n_steps=1)
        modules.append(module)
        rows.append(logger.rows)
    for key, value in modules[0].state_dict().items():
        assert torch.equal(value, modules[1].state_dict()[key]), key
    assert modules[0].drawn == modules[1].drawn
    logged = [[row["loss"] for row in one if "loss" in row] for one in rows]
    assert len(logged[0]) == 10
    assert logged[0] == logged[1]


def test_what_is_logged():
    module, logger = Regression(), Rows()
    callback = SpectralFactorization(at_step=4, rank=2)
    fit(module, callback, steps=6, logger=logger)
    (row,) = (row for row in logger.rows if "low_rank/parameters" in row)
    assert row["step"] == 4
    assert row["low_rank/parameters"] == sum(p.numel() for p in module.parameters())
    assert row["low_rank/compression"] == (12 * 16 + 16 * 16 + 16 * 3 + 35) / row["low_rank/parameters"]
    assert 0 < row["low_rank/relative_error"] < 1
    assert callback.report.changed == ["net.0", "net.2", "net.4"]


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        step_by_hand(self, loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return [self.build(self.net[:3].parameters()), self.build(self.net[3:].parameters())]


def test_manual_optimization_with_two_optimizers():
    module, callback = Manual(), SpectralFactorization(at_step=6)
    run = fit(module, callback, steps=16)
    ours = [p for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert list(map(id, ours)) == list(map(id, module.parameters()))
    assert "low_rank/loss_before" not in callback.measured
    dense = Manual()
    fit(dense, steps=16)
    assert module.losses[:3] == dense.losses[:3]
    assert module.losses[3] != dense.losses[3]


def test_a_second_fit_says_that_it_has_nothing_to_do():
    module = Regression()
    fit(module, SpectralFactorization(at_step=2), steps=4)
    with pytest.warns(UserWarning, match="nothing to do: 3 weights have factors already"):
        fit(module, callback := SpectralFactorization(at_step=2), steps=4)
    assert callback.report is None
