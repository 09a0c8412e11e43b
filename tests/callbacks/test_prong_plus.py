"""PRONG+: iterates are those of (V', d) with U' = D U by hand, V' rescaled after each step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from prong_reference import ByHand, Regression, Trajectory, batches, data, deviation, fit, network, run_by_hand, sgd
from prong_reference import stream as loader_of
from test_interpolation_leaves_no_trace import assert_equal
from tiny_modules import Plain, TinyData, deep_mlp, trainer
from torch import Tensor, nn

from lightning_symmetry import asymmetrize
from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.surgery import constants_of
from lightning_symmetry.whitening import HasWhitening, whitened_layers

STEPS, EVERY, EPS = 50, 9, 0.3


class ScaledByHand(ByHand):
    """Algorithm 1 on (V, d); after each step units are divided by running deviations, and V is multiplied.

    The running covariance is that of all rows since the reparametrisation, each with its weight, about their mean.
    """

    def reparametrize(self, x: Tensor, ema: float | None = None) -> None:
        self.dampings: list[Tensor | float] = []
        super().reparametrize(x, ema)
        inputs: list[Tensor] = []
        self.forward(x, inputs)
        self.mixtures = self.pooled or [(rows, torch.ones(len(rows)).double()) for rows in inputs]
        self.mixtures = [(rows, weights / weights.sum()) for rows, weights in self.mixtures]
        self.roots = [layer["U"] for layer in self.layers]

    def _root(self, covariance: Tensor) -> Tensor:
        self.dampings.append(self.eps * covariance.diag().mean() if self.relative else self.eps)
        return super()._root(covariance)

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        self.inputs: list[Tensor] = []
        self.forward(x, self.inputs)
        return super().gradients(x, y)

    def rescale(self) -> None:
        """Multiply rows of U, and divide columns of V and of its momentum."""
        for index, (layer, root) in enumerate(zip(self.layers, self.roots, strict=True)):
            rows, weights = self.mixtures[index]
            fresh = self.inputs[index]
            share = torch.ones(len(fresh)).double() / len(fresh)
            rows, weights = torch.cat([rows, fresh]), torch.cat([0.9 * weights, 0.1 * share])
            self.mixtures[index] = rows, weights
            centred = rows - weights @ rows
            covariance = centred.T @ (weights[:, None] * centred)
            variances = (root @ covariance @ root + self.dampings[index] * root @ root).diag()
            factor = variances.rsqrt() * root.norm(dim=1) / layer["U"].norm(dim=1)  # from the U' before to the new one
            layer["U"] = factor[:, None] * layer["U"]
            for values in (self.parameters, *self.directions):
                values[2 * index].div_(factor)


def by_hand(
    steps: int = STEPS, num_samples: int = 6, ema: float | None = None, momentum: Any = None, **kw: Any
) -> list:
    reference = ScaledByHand(network(), EPS, **kw)
    plain = sgd(reference, 0.05, **(momentum or {"momentum": 0.9}))

    def step(gradients: list[Tensor]) -> None:
        plain(gradients)
        reference.rescale()

    return run_by_hand(reference, step, steps, EVERY, num_samples, ema)


def trained(optimizer: Any = None, loader: Any = None, steps: int = STEPS, **kwargs: Any) -> tuple[list, PRONG]:
    settings = {"every_n_steps": EVERY, "num_samples": 8, "eps": EPS, "plus": True, **kwargs}
    fitting = {name: settings.pop(name) for name in ("precision", "accumulate_grad_batches") if name in settings}
    callback, trajectory = PRONG(**settings), Trajectory()
    fit(Regression(network(), optimizer), trajectory, callback, steps=steps, loader=loader, **fitting)
    return trajectory.values, callback


MOMENTA = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("settings", MOMENTA.values(), ids=MOMENTA)
@pytest.mark.parametrize("num_samples", [8, 20])
def test_sgd_is_sgd_on_rescaled_parameters(settings, num_samples):
    ours, callback = trained(lambda p: torch.optim.SGD(p, lr=0.05, **settings), num_samples=num_samples)
    expected = by_hand(num_samples=num_samples, momentum=settings)
    assert deviation(ours, expected) < 1e-10
    assert callback.num_reparametrizations == (7 if num_samples == 20 else 6)
    plain, _ = trained(lambda p: torch.optim.SGD(p, lr=0.05, **settings), num_samples=num_samples, plus=False)
    assert deviation(plain, expected) > 1e-3


@pytest.mark.parametrize("settings", [{"mode": "diagonal"}, {"relative": True}, {"ema": 0.6}])
def test_other_statistics(settings):
    ours, _ = trained(**settings)
    assert deviation(ours, by_hand(num_samples=8, **settings)) < 1e-10


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lower_precision_follows_float64(precision):
    trajectory, callback = Trajectory(), PRONG(EVERY, 8, EPS, plus=True)
    loader = batches(dtype=torch.float32)
    fit(Regression(), trajectory, callback, steps=20, loader=loader, precision=precision)
    ours = [[value.double() for value in step] for step in trajectory.values]
    assert deviation(ours, by_hand(20, 8)) < {"32-true": 1e-4, "bf16-mixed": 0.1, "bf16-true": 0.3}[precision]
    assert callback.state_dict()["coefficients"]["net.0"]["units"]["variance"].dtype == torch.float32


def test_accumulation_is_a_larger_batch():
    """Where ``num_samples`` rows are not fewer than those of the large batch, so that all count."""
    kwargs = {"whiten_at_init": False, "num_samples": 16, "every_n_steps": 5}
    large, first = trained(None, batches(16, 64), 14, **kwargs)
    small, callback = trained(None, batches(4, 64), 14, accumulate_grad_batches=4, **kwargs)
    assert first.num_reparametrizations == callback.num_reparametrizations == 2
    assert deviation(small, large) < 1e-12
    plain, _ = trained(None, batches(16, 64), 14, plus=False, **kwargs)
    assert deviation(plain, large) > 1e-3


class Look(pl.Callback):
    """Keeps running variances, and how they are applied, after each batch."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        layers = whitened_layers(module).values()
        for layer in layers:
            torch.testing.assert_close(layer._applied.diagonal, 1 / layer.units.variance, rtol=0, atol=0)
        self.seen.append([layer.units.variance.clone() for layer in layers])


