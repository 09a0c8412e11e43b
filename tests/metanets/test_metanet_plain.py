"""Metanetworks on flat weights and on sets, against closed forms and the paper's counts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from metanet_cases import METANETS, randomise, setting
from torch import nn

from lightning_symmetry.metanets import DMC, FlatMLP, StatNN, WeightDeepSets, WeightLayout, zoo_classifier
from lightning_symmetry.metanets.dmc import minimal_length


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: FlatMLP({"w": (78_042,)}), 4_994_945),
        (lambda: FlatMLP({"w": (60_634,)}), 3_880_833),
        (lambda: DMC({"w": (78_042,)}), 105_357),
        (lambda: DMC({"w": (60_634,)}), 105_357),
        (lambda: WeightDeepSets({"w": (78_042,)}, per_tensor=False), 8_897),
    ],
)
def test_numbers_of_parameters_of_the_paper(make, expected):
    """Table 9 of The Empirical Impact of Neural Parameter Symmetries."""
    assert count(make()) == expected


@pytest.mark.parametrize(("kind", "free"), [("standard", 78_042), ("sigma", 78_042), ("w", 60_874)])
def test_numbers_of_parameters_for_our_zoos(kind, free):
    """The documented ones; where they are not the paper's, its W-asymmetric network has 240 trainable weights fewer."""
    layout = WeightLayout.of(zoo_classifier(kind, "cifar10"))
    assert len(layout.free) == free
    assert count(FlatMLP(layout)) == 64 * free + 257 == {78_042: 4_994_945, 60_874: 3_896_193}[free]
    assert count(DMC(layout)) == 105_357
    assert count(WeightDeepSets(layout, per_tensor=False)) == 8_897
    assert count(WeightDeepSets(layout)) == 125_377
    assert count(StatNN(layout)) == 119_297


@pytest.mark.parametrize("per_tensor", [True, False])
def test_deep_sets_is_its_equation(per_tensor):
    sizes = {"a": (3, 4), "b": (5,)}
    metanet = WeightDeepSets(sizes, 6, (7,), per_tensor=per_tensor).double()
    metanet.norm.weight.data.normal_()
    rows = torch.randn(3, 17, dtype=torch.float64)
    u, embeddings = metanet.scale.detach().numpy(), metanet.embedding.detach().numpy()
    gain, shift = metanet.norm.weight.detach().numpy(), metanet.norm.bias.detach().numpy()
    means = []
    for number, part in enumerate(np.split(rows.numpy(), [12] if per_tensor else [], axis=1)):
        inside = part[..., None] * u + embeddings[number]
        centred = inside - inside.mean(-1, keepdims=True)
        normed = centred / np.sqrt(inside.var(-1, keepdims=True) + 1e-5) * gain + shift
        means.append(np.maximum(normed, 0).mean(1))
    expected = metanet.readout(torch.from_numpy(np.concatenate(means, axis=1))).squeeze(1)
    torch.testing.assert_close(metanet(rows), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", [(True,), (False, True), (True, True, False), (True, True, True, True)])
def test_the_shortest_vector_leaves_one_place(pool):
    length = minimal_length(pool)
    metanet = DMC({"w": (length,)}, [3] * len(pool), pool, hidden=4)
    assert metanet.convolutions(torch.zeros(2, 1, 1, length)).shape == (2, 3, 1, 1)
    with pytest.raises(ValueError, match=f"need at least {length} weights"):
        DMC({"w": (length - 1,)}, [3] * len(pool), pool)


def test_pools_of_the_default():
    kinds = [type(layer) for layer in DMC({"w": (9000,)}).convolutions]
    after = [
        kinds[i + 3] is nn.MaxPool2d if i + 3 < len(kinds) else False for i, k in enumerate(kinds) if k is nn.Conv2d
    ]
    assert after == [True] * 6 + [False, True, False, True]


def test_errors():
    with pytest.raises(ValueError, match="equally long"):
        DMC({"w": (100,)}, (2, 4), (True,))
    with pytest.raises(ValueError, match="`hidden` to be at least 1"):
        WeightDeepSets({"w": (3,)}, hidden=0)


@pytest.mark.parametrize("name", METANETS)
def test_copies_outputs_and_bounds(name):
    net, spec, layout = setting("mlp")
    rows = torch.stack([layout.flatten(randomise(net, seed).state_dict()) for seed in range(3)])
    metanet = METANETS[name](layout, spec).eval()
    assert metanet(rows).shape == (3,)
    for other in (copy.deepcopy(metanet), pickle.loads(pickle.dumps(metanet))):
        assert torch.equal(other(rows), metanet(rows))
    logits = metanet(rows)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(metanet(rows).float(), logits, rtol=0.05, atol=0.05)
    metanet.bounded = True
    torch.testing.assert_close(metanet(rows), 1 / (1 + torch.exp(-logits)))
    with pytest.raises(ValueError, match="Expected rows of"):
        metanet(rows[:, 1:])
