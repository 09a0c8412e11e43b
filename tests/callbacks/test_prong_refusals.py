"""What PRONG refuses, each with a message that says what to do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from prong_reference import Regression, fit
from torch import nn

from lightning_symmetry.callbacks.prong import PRONG
from lightning_symmetry.whitening import HasWhitening


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` to be at least 1 but got 0"),
        ({"num_samples": 1}, "`num_samples` to be at least 2 but got 1"),
        ({"eps": 0.0}, "`eps`"),
        ({"eps": math.nan}, "`eps`"),
        ({"eps": math.inf}, "`eps`"),
        ({"mode": "half"}, "`mode`.*'half'"),
        ({"ema": 1.0}, "`ema`"),
        ({"ema": 0.0}, "`ema`"),
        ({"coordinates": "polar"}, "`coordinates`.*'polar'"),
        ({"plus": True, "mode": "center"}, "mode='center' whitens none. Use 'full' or 'diagonal'"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        PRONG(**arguments)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Fetching(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(
    ("module", "callbacks", "message"),
    [
        (lambda: Manual(), [PRONG()], "manual optimization"),
        (lambda: Fetching(), [PRONG()], "dataloader_iter"),
        (lambda: Regression(nn.Sequential(nn.BatchNorm1d(6))), [PRONG()], "nothing to convert"),
        (lambda: Regression(), [PRONG(skip=["*"])], "nothing to convert"),
        (lambda: Regression(), [PRONG(skip=["head"])], "'head', which matches no layer"),
        (lambda: Regression(), [PRONG(overrides={"net.0": {"eps": 1}})], r"sets \['eps'\]"),
        (lambda: Regression(None, adam), [PRONG(), EMAWeightAveraging()], "EMAWeightAveraging averages"),
        (lambda: Regression(None, adam), [StochasticWeightAveraging(0.1), PRONG()], "StochasticWeightAveraging"),
        (lambda: Regression(None, adam), [PRONG(plus=True)], "net.0 are explicit .* Use SGD .* batch normalisation"),
        (lambda: Regression(), [PRONG(plus=True, overrides={"net.2": {"explicit": True}})], "net.2 are explicit"),
    ],
)
def test_fits(module, callbacks, message):
    module = module()
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, *callbacks, steps=-1, max_epochs=3)
    assert not any(isinstance(part, HasWhitening) for part in module.modules())


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_shard_parameters(kind):
    run = SimpleNamespace(strategy=kind())  # they need accelerators to train
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__} shards them"):
        PRONG().setup(run, Regression(), "fit")


def test_two_of_them():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `PRONG`"):
        fit(Regression(), PRONG(), PRONG(num_samples=7), steps=1)


def test_canonical_coordinates_of_an_elementwise_optimizer_warn():
    with pytest.warns(UserWarning, match="Adam acts on each entry.*does not follow PRONG"):
        fit(Regression(None, adam), prong := PRONG(coordinates="canonical"), steps=1)
    assert "canonical" in str(prong.report)
    assert isinstance(prong, pl.Callback)