def test_units_begin_anew_and_the_spread_is_logged(tmp_path):
    look, logger = Look(), CSVLogger(tmp_path)
    prong = PRONG(EVERY, 8, EPS, plus=True)
    fit(Regression(), prong, look, steps=2 * EVERY, logger=logger)
    for step, variances in enumerate(look.seen, 1):
        assert all((v == 1).all() for v in variances) == (step % EVERY == 0)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        logged = [float(row["prong/plus_spread"]) for row in csv.DictReader(file) if row["prong/plus_spread"]]
    assert logged[0] == 0
    assert len(logged) == 3
    longer = Look()
    fit(Regression(), PRONG(2 * EVERY, 8, EPS, plus=True), longer, steps=EVERY)  # not yet reset after as many steps
    assert logged[1] == pytest.approx(max(float(v.log().abs().max()) for v in longer.seen[-1]))


def test_a_broken_batch_leaves_no_mark():
    inputs, targets = data(32).tensors
    inputs[8:16, 1] = torch.nan
    look = Look()
    module = Regression(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    items = list(zip(inputs.split(8), targets.split(8), strict=True))
    fit(module, PRONG(9, 8, EPS, plus=True), look, steps=2, loader=loader_of(items))
    assert all(map(torch.equal, *look.seen))


def test_validation_does_not_count():
    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0] + 5)

    runs = []
    for validate in (False, True):
        module, look = Validated(), Look()
        prong, run = PRONG(4, 8, EPS, plus=True), trainer(max_epochs=-1, max_steps=10, precision="64-true")
        run.callbacks += [prong, look]
        run.fit(module, batches(), batches() if validate else None)
        runs.append(look.seen)
    assert all(torch.equal(a, b) for left, right in zip(*runs, strict=True) for a, b in zip(left, right, strict=True))


