"""The paper's settings: tables 5, 6 and 7 and the graph network of App. E.1.2, number by number."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_symmetry import (
    GNN,
    MLP,
    PRESETS,
    FiGLU,
    ResNet20,
    asymmetrize,
    fixed_fraction,
    num_trainable,
)
from lightning_symmetry.asymmetry import AsymmetricLayer


def settings_of(net):
    return {n: (m.n_fix, m.kappa, m.layout) for n, m in net.named_modules() if isinstance(m, AsymmetricLayer)}


def by_counting(net):
    """Return (trainable, fixed, all) entries, one weight at a time."""
    fixed = 0
    for module in net.modules():
        if isinstance(module, AsymmetricLayer):
            fixed += int((~module.mask).sum()) * (module.weight[0].numel() // module.mask.shape[1])
    total = sum(p.numel() for p in net.parameters())
    return total - fixed, fixed, total


def check_counts(net):
    trainable, fixed, total = by_counting(net)
    assert num_trainable(net) == trainable
    assert fixed_fraction(net) == pytest.approx(fixed / total, abs=1e-12)


def test_table_5():
    net = asymmetrize(MLP(), preset="mlp")
    assert settings_of(net) == {
        "linears.0": (64, 1.0, "entries"),
        "linears.1": (64, 1.0, "entries"),
        "linears.2": (64, 0.5, "entries"),
        "linears.3": (256, 0.25, "entries"),
    }
    check_counts(net)
    # d_2 (d_1 - n_fix) trainable entries a layer, biases and norms are whole (section 4.1).
    weights = 512 * (784 - 64) + 512 * (512 - 64) * 2 + 10 * (512 - 256)
    assert num_trainable(net) == weights + 3 * 512 + 10 + 3 * 2 * 512


TABLE_6 = {"stem": 12, "conv": (36, 54, 72), "skip": (None, 6, 8), "head": 8}
TABLE_7 = {"stem": 27, "conv": (108, 162, 216), "skip": (None, 18, 24), "head": 24}


def of_table(table, name):
    if name in ("stem", "head"):
        return table[name]
    stage = int(re.match(r"stage(\d)", name)[1]) - 1
    return table["skip" if "skip" in name else "conv"][stage]


@pytest.mark.parametrize(("preset", "kappa"), [("resnet20", 2.0), ("bayesian-resnet20", 0.5)])
def test_table_6(preset, kappa):
    net = asymmetrize(ResNet20(), preset=preset)
    settings = settings_of(net)
    assert len(settings) == 1 + 18 + 2 + 1  # stem, convolutions, skips, head: all are masked
    assert settings == {name: (of_table(TABLE_6, name), kappa, "entries") for name in settings}
    check_counts(net)


def test_table_7_is_refused_as_printed_and_has_a_way_out():
    net = ResNet20(width=8)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=r"Layer 'stem': n_fix=27 of 27 inputs .* at most 26 .*overrides"):
        asymmetrize(net, preset="resnet20-w8")
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    asymmetrize(net, preset="resnet20-w8", overrides={"stem": {"n_fix": 12}})
    settings = settings_of(net)
    table = {**TABLE_7, "stem": 12}
    assert settings == {name: (of_table(table, name), 2.0, "entries") for name in settings}
    assert len(settings) == 22
    check_counts(net)


def test_graph_network():
    net = GNN()
    assert sum(p.numel() for p in net.parameters()) == 176_424
    asymmetrize(net, preset="gnn")
    assert set(settings_of(net).values()) == {(6, 0.5, "entries")}
    assert set(settings_of(net)) == {"linears.0", "linears.1", "linears.2", "head"}
    assert num_trainable(net) == 176_424 - 6 * (3 * 256 + 40)
    check_counts(net)


def test_sigma_graph_network():
    net = asymmetrize(GNN(), preset="gnn-sigma")
    figlus = [module for module in net.modules() if isinstance(module, FiGLU)]
    assert [(f.dim, f.scale, f.channel_dim) for f in figlus] == [(256, 0.01, -1)] * 3
    assert num_trainable(net) == 176_424
    assert fixed_fraction(net) == 0


def test_bayesian_mlp_and_digits():
    net = asymmetrize(MLP(hidden=(256, 256), activation=nn.ReLU), preset="bayesian-mlp")
    assert set(settings_of(net).values()) == {(8, 0.5, "entries")}
    net = asymmetrize(MLP(64, (256, 256, 256)), preset="mlp-digits")
    assert [n for n, _, _ in settings_of(net).values()] == [16, 64, 64, 64]
    assert [k for _, k, _ in settings_of(net).values()] == [1.0, 1.0, 0.5, 0.25]


def test_arguments_go_before_a_preset_and_presets_are_not_changed():
    import copy

    before = copy.deepcopy(PRESETS)
    net = asymmetrize(GNN(16, 4, 32), preset="gnn", n_fix=3, overrides={"head": {"n_fix": 5, "kappa": 0.25}})
    assert settings_of(net)["linears.0"] == (3, 0.5, "entries")
    assert settings_of(net)["head"] == (5, 0.25, "entries")
    # The control: the masks of the preset with small constants needs one argument for each setting that it has.
    net = asymmetrize(ResNet20(), preset="resnet20", kappa=0.02, overrides={"stem": {"kappa": 2.0}})
    assert settings_of(net)["head"][:2] == (8, 0.02)
    assert settings_of(net)["stem"][:2] == (12, 2.0)
    # CIFAR-100's Bayesian networks have a plain last layer (App. E.2).
    net = asymmetrize(ResNet20(num_classes=100, width=2), preset="bayesian-resnet20", skip=["head"])
    assert "head" not in settings_of(net)
    assert before == PRESETS


def test_unknown_preset_names_all():
    with pytest.raises(ValueError, match=r"`preset` to be one of \['bayesian-mlp', .*'resnet20-w8'\] but got 'resnet'"):
        asymmetrize(MLP(), preset="resnet")
