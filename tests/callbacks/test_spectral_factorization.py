"""Training goes on where dense layers are replaced by factors."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from spectral_runs import BATCHES, OPTIMIZERS, Regression, Rows, assert_in_order, fit, loader, network
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_symmetry import asymmetrize
from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import LowRankConv2d, LowRankLinear, LowRankMultiheadAttention, low_rank_maps


class SwitchedAt(pl.Callback):
    """Notes how many batches and steps there were when layers first had factors."""

    def __init__(self) -> None:
        self.batches = self.steps = None
        self.seen = 0

    def on_before_zero_grad(self, run: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if self.steps is None and low_rank_maps(module):
            self.batches, self.steps = self.seen, run.global_step

    def on_train_batch_end(self, run: pl.Trainer, *args: Any) -> None:
        self.seen += 1


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


SCHEDULERS = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=20),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=6),
    "step": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=4, cycle_momentum=False),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.8, patience=0, threshold=10.0),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[10],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name, factor):
    module, dense = (Regression(optimizer="momentum", scheduler=SCHEDULERS[name]) for _ in range(2))
    run = fit(module, SpectralFactorization(at_step=6, lr_factor=factor), steps=18)
    fit(dense, steps=18)
    assert_in_order(run, module)
    assert len(set(dense.rates)) > 2
    assert module.rates[:6] == dense.rates[:6]
    assert module.rates[6:] == pytest.approx([rate * factor for rate in dense.rates[6:]], rel=1e-9)


@pytest.mark.parametrize(
    ("when", "steps"), [({"at_step": 4}, 4), ({"at_step": 0}, 0), ({"at_epoch": 2}, 6), ({"at_fraction": 0.5}, 6)]
)
def test_optimizer_steps_are_counted(when, steps):
    """With two batches a step, and a last step of one batch: three steps an epoch."""
    module, seen = Regression(), SwitchedAt()
    run = fit(module, SpectralFactorization(**when), seen, steps=-1, max_epochs=4, accumulate_grad_batches=2)
    assert run.global_step == 12
    assert seen.steps == steps
    assert seen.batches == steps // 3 * BATCHES + steps % 3 * 2
    assert_in_order(run, module)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_trainer_settings(settings):
    fused = "gradient_clip_val" not in settings and "true" not in settings.get("precision", "")
    module = Regression(optimizer="fused" if fused else "adamw")
    data = loader(torch.float64) if settings.get("precision") == "64-true" else loader()
    callback = SpectralFactorization(at_step=5, rank=1.0, min_saving=-1)
    run = fit(module, callback, steps=10, data=data, **settings)
    assert_in_order(run, module)
    types = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert {p.dtype for p in module.parameters()} == {types.get(settings.get("precision"), torch.float32)}
    tolerance = 2e-2 if "bf16" in settings.get("precision", "") else 1e-5
    before, after = (callback.measured[f"low_rank/loss_{when}"] for when in ("before", "after"))
    assert after == pytest.approx(before, rel=tolerance)
    assert all(p.isfinite().all() for p in module.parameters())


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


class Mixed(nn.Module):
    """Convolutions of both kinds, attention, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encode, self.decode = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(8, OUTPUTS_OF_MIXED)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.conv(x.view(-1, 1, 3, 4)).relu()).flatten(2).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.decode(self.encode(x).tanh()).mean(1))


OUTPUTS_OF_MIXED = 3


@pytest.mark.parametrize("moments", ["project", "reset"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_all_kinds_of_layers(optimizer, moments, scheme):
    torch.manual_seed(0)
    module = Regression(Mixed(), optimizer)
    callback = SpectralFactorization(at_step=4, rank=1.0, min_saving=-1, scheme=scheme, moments=moments)
    run = fit(module, callback, steps=8)
    assert isinstance(module.net.conv, LowRankConv2d)
    assert isinstance(module.net.attention, LowRankMultiheadAttention)
    assert module.net.decode.left is module.net.encode.left
    assert_in_order(run, module)
    assert callback.measured["low_rank/loss_after"] == pytest.approx(
        callback.measured["low_rank/loss_before"], rel=1e-5
    )


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_layers_with_constants(optimizer):
    module = Regression(asymmetrize(network(), n_fix=2, kappa=1.0), optimizer)
    callback = SpectralFactorization(at_step=4, rank=1.0, min_saving=-1)
    run = fit(module, callback, steps=8)
    assert_in_order(run, module)
    loss = callback.measured["low_rank/loss_before"]
    assert callback.measured["low_rank/loss_after"] == pytest.approx(loss, rel=1e-5)


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


def test_a_compiled_network():
    module, plain = Regression(torch.compile(network(), backend="eager")), Regression()
    for one in (module, plain):
        run = fit(one, SpectralFactorization(at_step=5), steps=10)
        assert_in_order(run, one)
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)


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
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
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
