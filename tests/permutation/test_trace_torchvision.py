"""Reference networks of torchvision and of this library: outputs are kept, and nearly all weights take part."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torchvision import models
from trace_reference import EXACT, ROUNDING, assert_symmetric, normal, randomise, sizes

from lightning_symmetry import GNN, MLP, ResNet20
from lightning_symmetry.permutation.spec import trace_permutations

IMAGE = {"vit_b_16": 64, "swin_t": 64, "swin_v2_t": 64, "squeezenet1_1": 64, "googlenet": 64, "inception_v3": 80}
OPTIONS = {
    "vit_b_16": {"image_size": 64},
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False},
}
EIGHT = ["resnet18", "resnet50", "vgg11_bn", "densenet121", "mobilenet_v2", "convnext_tiny", "vit_b_16", "swin_t"]
MORE = [
    *("resnext50_32x4d", "shufflenet_v2_x0_5", "regnet_y_400mf", "efficientnet_b0", "mobilenet_v3_small"),
    *("swin_v2_t", "squeezenet1_1", "googlenet", "inception_v3", "mnasnet0_5"),
]
UNUSED = {"googlenet": 6, "inception_v3": 3}  # weights of auxiliary heads, which run in training only
STILL = {"shufflenet_v2_x0_5": 1, **UNUSED}
GROUPS = {
    "resnet18": 12,  # four stages, and within each of eight blocks
    "resnet50": 37,  # the stem, four stages, and twice within each of 16 blocks
    "densenet121": 120,  # the stem, the new channels of 58 layers and within each, and three transitions
    "mobilenet_v2": 25,  # the stem, the first block, 16 expansions, and the widths of seven stages with their head
    "convnext_tiny": 22,  # four stages and within each of 18 blocks
    "vit_b_16": 1 + 12 * (1 + 1 + 12 + 12),  # the stream; in each block the MLP, heads, and entries of keys and values
}


def build(name):
    """Return the network with seven classes; VGG with a classifier of a tenth of the width."""
    if name == "vgg11_bn":
        net = models.vgg11_bn(num_classes=7)
        net.avgpool = nn.AdaptiveAvgPool2d(2)
        net.classifier = nn.Sequential(nn.Linear(2048, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 7))
        return net
    return getattr(models, name)(num_classes=7, **OPTIONS.get(name, {}))


def images(name):
    return normal(1, 3, *2 * [IMAGE.get(name, 32)])


@pytest.mark.parametrize("name", [*EIGHT, *MORE])
def test_output_is_kept_in_float64(name):
    net = build(name).double()
    spec = assert_symmetric(net, images(name), EXACT, elements=1)
    assert not spec.frozen_by
    weights = {key for key, parameter in net.named_parameters() if parameter.ndim > 1}
    assert len(weights - set(spec.moved)) == STILL.get(name, 0)
    if name in GROUPS:
        assert len(spec.groups) == GROUPS[name]


@pytest.mark.parametrize("name", EIGHT)
def test_output_is_kept_in_float32(name):
    assert_symmetric(build(name), images(name).float(), ROUNDING, elements=1)


@pytest.mark.parametrize(("name", "seconds"), [("resnet50", 3), ("vit_b_16", 5)])
def test_tracing_is_fast(name, seconds):
    net, inputs = getattr(models, name)(), torch.zeros(1, 3, 224, 224)
    start = time.perf_counter()
    trace_permutations(net, inputs)
    assert time.perf_counter() - start < seconds


def test_vit_permutes_heads_and_entries():
    spec = trace_permutations(randomise(build("vit_b_16")), images("vit_b_16").float())
    assert len(spec.blocks) == 12
    for name, kinds in spec.blocks.items():
        assert spec.groups[name].size == 12
        assert [len(kind) for kind in kinds] == [12, 12]
        assert {spec.groups[inner].size for kind in kinds for inner in kind} == {64}


def test_densenet_permutes_each_part_of_its_concatenations():
    spec = trace_permutations(build("densenet121"), images("densenet121").float())
    (group,) = [group for group in spec.groups.values() if group.name == "features.denseblock1.denselayer2.conv2"]
    assert group.size == 32
    index = {(place.tensor, place.axis): place.index.flatten() for place in group.places}
    readers = [f"features.denseblock1.denselayer{i}.norm1.weight" for i in range(3, 7)] + [
        "features.transition1.norm.bias"
    ]
    for reader in readers:
        assert torch.equal(index[reader, 0], torch.arange(96, 128))


@pytest.mark.parametrize("norm", [True, False])
def test_mlp_has_one_group_for_each_hidden_layer(norm):
    net = MLP(6, (5, 4, 8), 3, norm=norm).double()
    spec = assert_symmetric(net, normal(4, 6))
    assert {name: group.size for name, group in spec.groups.items()} == {
        f"linears.{i}": width for i, width in enumerate((5, 4, 8))
    }
    moved = {(place.tensor, place.axis) for place in spec.groups["linears.1"].places}
    norms = {("norms.1.weight", 0), ("norms.1.bias", 0)} if norm else set()
    assert moved == {("linears.1.weight", 0), ("linears.1.bias", 0), ("linears.2.weight", 1), *norms}


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_resnet20(norm):
    net = ResNet20(norm=norm).double()
    spec = assert_symmetric(net, normal(2, 3, 16, 16))
    assert sizes(spec) == sorted([*4 * [16], *4 * [32], *4 * [64]])  # each stage, and within each of its three blocks
    moved = set(spec.moved)
    assert {key for key, parameter in net.named_parameters() if parameter.ndim > 1} <= moved


def test_gnn():
    net = GNN(6, 3, 8, 2).double()
    spec = assert_symmetric(net, (normal(5, 6), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])))
    assert {name: group.size for name, group in spec.groups.items()} == {"linears.0": 8, "linears.1": 8}
