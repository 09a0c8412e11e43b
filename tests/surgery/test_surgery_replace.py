"""Finding, matching and replacing layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_symmetry import MLP, asymmetrize
from lightning_symmetry.surgery import (
    ConversionReport,
    ReparametrizedLayer,
    match_patterns,
    module_names,
    plain_copy,
    replace_modules,
    settings_for,
    tied_parameters,
    why_not_callable,
)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.block = nn.Sequential(self.a, nn.ReLU())
        self.again = self.block
        self.own = nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.again(self.block(self.a(x))))


def test_module_names_are_all_names():
    net = Shared()
    names = module_names(net)
    assert names[net] == [""]
    assert names[net.a] == ["a", "block.0", "again.0"]
    assert names[net.block] == ["block", "again"]
    assert names[net.own] == ["own"]
    assert set(names) == set(net.modules())


def test_replace_modules_replaces_what_is_called():
    net, x = Shared(), torch.randn(2, 4)
    keys = list(net._modules)
    new = nn.Identity()
    replace_modules(net, {"a": new, "block.0": new, "again.0": new, "own": nn.Flatten()})
    assert list(net._modules) == keys
    assert torch.equal(net(x), x.relu())


def test_replace_modules_goes_before_a_function_of_that_name():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.activation = F.relu

        def forward(self, x):
            return self.activation(x)

    net = nn.Sequential(Owner())
    replace_modules(net, {"0.activation": nn.Tanh()})
    x = torch.randn(5)
    assert torch.equal(net(x), x.tanh())
    assert torch.equal(copy.deepcopy(net)(x), x.tanh())


def test_replace_modules_refuses_the_network_itself():
    with pytest.raises(ValueError, match=r"The network itself is the layer to replace; wrap it in nn.Sequential"):
        replace_modules(nn.Linear(2, 2), {"": nn.Identity()})


@pytest.mark.parametrize("wrapped", [True, False])
def test_replaced_layers_of_an_encoder_are_called_in_evaluation(wrapped):
    class Double(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2)) if wrapped else layer
    name = "0.layers.1.linear2" if wrapped else "linear2"
    replace_modules(net, {name: Double(12, 8)})
    x = torch.randn(2, 3, 8)
    expected = net.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), expected)


def test_tied_parameters():
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4), "e": nn.Embedding(4, 4)})
    assert tied_parameters(net) == {}
    net["b"].bias = net["a"].bias
    net["c"].weight = net["e"].weight
    assert tied_parameters(net) == {"a": ["b"], "b": ["a"], "c": ["e"], "e": ["c"]}
    assert tied_parameters(Shared()) == {}  # a shared module is not a tied parameter


def test_why_not_callable():
    layer = nn.TransformerDecoderLayer(8, 2, 12)
    assert set(why_not_callable(layer)) == {"self_attn.out_proj", "multihead_attn.out_proj"}
    assert set(why_not_callable(nn.MultiheadAttention(8, 2))) == {"out_proj"}
    assert why_not_callable(MLP(4, (4,), 2)) == {}


NAMES = ["stem", "stage1.0.conv1", "stage1.0.conv2", "stage2.0.conv1", "head"]


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("stem", ["stem"]),
        ("stage1.*", ["stage1.0.conv1", "stage1.0.conv2"]),
        ("*.conv?", ["stage1.0.conv1", "stage1.0.conv2", "stage2.0.conv1"]),
        ("stage[12].*1", ["stage1.0.conv1", "stage2.0.conv1"]),
        ("*", NAMES),
    ],
)
def test_match_patterns(pattern, hits):
    matched = match_patterns(NAMES, [pattern, "*"], "skip")
    assert list(matched) == NAMES
    assert [name for name, patterns in matched.items() if pattern in patterns] == hits


@pytest.mark.parametrize(("pattern", "close"), [("Head", "'head'"), ("stage1.conv1", "'stage1.0.conv1'")])
def test_unknown_pattern_names_the_closest(pattern, close):
    with pytest.raises(ValueError, match=rf"`skip` has the pattern '{pattern}', .* The network has 5; .*{close}"):
        match_patterns(NAMES, [pattern], "skip")
    with pytest.raises(ValueError, match=r"The network has 0; the closest names are none"):
        match_patterns([], [pattern], "skip")


def test_settings_are_overridden_in_the_order_given():
    overrides = {"stage*": {"n": 2}, "*.conv1": {"n": 3, "k": 5}, "stage2.*": {"n": 4}}
    found = dict(settings_for(NAMES, {"n": 1, "k": 0}, overrides))
    assert found == {
        "stem": {"n": 1, "k": 0},
        "stage1.0.conv1": {"n": 3, "k": 5},
        "stage1.0.conv2": {"n": 2, "k": 0},
        "stage2.0.conv1": {"n": 4, "k": 5},
        "head": {"n": 1, "k": 0},
    }
    with pytest.raises(ValueError, match=r"`overrides\['head'\]` sets \['m'\], but a layer only has \['k', 'n'\]"):
        list(settings_for(NAMES, {"n": 1, "k": 0}, {"head": {"m": 1}}))


@pytest.mark.parametrize("keep_affine", [True, False])
def test_plain_copy(keep_affine):
    torch.manual_seed(0)
    net = asymmetrize(Shared(), n_fix=2)
    with torch.no_grad():
        net.a.weight.add_(1)  # the constants are moved, as by weight decay
    before = [p.detach().clone() for p in net.parameters()]
    plain = plain_copy(net, keep_affine)
    for p, wanted in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, wanted)
    assert any(isinstance(m, ReparametrizedLayer) for m in plain.modules()) == keep_affine
    assert plain.a is plain.block[0]
    x = torch.randn(3, 4)
    torch.testing.assert_close(plain(x), net(x))
    single = asymmetrize(nn.Sequential(nn.Linear(4, 4)), n_fix=2)[0]
    assert isinstance(plain_copy(single), nn.Linear)
    torch.testing.assert_close(plain_copy(single)(x), single(x))


def test_report():
    report = ConversionReport("convert")
    report.add("first", "Linear", True, "done")
    report.add("second.long", "Conv2d", False, "skipped")
    assert report.changed == ["first"]
    assert report.left_alone == {"second.long": "skipped"}
    assert str(report).splitlines() == [
        "convert: 1 of 2 layers changed",
        "layer        type                what",
        "first        Linear  changed     done",
        "second.long  Conv2d  left alone  skipped",
    ]
