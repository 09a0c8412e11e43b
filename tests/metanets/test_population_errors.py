"""What a population refuses, its settings, and augmentation against a loop over images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_symmetry.metanets import zoo_classifier
from lightning_symmetry.metanets.population import PopulationSettings, evaluate_population, train_population
from lightning_symmetry.metanets.population_augment import PopulationAugmentation
from lightning_symmetry.metanets.population_settings import learning_rate_factor

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 1, 0])


def linear(*layers, width=3):
    return nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 2))


def values(count, **other):
    base = {"learning_rate": [0.1], "weight_decay": [0.0], "label_smoothing": [0.0], "epochs": [1], "seed": [0]}
    return {name: value * count for name, value in base.items()} | other


class FunctionalDropout(nn.Linear):
    def forward(self, input):
        return F.dropout(super().forward(input), 0.5)


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ([], "at least one network"),
        ([linear(), linear(width=5)], "0.weight has shape.*network 0.*network 1"),
        ([linear(nn.ReLU()), linear(nn.Tanh())], r"network 0 has .*ReLU.*network 1 has .*Tanh"),
        ([linear(), nn.Linear(4, 2)], "network 0 is a Sequential, network 1 a Linear"),
        ([linear(), linear().double()], "float32 in network 0, but float64 in network 1"),
        ([zoo_classifier("w"), zoo_classifier("w", constants_seed=1)], "network 0.*network 1 differ"),
        ([zoo_classifier("sigma"), zoo_classifier("sigma", constants_seed=1)], "network 0.*network 1 differ"),
        ([linear(nn.Dropout(0.1))], r"1 \(Dropout\) draws random numbers"),
        ([linear(nn.RReLU())], r"1 \(RReLU\)"),
        ([FunctionalDropout(4, 2)], "FunctionalDropout draws random numbers"),
    ],
)
def test_networks_that_cannot_be_stacked(networks, message):
    with pytest.raises(ValueError, match=message):
        train_population(networks, X, Y, values(len(networks)))


def test_networks_that_train_other_parameters():
    frozen = linear()
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="network 0 and network 1 train other parameters"):
        train_population([linear(), frozen], X, Y, values(2))


def test_dropout_that_never_drops_is_allowed():
    assert not train_population([linear(nn.Dropout(0.0))], X, Y, values(1)).diverged.any()


def test_batch_norm_of_one_sample_is_refused_as_by_torch():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train_population([linear(nn.BatchNorm1d(3))], X, Y, values(1), PopulationSettings(batch_size=5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": [0]}, "`epochs` to be an integer of at least 1 but got 0 for network 0"),
        ({"epochs": [1.5]}, "`epochs` to be an integer"),
        ({"label_smoothing": [1.5]}, "`label_smoothing` .* at most 1 but got 1.5"),
        ({"learning_rate": [np.nan]}, "`learning_rate` .* got nan"),
        ({"weight_decay": [-1.0]}, "`weight_decay` .* at least 0 but got -1.0"),
        ({"seed": [1, 2]}, "`seed` to have one value for each of 1 networks"),
    ],
)
def test_hyperparameters_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        train_population([linear()], X, Y, values(1, **wrong))
    short = values(1)
    short.pop(next(iter(wrong)))
    with pytest.raises(ValueError, match="missing"):
        train_population([linear()], X, Y, short)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (X, Y[:3], "one entry a sample"),
        (X[:0], Y[:0], "one entry a sample"),
        (X, Y.int(), "int64"),
        (X.double(), Y, "torch.float32 as the networks are but got torch.float64"),
    ],
)
def test_data_that_does_not_fit(inputs, targets, message):
    with pytest.raises(ValueError, match=message):
        train_population([linear()], inputs, targets, values(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "adam"},
        {"batch_size": 0},
        {"warmup": 1.5},
        {"momentum": -0.1},
        {"nesterov": True, "momentum": 0.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1.0},
    ],
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong)) if 'nesterov' not in wrong else 'momentum'}`"):
        PopulationSettings(**wrong)
    with pytest.raises(ValueError, match="`augment` to be 'module:function'"):
        PopulationSettings(augment="nowhere:nothing").augmentation()


def test_states_of_another_network_are_refused():
    net = zoo_classifier("w")
    state = {name: value.unsqueeze(0).clone() for name, value in net.state_dict().items()}
    images, target = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"head.bias of `states` to have shape \(1, 10\)"):
        evaluate_population(net, state | {"head.bias": torch.zeros(1, 9)}, images, target)
    with pytest.raises(ValueError, match=r"constants head\.fixed"):
        evaluate_population(net, state | {"head.fixed": 1 + state["head.fixed"]}, images, target)


@pytest.mark.parametrize("warmup", [0.0, 0.2, 0.33, 1.0])
def test_rate_is_the_interpolation_of_three_points(warmup):
    steps, total = np.arange(26), 25
    points = ([0, warmup * total, total], [0, 1, 0])
    expected = np.interp(steps, *points) if 0 < warmup < 1 else steps / total if warmup else 1 - steps / total
    found = learning_rate_factor(steps[:-1], np.full(25, total), warmup)
    np.testing.assert_allclose(found, expected[:-1], atol=1e-15)


def test_augmentation_is_that_of_a_loop_over_images():
    augment = PopulationAugmentation(padding=1, cutout=3)
    images = torch.randn(200, 2, 6, 7) + 5
    draws = augment.draw(200, torch.Generator().manual_seed(0))
    found = augment(images, torch.Generator().manual_seed(0))
    for image, (flip, *places), result in zip(images, draws.tolist(), found, strict=True):
        y, x, top, left = (int(place * n) for place, n in zip(places, (3, 3, 4, 5), strict=True))
        expected = image.flip(-1) if flip < 0.5 else image
        expected = F.pad(expected, [1] * 4)[:, y : y + 6, x : x + 7].clone()
        expected[:, top : top + 3, left : left + 3] = 0
        assert torch.equal(result, expected)
    assert torch.equal(PopulationAugmentation(0.0, 0, 0)(images, torch.Generator()), images)
    with pytest.raises(ValueError, match="`cutout` to fit into 6 x 7"):
        PopulationAugmentation(cutout=7)(images, torch.Generator())
    for wrong in ({"flip": 2.0}, {"padding": -1}, {"cutout": -1}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
            PopulationAugmentation(**wrong)
