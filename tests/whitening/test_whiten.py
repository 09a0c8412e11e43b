"""``whiten`` and ``unwhiten``: what they change, what they leave alone, and what they say."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch_geometric.nn
import torchvision
from layer_contract import Shared, Special
from torch import nn

from lightning_symmetry import MLP, ResNet
from lightning_symmetry.whitening import (
    BorrowedLayer,
    ExplicitWhitenedConv2d,
    ExplicitWhitenedLinear,
    WhitenedConv1d,
    WhitenedConv2d,
    WhitenedLinear,
    collect_statistics,
    reparametrize,
    unwhiten,
    whiten,
    whitened_layers,
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("explicit", [False, True])
def test_it_changes_the_network_in_place_and_keeps_its_parameters(explicit):
    net = network()
    parameters, plain = dict(net.named_parameters()), copy.deepcopy(net)
    x = torch.randn(40, 3, 6, 6)
    assert whiten(net, explicit=explicit) is net
    assert torch.equal(net(x), plain(x))
    kinds = (ExplicitWhitenedConv2d, ExplicitWhitenedLinear) if explicit else (WhitenedConv2d, WhitenedLinear)
    assert [type(m) for m in whitened_layers(net).values()] == [kinds[0], kinds[1], kinds[1]]
    assert net.whitening_report.changed == ["0", "3", "5"]
    reparametrize(net, collect_statistics(net, lambda: net(x)), 0.1)
    assert unwhiten(net) is net
    assert [type(m) for m in net] == [type(m) for m in plain]
    assert not hasattr(net, "whitening_report")
    assert all(p is parameters[name] for name, p in net.named_parameters())
    torch.testing.assert_close(net(x), plain(x), rtol=1e-4, atol=1e-5)
    assert unwhiten(net) is net
    whiten(net)


def test_gradients_are_plain_until_the_first_reparametrisation():
    net, plain = whiten(network()), network()
    x = torch.randn(4, 3, 6, 6)
    for model in (net, plain):
        model(x).square().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_skip_and_overrides():
    net = whiten(
        network(), skip=["0"], overrides={"*": {"mode": "diagonal"}, "5": {"explicit": True, "mode": "center"}}
    )
    assert {name: (type(m), m.mode) for name, m in whitened_layers(net).items()} == {
        "3": (WhitenedLinear, "diagonal"),
        "5": (ExplicitWhitenedLinear, "center"),
    }
    assert net.whitening_report.left_alone == {"0": "skipped"}
    text = str(net.whitening_report)
    assert "whiten: 2 of 3 layers changed" in text
    assert "explicit, mode center, 8 inputs" in text
    x = torch.randn(40, 3, 6, 6)
    reparametrize(net, collect_statistics(net, lambda: net(x)), 0.1)
    assert (net[3].form, net[5].form) == ("diagonal", "centred")


REFUSED = {
    "mode": (lambda net: whiten(net, "zca"), "`mode` to be 'full', 'diagonal' or 'center' but got 'zca'"),
    "mode of a layer": (lambda net: whiten(net, overrides={"3": {"mode": "pca"}}), "but got 'pca'"),
    "pattern of skip": (lambda net: whiten(net, skip=["head"]), "`skip` has the pattern 'head', which matches no"),
    "pattern of overrides": (lambda net: whiten(net, overrides={"9": {}}), "`overrides` has the pattern '9'"),
    "setting": (
        lambda net: whiten(net, overrides={"0": {"eps": 1}}),
        r"sets \['eps'\], but a layer only has \['explicit', 'mode'\]",
    ),
    "everything skipped": (lambda net: whiten(net, skip=["*"]), r"nothing to convert in Sequential(?s:.)*skipped"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_network_is_untouched(case):
    call, message = REFUSED[case]
    net = network()
    with pytest.raises(ValueError, match=message):
        call(net)
    assert [type(m) for m in net] == [type(m) for m in network()]
    assert not hasattr(net, "whitening_report")


def test_nothing_to_convert():
    for net in (nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), nn.Identity(), nn.Sequential(nn.Embedding(3, 4))):
        with pytest.raises(ValueError, match="nothing to convert in"):
            whiten(net)
    for layer in (nn.Linear(4, 2), nn.Conv2d(3, 4, 3)):
        with pytest.raises(ValueError, match=f"is itself a {type(layer).__name__}: wrap it in nn.Sequential"):
            whiten(layer)
    with pytest.raises(ValueError, match=r"whitened already: 0, 3, 5 \(3 layers\)"):
        whiten(whiten(network()))


def test_a_shared_module_is_replaced_everywhere_by_one():
    net = whiten(Shared())
    assert net.first is net.block[0]
    assert "shared at 2 places" in str(net.whitening_report)
    x = torch.randn(5, 8)
    assert collect_statistics(net, lambda: net(x))["first"].num_rows == 10
    unwhiten(net)
    assert net.first is net.block[0]
    assert type(net.first) is nn.Linear


class Leftovers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lazy, self.special, self.attention = nn.LazyLinear(4), Special(4, 4), nn.MultiheadAttention(4, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.embedding, self.tied, self.hooked = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied.weight = self.embedding.weight
        self.hooked.register_forward_hook(lambda *_: None)
        self.good, self.conv3d = nn.Linear(4, 4), nn.Conv3d(2, 2, 1)


def test_layers_that_cannot_be_converted_are_named():
    net = Leftovers()
    with pytest.warns(UserWarning, match=r"whiten left 9 layer\(s\) alone: .*special \(a subclass of Linear"):
        whiten(net)
    assert net.whitening_report.changed == ["good"]
    reasons = net.whitening_report.left_alone
    expected = {
        "lazy": "lazy",
        "special": "forward of its own",
        "attention": "not those of a linear layer",
        "attention.out_proj": "reads its weight without calling",
        "normed": "parametrised",
        "embedding": "not those",
        "tied": "tied to embedding",
        "hooked": "hooks",
        "conv3d": "not those",
    }
    assert reasons.keys() == expected.keys()
    for name, part in expected.items():
        assert part in reasons[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whiten(unwhiten(net), skip=[name for name in reasons])


def test_networks_of_the_library_and_of_torchvision():
    torch.manual_seed(0)
    cases = [
        (MLP(16, (24, 24), 5), torch.randn(9, 16), 3),
        (ResNet(1, num_classes=4), torch.randn(4, 3, 8, 8), None),
        (torchvision.models.mobilenet_v3_small(num_classes=3), torch.randn(2, 3, 32, 32), None),
        (nn.Sequential(nn.Conv1d(4, 8, 3, padding="same"), nn.ReLU(), nn.Conv1d(8, 2, 1)), torch.randn(3, 4, 9), 2),
    ]
    for net, x, count in cases:
        net.eval()
        expected = net(x)
        whiten(net)
        assert torch.equal(net(x), expected)
        statistics = collect_statistics(net, lambda net=net, x=x: net(x))
        assert statistics.keys() == whitened_layers(net).keys()
        assert count in (None, len(statistics))
        assert reparametrize(net, statistics, 0.1) == {}
        net(x).square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    assert type(net[0]) is WhitenedConv1d


@pytest.mark.filterwarnings("ignore:whiten left")
def test_a_transformer_calls_its_whitened_layers_in_evaluation():
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2).eval()
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = net(x)
        whiten(net, explicit=True)
        statistics = collect_statistics(net, lambda: net(x))
        assert set(statistics) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
        assert statistics["layers.0.linear1"].num_rows == 15
        reparametrize(net, statistics, 0.1)
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_graph_layers_take_the_gradient_side():
    torch.manual_seed(0)
    net = torch_geometric.nn.GCN(6, 8, 2, out_channels=3)
    linears = [name for name, m in net.named_modules() if isinstance(m, torch_geometric.nn.Linear)]
    x, edges = torch.randn(9, 6), torch.randint(0, 9, (2, 30))
    expected, keys = net(x, edges), list(net.state_dict())
    whiten(net)
    assert list(whitened_layers(net)) == linears
    assert all(isinstance(m, BorrowedLayer | torch_geometric.nn.Linear) for m in whitened_layers(net).values())
    assert reparametrize(net, collect_statistics(net, lambda: net(x, edges)), 0.1) == {}
    assert torch.equal(net(x, edges), expected)
    assert list(net.state_dict()) == keys
    unwhiten(net)
    assert all(type(net.get_submodule(name)) is torch_geometric.nn.Linear for name in linears)
