"""The callback's iterates are those of Algorithm 1 by hand, for every optimizer, accumulation and precision."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from prong_reference import (
    ByHand,
    Regression,
    Trajectory,
    adam,
    batches,
    data,
    deviation,
    fit,
    network,
    run_by_hand,
    sgd,
    stream,
)
from tiny_modules import trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.whitening import HasWhitening

STEPS, EVERY, EPS = 27, 5, 0.3

MOMENTA = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"momentum": 0.9, "weight_decay": 0.1},
}


def trained(optimizer: Any, loader: Any = None, steps: int = STEPS, **kwargs: Any) -> tuple[list, PRONG]:
    """Train with the callback; return the trajectory."""
    callback, trajectory = PRONG(**{"every_n_steps": EVERY, "num_samples": 6, "eps": EPS, **kwargs}), Trajectory()
    fit(Regression(network(), optimizer), trajectory, callback, steps=steps, loader=loader)
    return trajectory.values, callback


def by_hand(step: Any, num_samples: int = 6, ema: float | None = None, **kwargs: Any) -> list:
    reference = ByHand(network(), EPS, **kwargs)
    return run_by_hand(reference, step(reference), STEPS, EVERY, num_samples, ema)


@pytest.mark.parametrize("coordinates", ["canonical", "explicit"])
@pytest.mark.parametrize("settings", MOMENTA.values(), ids=MOMENTA)
@pytest.mark.parametrize("num_samples", [6, 8, 20])
def test_sgd_is_sgd_on_whitened_parameters(settings, num_samples, coordinates):
    """Fewer samples than a batch, as many, more (and then a second time at the start): 6 to 7 reparametrisations."""
    ours, callback = trained(
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, **settings),
        num_samples=num_samples,
        coordinates=coordinates,
    )
    expected = by_hand(lambda reference: sgd(reference, 0.05, **settings), num_samples)
    assert deviation(ours, expected) < 1e-10
    assert callback.num_reparametrizations == (7 if num_samples == 20 else 6)
    assert callback.failures == 0
    without = Trajectory()
    fit(Regression(network(), lambda p: torch.optim.SGD(p, lr=0.05, **settings)), without, steps=STEPS)
    assert deviation(without.values, expected) > 0.1


@pytest.mark.parametrize("settings", [{"mode": "diagonal"}, {"mode": "center"}, {"relative": True}, {"ema": 0.6}])
def test_other_statistics(settings):
    ours, _ = trained(None, **settings)
    expected = by_hand(lambda reference: sgd(reference, 0.05, 0.9), **settings)
    assert deviation(ours, expected) < 1e-10


def test_adam_acts_on_whitened_parameters():
    """Its first moment is carried through a reparametrisation as a direction, its second moment is kept."""
    ours, callback = trained(lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    assert deviation(ours, by_hand(lambda reference: adam(reference, 0.01))) < 1e-9
    assert 0 < callback.measured["prong/function_deviation"] < 1e-13


def test_gradients_are_clipped_after_they_are_preconditioned():
    callback, trajectory = PRONG(EVERY, 6, EPS), Trajectory()
    module = Regression(network(), lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    fit(module, trajectory, callback, steps=STEPS, gradient_clip_val=0.1)
    reference = ByHand(network(), EPS)
    plain, factors = sgd(reference, 0.5), []

    def clipped(gradients):
        norm = torch.cat([value.flatten() for value in reference.canonical(gradients)]).norm()
        factors.append(min(1.0, 0.1 / (float(norm) + 1e-6)))
        plain([gradient * factors[-1] for gradient in gradients])

    assert deviation(trajectory.values, run_by_hand(reference, clipped, STEPS, EVERY, 6)) < 1e-10
    assert min(factors) < 0.5


def test_accumulation_is_a_larger_batch():
    kwargs = {"whiten_at_init": False, "num_samples": 16}
    large, first = trained(None, batches(16, 64), steps=12, **kwargs)
    callback, trajectory = PRONG(EVERY, 16, EPS, whiten_at_init=False), Trajectory()
    small_batches = batches(4, 64)
    fit(Regression(), trajectory, callback, steps=12, loader=small_batches, accumulate_grad_batches=4)
    assert first.num_reparametrizations == callback.num_reparametrizations == 2
    assert deviation(trajectory.values, large) < 1e-12
    unwhitened = Trajectory()
    fit(Regression(), unwhitened, steps=12, loader=batches(16, 64))
    assert deviation(large, unwhitened.values) > 0.1


def test_accumulation_with_fixed_samples():
    samples = list(batches(16, 64))[:1]
    large, first = trained(None, batches(16, 64), steps=12, samples=samples)
    callback, trajectory = PRONG(EVERY, 16, EPS, samples=samples), Trajectory()
    fit(Regression(), trajectory, callback, steps=12, loader=batches(4, 64), accumulate_grad_batches=4)
    assert first.num_reparametrizations == callback.num_reparametrizations == 3
    assert deviation(trajectory.values, large) < 1e-12


@pytest.mark.parametrize("num_samples", [8, 20])
def test_a_short_batch_before_a_reparametrisation(num_samples):
    """Each epoch ends in a batch of 2, and with it an interval: batches before it are needed too."""
    ours, _ = trained(lambda p: torch.optim.SGD(p, lr=0.05), batches(8, 34), steps=15, num_samples=num_samples)
    reference = ByHand(network(), EPS)
    expected = run_by_hand(reference, sgd(reference, 0.05, momentum=0.0), 15, EVERY, num_samples, count=34)
    assert deviation(ours, expected) < 1e-10


def test_fixed_samples_replace_the_stream():
    """Here the samples are what the stream would have given."""
    stream, _ = trained(None, batches(40), num_samples=40)
    fixed, _ = trained(None, batches(40), num_samples=2, samples=batches(40))
    assert deviation(fixed, stream) < 1e-13
    other, _ = trained(None, batches(40), num_samples=40, samples=[[x + 1, y] for x, y in batches(40)])
    assert deviation(other, stream) > 0.01


def test_skip_and_overrides():
    module, callback = Regression(), PRONG(EVERY, 6, skip=["net.0"], overrides={"net.2": {"mode": "center"}})
    kinds = {}

    class Look(Trajectory):
        def on_train_batch_end(self, run, module, *args):
            kinds.update({name: getattr(part, "mode", None) for name, part in module.net.named_children()})

    fit(module, callback, Look(), steps=1)
    assert kinds == {"0": None, "1": None, "2": "center", "3": None, "4": "full"}
    assert callback.report.changed == ["net.2", "net.4"]


def test_measures_fresh_samples_with_the_coefficients_that_were_used(tmp_path):
    """At the only reparametrisation of one step, by hand: those of the first batch, on the second."""
    logger = CSVLogger(tmp_path)
    callback = PRONG(1, 8, EPS)
    module = Regression(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    fit(module, callback, steps=2, logger=logger)
    first, second = (x for (x, _), _ in zip(batches(8), range(2), strict=False))
    conditions, eigenvalues = [], []
    reference = ByHand(network(), EPS)
    inputs, fresh = [], []
    reference.forward(first, inputs)
    reference.forward(second, fresh)
    for old, new in zip(inputs, fresh, strict=True):
        root = reference._root(torch.cov(old.T, correction=0))
        covariance = torch.cov(new.T, correction=0)
        conditions.append(torch.linalg.cond(covariance + EPS * torch.eye(len(covariance)).double()))
        eigenvalues.append(torch.linalg.eigvalsh(root @ covariance @ root).max())
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["prong/condition"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert float(rows[2]["prong/condition"]) == pytest.approx(float(sum(conditions)) / 3, rel=1e-9)
    assert float(rows[2]["prong/largest_eigenvalue"]) == pytest.approx(float(max(eigenvalues)), rel=1e-9)
    assert 0 < float(rows[2]["prong/time_share"]) < 1
    assert {f"prong/{name}" for name in ("condition", "largest_eigenvalue", "failures", "time_share")} == {
        name for name in rows[2] if name.startswith("prong/")
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("coordinates", ["canonical", "explicit"])
def test_lower_precision_follows_float64(precision, coordinates):
    expected = by_hand(lambda reference: sgd(reference, 0.05, 0.9))
    trajectory, callback = Trajectory(), PRONG(EVERY, 6, EPS, coordinates=coordinates)
    loader = batches(dtype=torch.float32)
    fit(Regression(), trajectory, callback, steps=STEPS, loader=loader, precision=precision)
    ours = [[value.double() for value in step] for step in trajectory.values]
    tolerance = {"32-true": 1e-4, "bf16-mixed": 0.1, "bf16-true": 0.3}[precision]
    assert deviation(ours, expected) < tolerance
    assert callback.failures == 0


@pytest.mark.parametrize("what", ["net", "net in place", "module"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_compiled(what, optimizer):
    def build(compiled: bool) -> Regression:
        module = Regression(network(), lambda parameters: optimizer(parameters, lr=0.01))
        if compiled and what == "net":
            module.net = torch.compile(module.net, backend="aot_eager")
        elif compiled and what == "net in place":
            module.net.compile(backend="aot_eager")
        return torch.compile(module, backend="aot_eager") if compiled and what == "module" else module

    runs = []
    for compiled in (True, False):
        torch._dynamo.reset()
        trajectory, callback = Trajectory(), PRONG(EVERY, 6, EPS)
        fit(build(compiled), trajectory, callback, steps=12)
        assert callback.num_reparametrizations == 3
        runs.append(trajectory.values)
    assert deviation(*runs) < 1e-10


@pytest.mark.parametrize("averaging", [EMAWeightAveraging, StochasticWeightAveraging])
def test_averages_of_weights_are_those_of_the_trajectory(averaging):
    kwargs = {"decay": 0.9} if averaging is EMAWeightAveraging else {"swa_lrs": 0.05, "swa_epoch_start": 2}
    # with batch normalisation the other one goes on for an epoch, and takes one more step
    norm = [nn.BatchNorm1d(3)] if averaging is EMAWeightAveraging else []
    module, trajectory = Regression(nn.Sequential(*network(), *norm)), Trajectory()
    fit(module, PRONG(EVERY, 6, EPS), trajectory, averaging(**kwargs), steps=-1, max_epochs=4)
    values = [torch.cat([v.flatten() for v in step[:6]]) for step in trajectory.values]
    if averaging is EMAWeightAveraging:
        average = values[0]
        for value in values[1:]:
            average = 0.9 * average + 0.1 * value
    else:
        average = (values[4] + values[9] + values[14]) / 3
    ours = torch.cat([value.flatten() for value in list(module.net.state_dict().values())[:6]])
    torch.testing.assert_close(ours, average, rtol=0, atol=1e-6)  # the average of a float64 run is float32


def test_barebones():
    callback = PRONG(EVERY, 6)
    run = pl.Trainer(barebones=True, max_steps=6, accelerator="cpu", callbacks=[callback])
    run.fit(Regression(), batches(dtype=torch.float32))
    assert callback.num_reparametrizations == 2
    assert set(callback.measured) == {"prong/failures", "prong/time_share"}


class Unusual(Regression):
    """Takes a dictionary, changes it in place, keeps a result, calls one layer twice and another never."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        net.never = nn.Linear(2, 2)
        super().__init__(net, lambda parameters: torch.optim.SGD(parameters, lr=0.0))

    def training_step(self, batch: Any) -> Any:
        batch["x"] /= 2
        hidden = self.net[1](self.net[0](self.net[1](self.net[0](batch["x"]))))
        self.hidden = hidden  # with its history: it cannot be deep-copied
        return {"loss": (self.net[2](hidden) - batch["y"]).square().mean()}


