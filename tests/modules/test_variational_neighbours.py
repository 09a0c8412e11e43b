"""Bayesian modules beside what users and this library have: helpers of the module, other callbacks."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bayesian_modules import SIZES, Bayesian, Network, bayesian, fit, loader, samples, trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_symmetry.callbacks import (
    PRONG,
    EffectiveRankMonitor,
    FisherConditioning,
    FrobeniusDecay,
    LinearInterpolation,
    SpectralFactorization,
)
from lightning_symmetry.low_rank import effective_rank
from lightning_symmetry.modules import VariationalMixin
from lightning_symmetry.variational import to_mean, variational_layers
from lightning_symmetry.whitening import fisher_blocks


class Helpers(Network):
    """A module whose own helpers have names that a mixin could have too."""

    def __init__(self) -> None:
        super().__init__()
        self._seed, self._calls, self._num_data = 3, 0, SIZES["val"]

    def _train(self, batch: Any) -> torch.Tensor:
        self._calls += 1
        return super().training_step(batch)

    def _evaluate(self, batch: Any, split: str) -> None:
        self.log(f"{split}/loss", F.cross_entropy(self(batch[0]), batch[1]))

    _convert = _count = _seeded = property(lambda self: "mine")

    def training_step(self, batch: Any) -> torch.Tensor:
        return self._train(batch)

    def validation_step(self, batch: Any) -> None:
        self._evaluate(batch, "val")


class BayesianHelpers(VariationalMixin, Helpers):
    pass


def test_helpers_of_the_module_keep_their_names():
    module = BayesianHelpers()
    run = trainer(max_epochs=1)
    run.fit(module, loader("train"), loader("val"))
    assert run.callback_metrics["val/loss"] > 0 and len(module.losses) == 4
    assert (module._seed, module._calls, module._num_data, module._convert) == (3, 4, SIZES["val"], "mine")
    private = {name for name in vars(VariationalMixin) if name.startswith("_") and not name.startswith("__")}
    private |= vars(module).keys() - vars(Helpers()).keys()
    assert all(name.startswith(("_vi_", "variational")) for name in private)


@pytest.mark.parametrize("given", [{}, {"num_data": 26}])
def test_several_targets_of_a_sample_are_warned_of(given):
    """Where the loss is a mean over tokens, N is not the number of sequences."""
    inputs, target = samples("train").tensors
    data = DataLoader(TensorDataset(inputs.unflatten(0, (13, 2)), target.unflatten(0, (13, 2))), 4)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(bayesian(loss=loss, **given), data=data, max_epochs=1)
    told = "Each of the 13 training samples has 2 targets. If the loss is the mean over all of these"
    assert any(told in str(one.message) and "num_data=26;" in str(one.message) for one in found) == (not given)


def test_interpolation_evaluates_the_mean_by_the_training_step():
    module, callback = Bayesian(lr=0.5), LinearInterpolation("init", num_points=2, split="train", progress=False)
    start = copy.deepcopy(to_mean(copy.deepcopy(module.net)))
    fit(module, callback)
    for net, found in zip((start, to_mean(copy.deepcopy(module.net))), callback.result.loss, strict=True):
        inputs, target = samples("train").tensors
        assert float(found) == pytest.approx(float(F.cross_entropy(net(inputs), target).detach()), rel=1e-5)
    assert len(variational_layers(module)) == 2


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: PRONG(every_n_steps=2, num_samples=8), "PRONG cannot whiten VariationalModule"),
        (lambda: SpectralFactorization(rank=1, at_epoch=1), "SpectralFactorization cannot factorise VariationalModule"),
        (lambda: FrobeniusDecay(0.1), "FrobeniusDecay decays factors, but VariationalModule has none"),
    ],
)
def test_what_is_for_plain_weights_is_refused(callback, message):
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(MisconfigurationException, match=message):
        fit(bayesian(optimizer=sgd), callback())


def test_ranks_and_conditioning_are_those_of_the_mean():
    ranks = EffectiveRankMonitor(every_n_steps=8)
    fisher = FisherConditioning(["net.2"], every_n_steps=100, num_samples=20, progress=False)
    module = bayesian()
    fit(module, ranks, fisher)
    mean = to_mean(copy.deepcopy(module.net))
    assert ranks.measured == pytest.approx({f"net.{i}": float(effective_rank(mean[i])) for i in (0, 2)}, rel=1e-4)
    batch = tuple(tensor[:20] for tensor in samples("train").tensors)
    expected = fisher_blocks(mean.double(), (batch[0].double(), batch[1]), ["2"], progress=False)["2"]
    torch.testing.assert_close(fisher.matrices["net.2"]["end"], expected, rtol=1e-5, atol=1e-8)
