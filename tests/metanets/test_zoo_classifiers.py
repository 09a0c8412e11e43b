"""The networks of the paper's zoos: how many weights are free, what is fixed, and what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch

from lightning_symmetry import FiGLU, asymmetrize, num_trainable, symmetries
from lightning_symmetry.metanets import Zoo, ZooWriter, zoo_classifier
from lightning_symmetry.surgery import constants_of

KINDS, DATA = ("standard", "sigma", "w"), ("digits", "cifar10")
FIXED = {  # n_fix by layer, and of how many
    "digits": {"convs.0": (4, 9), "convs.1": (8 * 9, 16 * 9), "convs.2": (8 * 9, 16 * 9), "head": (8, 32)},
    "cifar10": {
        "stem": (12, 27),
        "stage1.0.conv1": (72, 144),
        "stage1.0.conv2": (72, 144),
        "stage2.0.conv1": (72, 144),
        "stage2.0.conv2": (72, 288),
        "stage2.0.skip.0": (8, 16),
        "stage3.0.conv1": (72, 288),
        "stage3.0.conv2": (72, 576),
        "stage3.0.skip.0": (8, 32),
        "head": (8, 64),
    },
}


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize(
    ("data", "kind", "trainable"),
    [
        ("digits", "standard", 7_514),
        ("digits", "sigma", 7_514),
        ("digits", "w", 3_914),
        ("cifar10", "standard", 78_042),
        ("cifar10", "sigma", 78_042),
        ("cifar10", "w", 60_874),
    ],
)
def test_numbers_of_weights(data, kind, norm, trainable):
    net = zoo_classifier(kind, data, norm)
    assert sum(p.numel() for p in net.parameters()) == {"digits": 7_514, "cifar10": 78_042}[data]
    assert num_trainable(net) == trainable
    assert net(net.example_input_array).shape == (2, 10)
    if kind == "w":
        assert f"{trainable:,}" in inspect.getdoc(zoo_classifier)


def test_the_papers_count_is_what_a_frozen_stem_leaves():
    """Of the 78,042 - 60,634 fixed weights, all but the filters of 8 and the head's entries are the stem's 432."""
    net = zoo_classifier("w", "cifar10")
    others = sum(net.get_submodule(name).num_fixed for name in FIXED["cifar10"] if name != "stem")
    assert 78_042 - others - net.stem.weight.numel() == 60_634
    with pytest.raises(ValueError, match="n_fix=27 of 27 inputs leaves no trainable entry"):
        zoo_classifier("w", "cifar10", settings={"overrides": {"stem": {"layout": "entries", "n_fix": 27}}})


@pytest.mark.parametrize("data", DATA)
def test_what_is_fixed(data):
    net = zoo_classifier("w", data)
    layers = {name: module for name, module in net.named_modules() if hasattr(module, "trainable_entries")}
    assert list(layers) == list(FIXED[data])
    constants = []
    for name, layer in layers.items():
        fixed = ~layer.trainable_entries().flatten(1)
        assert (fixed.sum(1) == FIXED[data][name][0]).all() and fixed.shape[1] == FIXED[data][name][1]
        assert len(fixed.unique(dim=0)) == len(fixed)  # Theorem 1 asks for rows with distinct masks
        if FIXED[data][name][0] == 72:  # whole filters
            filters = fixed.unflatten(1, (-1, 9)).sum(2)
            assert set(filters.unique().tolist()) == {0, 9}
        constants.append(layer.canonical_weight().detach().flatten(1)[fixed])
    constants = torch.cat(constants)
    assert abs(constants.std().item() - 2) < 5 * 2 / (2 * len(constants)) ** 0.5
    assert abs(constants.mean().item()) < 5 * 2 / len(constants) ** 0.5


@pytest.mark.parametrize("data", DATA)
def test_gates_have_the_documented_deviation(data):
    gates = [module for module in zoo_classifier("sigma", data).modules() if isinstance(module, FiGLU)]
    assert len(gates) == {"digits": 3, "cifar10": 7}[data]
    for gate in gates:
        standard = gate.fixed * gate.dim**0.5
        assert abs(standard.std().item() - 1) < 5 / (2 * standard.numel()) ** 0.5


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_asymmetric_ones_have_no_symmetry_left(data, kind):
    assert symmetries(zoo_classifier(kind, data)).is_asymmetric == (kind != "standard")


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind):
    def made(seed, **arguments):
        torch.manual_seed(seed)
        return zoo_classifier(kind, **arguments)

    nets = [made(0), made(0), made(1), made(0, constants_seed=1)]
    states = [net.state_dict() for net in nets]
    constants = constants_of(nets[0])
    assert bool(constants) == (kind != "standard")
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
        if name in constants:
            assert torch.equal(value, states[2][name])
        elif value.is_floating_point() and value.ndim > 1:
            assert not torch.equal(value, states[2][name])
    if constants:
        assert not all(torch.equal(value, states[3][name]) for name, value in constants.items())
    torch.manual_seed(0)
    plain = zoo_classifier("standard").convs[1].weight
    layer = nets[0].convs[1]
    free = layer.trainable_entries() if kind == "w" else torch.ones_like(plain, dtype=torch.bool)
    assert torch.equal(layer.weight[free], plain[free])  # the same start, but for what is fixed


def test_settings_go_before_the_defaults():
    net = zoo_classifier("w", settings={"kappa": 0.5, "skip": ["head"]})
    assert not hasattr(net.head, "mask")
    assert abs(net.convs[2].fixed.std().item() - 0.5) < 0.05
    expected = asymmetrize(zoo_classifier(), "sigma", scale=0.01)
    found = zoo_classifier("sigma", settings={"scale": 0.01})
    assert torch.equal(found.activations[0].fixed, expected.activations[0].fixed)


def test_a_zoo_is_built_by_name(tmp_path):
    arguments = {"kind": "w", "norm": "batch", "constants_seed": 3}
    net = zoo_classifier(**arguments)
    with ZooWriter(
        tmp_path / "zoo", net, factory="lightning_symmetry.metanets:zoo_classifier", factory_arguments=arguments
    ) as writer:
        writer.append([net.state_dict()], [{}])
    again = Zoo.open(tmp_path / "zoo").network(0)
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(again(images), net.eval()(images))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "W"}, "'standard', 'sigma' or 'w' but got 'W'"),
        ({"data": "mnist"}, r"\['cifar10', 'digits'\] but got 'mnist'"),
        ({"norm": "group"}, "'layer' or 'batch' but got 'group'"),
        ({"settings": {"kappa": 1.0}}, "A standard network has no `settings`"),
        ({"kind": "sigma", "settings": {"kappa": 1.0}}, "has no kappa"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        zoo_classifier(**arguments)