def test_an_unusual_module():
    """The step of its copy sees batches as the module's own does; calls of a layer are pooled."""
    rows = [{"x": x, "y": y} for x, y in zip(*data(32).tensors, strict=True)]
    module, callback = Unusual(), PRONG(2, 12, EPS)
    with pytest.warns(UserWarning, match=r"1 layer\(s\).*net.never \(it was not called\)"):
        fit(module, callback, steps=4, loader=DataLoader(rows, batch_size=8))
    assert callback.failures == callback.num_reparametrizations == 3
    x = data(32).tensors[0][16:] / 2
    pooled = torch.cat([x, torch.tanh(module.net[0](x).detach())])
    torch.testing.assert_close(callback.state_dict()["coefficients"]["net.0"]["center"][0], pooled.mean(0))


class BuiltLate(Regression):
    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = network()


def test_layers_of_configure_model():
    late, usual = Trajectory(), Trajectory()
    for module, trajectory in ((BuiltLate(), late), (Regression(), usual)):
        loader = batches(dtype=torch.float32)
        fit(module, trajectory, PRONG(EVERY, 6, EPS), steps=7, loader=loader, precision="32-true")
    assert all(map(torch.equal, late.values[-1], usual.values[-1]))


def test_a_dead_unit_and_diverged_activations():
    """A constant input gets the multiplier 1 / eps; NaN keeps the coefficients, warns once, and the fit goes on."""
    inputs, targets = data(32).tensors
    inputs[:, 0] = 1.0
    inputs[16:24, 1] = torch.nan
    loader = stream(list(zip(inputs.split(8), targets.split(8), strict=True)))
    states = []

    class Kept(Trajectory):
        def on_train_batch_end(self, run, module, *args):
            layer = module.net[0]
            assert isinstance(layer, HasWhitening)
            states.append(layer.whitening_matrix())

    module = Regression(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    callback = PRONG(1, 8, EPS)
    with pytest.warns(UserWarning, match="not finite") as caught:
        fit(module, callback, Kept(), steps=4, loader=loader)
    assert len([w for w in caught if "PRONG left" in str(w.message)]) == 1
    assert callback.failures == 5  # all three layers; then the two whose inputs come from weights that are NaN now
    assert states[0][0][0, 0, 0] == pytest.approx(EPS**-0.5)
    assert all(torch.equal(a, b) for a, b in zip(states[1], states[2], strict=True))
    assert not torch.equal(states[2][1], states[3][1])
    assert states[3][0].isfinite().all()


def test_a_broken_batch_leaves_no_mark_in_a_moving_average():
    inputs, targets = data(32).tensors
    loader = list(zip(inputs.split(8), targets.split(8), strict=True))
    broken = [*loader]
    broken[1] = (loader[1][0] * torch.nan, loader[1][1])
    runs = []
    for shown in (broken, [loader[0], *loader[2:]]):
        module = Regression(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        callback = PRONG(1, 8, EPS, ema=0.5)
        fit(module, callback, steps=len(shown), loader=stream(shown))
        runs.append(callback.state_dict()["coefficients"]["net.0"])
    assert runs[0].keys() == runs[1].keys()
    for name, value in runs[0].items():
        assert value is runs[1][name] is None or torch.equal(value, runs[1][name])


def test_types_for_the_command_line():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(PRONG, "prong")
    given = ["--prong.every_n_steps=7", "--prong.ema=0.5", "--prong.skip=['net.0']", "--prong.mode=diagonal"]
    callback = parser.instantiate(parser.parse_args(given)).prong
    assert (callback.every_n_steps, callback.ema, callback.skip, callback.mode) == (7, 0.5, ["net.0"], "diagonal")
    assert trainer(callback).callbacks.count(callback) == 1