def run(folder: Path, plus: bool = True, steps: int = 14, **kwargs: Any) -> tuple[Any, Any, PRONG]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), *network()[2:])
    module = Regression(net)
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {"precision": "32-true", "enable_checkpointing": True, **kwargs}
    prong = PRONG(4, 6, plus=plus)
    ended = fit(module, prong, saver, steps=steps, loader=batches(dtype=torch.float32), **settings)
    return module, ended, prong


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended.*")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resuming_is_exact(precision, tmp_path):
    whole, ended, prong = run(tmp_path, precision=precision)
    for step in (5, 10):
        module, again, resumed = run(tmp_path / "2", precision=precision, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert 0 < resumed.num_reparametrizations < prong.num_reparametrizations
        assert_equal(dict(module.state_dict()), dict(whole.state_dict()))
        assert_equal(resumed.state_dict(), prong.state_dict())
        assert_equal(again.optimizers[0].state_dict(), ended.optimizers[0].state_dict())


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint.*")
def test_a_checkpoint_may_switch_it_on_and_off(tmp_path):
    """On: from the next reparametrisation on. Off: D = 1 at once, so that P is that of the checkpoint's U."""
    run(tmp_path / "plain", plus=False, steps=5)
    run(tmp_path / "plus", steps=5)
    on = run(tmp_path / "on", steps=7, ckpt_path=tmp_path / "plain" / "step=5.ckpt")
    same = run(tmp_path / "same", plus=False, steps=7, ckpt_path=tmp_path / "plain" / "step=5.ckpt")
    assert_equal(dict(on[0].state_dict()), dict(same[0].state_dict()))
    assert all("units" not in state for state in on[2].state_dict()["coefficients"].values())
    later = run(tmp_path / "on", steps=9, ckpt_path=tmp_path / "plain" / "step=5.ckpt")
    assert all("units" in state for state in later[2].state_dict()["coefficients"].values())
    off = run(tmp_path / "off", plus=False, steps=6, ckpt_path=tmp_path / "plus" / "step=5.ckpt")
    state = off[2].state_dict()["coefficients"]["net.0"]
    assert "units" not in state
    assert (state["diagonal"] == 1).all()
    saved = torch.load(tmp_path / "plus" / "step=5.ckpt", weights_only=True)["callbacks"][off[2].state_key]
    assert (saved["coefficients"]["net.0"]["diagonal"] != 1).all()
    assert torch.equal(state["basis"], saved["coefficients"]["net.0"]["basis"])


def test_compiled():
    runs = []
    for compiled in (True, False):
        torch._dynamo.reset()
        module, trajectory = Regression(network()), Trajectory()
        if compiled:
            module.net = torch.compile(module.net, backend="aot_eager")
        fit(module, trajectory, PRONG(5, 6, EPS, plus=True), steps=12)
        runs.append(trajectory.values)
    assert deviation(*runs) < 1e-10


def test_fixed_entries_stay_and_layers_come_back():
    module = Plain(asymmetrize(deep_mlp(), n_fix=2, kappa=1.0))
    own = dict(module.named_modules())
    before = {name: value.clone() for name, value in constants_of(module).items()}
    look, prong = Look(), PRONG(4, 12, plus=True)
    trainer(prong, look).fit(module, datamodule=TinyData())
    assert len(prong.report.changed) == len(look.seen[0]) == 3
    assert any((v != 1).any() for v in look.seen[0])
    assert all(part is own[name] for name, part in module.named_modules())
    assert not any(isinstance(part, HasWhitening) for part in module.modules())
    assert all(torch.equal(value, constants_of(module)[name]) for name, value in before.items())


def test_layers_that_only_centre_are_not_rescaled():
    prong = PRONG(4, 8, EPS, plus=True, overrides={"net.2": {"mode": "center"}})
    fit(Regression(), prong, steps=2)
    units = {name: "units" in state for name, state in prong.state_dict()["coefficients"].items()}
    assert units == {"net.0": True, "net.2": False, "net.4": True}
