"""What ``factorize`` leaves alone, and the names and reasons that it gives."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_geometric.nn
from layer_contract import Special
from low_rank_networks import Tied, images, network
from torch import nn

from lightning_symmetry import AsymmetricLinear, LowRankLinear, asymmetrize, factorize, recompose


class Leftovers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lazy, self.special, self.recurrent = nn.LazyLinear(4), Special(4, 4), nn.GRU(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.functional, self.tied = nn.ParameterList([torch.randn(4, 4)]), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.functional[0]
        self.hooked, self.limited = nn.Linear(4, 4), nn.Embedding(4, 4, max_norm=1.0)
        self.hooked.register_forward_hook(lambda *_: None)
        self.conv3d, self.graph = nn.Conv3d(2, 2, 1), torch_geometric.nn.Linear(4, 4)
        self.empty, self.zero, self.broken = nn.Linear(0, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.zero.weight)
        nn.init.constant_(self.broken.weight, float("nan"))
        self.away, self.good = nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)
        self.hooked_attention = nn.MultiheadAttention(4, 2)
        self.hooked_attention.out_proj.register_forward_hook(lambda *_: None)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_that_cannot_be_converted_are_named():
    net = Leftovers()
    with pytest.warns(UserWarning, match=r"factorize left 14 layer\(s\) alone: .*special \(a subclass of Linear"):
        factorize(net, 1)
    assert net.factorization_report.changed == ["good"]
    reasons = net.factorization_report.left_alone
    expected = {
        "lazy": "lazy",
        "special": "forward of its own",
        "recurrent": "not those of a linear layer",
        "normed": "parametrised",
        "tied": "tied to functional",
        "hooked": "hooks",
        "limited": "max_norm",
        "conv3d": "not those",
        "graph": "torch-geometric's Linear",
        "empty": "is empty",
        "zero": "its weight is zero: it has no singular vectors",
        "broken": "not finite",
        "away": "meta device",
        "hooked_attention": "its out_proj is not the one that it was built with",
    }
    assert reasons.keys() == expected.keys()
    for name, part in expected.items():
        assert part in reasons[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factorize(recompose(net), 1, skip=[name for name in reasons])
    assert (
        type(factorize(recompose(net), 1, init="random", skip=[n for n in reasons if n != "zero"]).zero)
        is LowRankLinear
    )


def test_layers_that_are_not_called_with_the_example():
    net = Tied()
    with pytest.warns(UserWarning, match="it is not called with the example input"):
        factorize(net, 2, example_input=torch.zeros(3, dtype=torch.long))
    assert set(net.factorization_report.left_alone) == {"images.0", "images.1"}


def test_constants_of_asymmetric_layers_are_gone():
    net = asymmetrize(network(), n_fix=2, overrides={"3": {"n_fix": 8}})
    x, bias = images(), net[3].bias
    with torch.no_grad():
        net[3].weight.add_(0.1)  # the constants are moved, as by weight decay
    expected = net(x)
    factorize(net, 1.0, min_saving=-1)
    assert type(net[3]) is LowRankLinear
    assert net[3].bias is bias
    assert "its constants are gone" in str(net.factorization_report)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    assert type(recompose(net)[3]) is nn.Linear
    graph = nn.Sequential(torch_geometric.nn.Linear(8, 8), nn.Linear(8, 8))
    asymmetrize(graph, n_fix=2)
    with pytest.warns(UserWarning, match="0 .AsymmetricLinear holds its weight in other coordinates"):
        factorize(graph, 2)
    assert isinstance(graph[0], AsymmetricLinear)
