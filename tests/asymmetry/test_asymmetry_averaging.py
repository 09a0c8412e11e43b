"""Networks with constants beside Lightning's averages of weights, as the documentation of `asymmetrize` says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from tiny_data import CLASSES, FEATURES, loader, trainer
from torch import nn

from lightning_symmetry import SupervisedModule, asymmetrize
from lightning_symmetry.surgery import constants_of

AVERAGES = {
    "equal": partial(WeightAveraging, use_buffers=False),
    "exponential": partial(EMAWeightAveraging, use_buffers=False, decay=0.9),
    "stochastic": partial(StochasticWeightAveraging, 1e-2, swa_epoch_start=1),
}


@pytest.mark.parametrize("method", ["w", "sigma"])
@pytest.mark.parametrize("average", AVERAGES)
def test_averages_keep_the_constants(average, method):
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    settings = {"n_fix": 2} if method == "w" else {}
    asymmetrize(net, method, example_input=torch.zeros(2, FEATURES), **settings)
    before = {name: value.clone() for name, value in constants_of(net).items()}
    start = [parameter.detach().clone() for parameter in net.parameters()]
    trainer(AVERAGES[average](), max_epochs=4).fit(SupervisedModule(net), loader("train", shuffle=True))
    after = constants_of(net)
    assert before and all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(torch.equal(a, b) for a, b in zip(start, net.parameters(), strict=True))
    for name, value in net.state_dict().items():  # weights hold the constants in their places
        if f"{name.removesuffix('weight')}mask" in before:
            mask = before[f"{name.removesuffix('weight')}mask"]
            fixed = before[f"{name.removesuffix('weight')}fixed"]
            assert torch.equal(value[~mask], fixed.flatten())
