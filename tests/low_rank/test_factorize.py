"""``factorize`` and ``recompose``: what they change, what they leave alone, and what they say."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch_geometric.nn
import torchvision
from low_rank_reference import best_error
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_symmetry import (
    AsymmetricLinear,
    LowRankConv2d,
    LowRankEmbedding,
    LowRankLinear,
    ResNet20,
    asymmetrize,
    factorize,
    recompose,
    unwhiten,
    whiten,
)
from lightning_symmetry.low_rank import LowRankConv1d, LowRankMultiheadAttention, break_even


def network():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 40),
        nn.Tanh(),
        nn.Linear(40, 4),
    ]
    return nn.Sequential(*layers)


def images(count=2):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def test_it_changes_the_network_in_place():
    net = network()
    plain, biases = copy.deepcopy(net), [net[i].bias for i in (0, 3, 5)]
    state = torch.get_rng_state()
    assert factorize(net, 4, skip=["5"]) is net
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(m) for m in net] == [LowRankConv2d, nn.ReLU, nn.Flatten, LowRankLinear, nn.Tanh, nn.Linear]
    assert all(net[i].bias is bias for i, bias in zip((0, 3, 5), biases, strict=True))
    names = [name for name, _ in net.named_parameters()]
    assert names == ["0.left", "0.right", "0.bias", "3.left", "3.right", "3.bias", "5.weight", "5.bias"]
    report = net.factorization_report
    assert report.changed == ["0", "3"]
    assert report.left_alone == {"5": "skipped"}
    for name, layer in report.layers.items():
        weight = plain.get_submodule(name).weight.flatten(1)
        assert layer.ranks == {"": (4, min(weight.shape))}
        assert layer.parameters == (weight.numel(), 4 * sum(weight.shape))
        assert layer.multiply_adds == layer.parameters  # a position
        assert layer.error == pytest.approx(best_error(weight, 4) / float(weight.detach().norm()), rel=1e-4)
    assert report.parameters == tuple(sum(p.numel() for p in one.parameters()) for one in (plain, net))
    assert report.multiply_adds is None
    text = str(report)
    assert "factorize: 2 of 3 layers changed" in text
    assert "rank 4 of 40, 23,040 -> 2,464 parameters, 23,040 -> 2,464 multiply-adds a position, error 0." in text


CASES = {
    "convolutions": (network, images, {}),
    "separable, strides": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 16, (3, 5), (2, 1), (1, 2), groups=2),
            nn.Conv2d(16, 16, 3, 2, padding_mode="circular", padding=1),
        ),
        lambda: torch.randn(3, 4, 9, 10),
        {"scheme": "1xk-kx1", "rank": 2},
    ),
    "beyond break-even": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        lambda: torch.randn(5, 200, 16),
        {"rank": 12, "min_saving": -1, "overrides": {"1": {"rank": 3}}},
    ),
    "text": (
        lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(24, 24)),
        lambda: torch.randint(0, 50, (5, 3)),
        {"rank": 4},
    ),
    "text longer than the table": (
        lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 24)),
        lambda: torch.randint(0, 50, (5, 30)),
        {"rank": 4},
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Conv1d(6, 12, 5, stride=2), nn.Conv1d(12, 12, 3, padding="same", groups=2)),
        lambda: torch.randn(3, 6, 21),
        {"rank": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_multiply_adds_are_those_that_are_counted(case):
    """Compare with torch's own count of floating-point operations, two for a multiply-add."""
    make, sample, settings = CASES[case]
    net, x = make(), sample()
    counts = []
    for one in (net, factorize(copy.deepcopy(net), example_input=x, **settings)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            one(x)
        counts.append(counter.get_total_flops() / 2 / len(x))
    assert len(one.factorization_report.changed) == sum(1 for m in net if hasattr(m, "weight"))
    assert one.factorization_report.multiply_adds == pytest.approx(tuple(counts))
    assert "a sample" in str(one.factorization_report)


def test_settings_by_layer():
    overrides = {"*": {"rank": 3}, "3": {"rank": "energy:0.3", "init": "random"}, "0": {"scheme": "1xk-kx1"}}
    net = factorize(network(), overrides=overrides, skip=["5"])
    assert (net[0].rank, net[0].scheme) == (3, "1xk-kx1")
    squares = torch.linalg.svdvals(network()[3].weight.detach().double()).square()
    assert net[3].rank == 1 + int((squares.cumsum(0) < 0.3 * squares.sum()).sum())
    assert net.factorization_report.layers["3"].error > 1


def test_initialisations():
    nets = {init: factorize(network(), 4, init=init, skip=["5"]) for init in ("spectral", "spectral_ones", "random")}
    for net in nets.values():
        assert torch.equal(net[5].weight, network()[5].weight)
    ones = torch.linalg.svdvals(nets["spectral_ones"][3].canonical_weight().detach())[:5]
    torch.testing.assert_close(ones, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), rtol=0, atol=1e-5)
    again = factorize(network(), 4, init="random", skip=["0", "5"])
    assert torch.equal(again[3].left, nets["random"][3].left)  # whatever else is converted
    assert not torch.equal(factorize(network(), 4, init="random", seed=1)[3].left, again[3].left)


def test_layers_that_would_not_save_are_left_alone():
    net = factorize(network(), 4)
    assert net.factorization_report.left_alone == {
        "5": "rank 4 saves no parameters: break-even of 4 x 40 is at rank 3.636"
    }
    net = factorize(network(), 12)
    assert net.factorization_report.left_alone == {
        "0": "rank 12 saves no parameters: break-even of 16 x 27 is at rank 10.05",
        "5": "rank 12 is beyond its full rank 4: break-even of 4 x 40 is at rank 3.636",
    }
    net = factorize(network(), 0.25, min_saving=0.7)
    assert net.factorization_report.left_alone == {
        "0": "rank 4 saves 60.2% of its parameters, less than the 70.0% asked for: "
        "break-even of 16 x 27 is at rank 10.05"
    }
    assert factorize(network(), 0.62, min_saving=-1)[5].rank == 2
    assert factorize(network(), 0.95, min_saving=-0.6)[0].rank == 15  # costs 49 %


@pytest.mark.parametrize(("size", "saves"), [(8, 3), (12, 5)])
def test_break_even_itself_saves_nothing(size, saves):
    assert break_even(size, size) == saves + 1
    for rank in (saves, saves + 1):
        net = nn.Sequential(nn.Linear(size, size), nn.Linear(100, 100))
        factorize(net, rank)
        assert (type(net[0]) is LowRankLinear) == (rank == saves)


REFUSED = {
    "rank": (lambda net: factorize(net, 0), "Expected `rank` to be a number of at least 1"),
    "rank of a layer": (lambda net: factorize(net, overrides={"3": {"rank": 2.0}}), "Expected `rank`"),
    "init": (
        lambda net: factorize(net, init="he"),
        "`init` to be 'spectral', 'spectral_ones' or 'random' but got 'he'",
    ),
    "scheme": (lambda net: factorize(net, scheme="kx1"), "`scheme` to be 'kxk-1x1' or '1xk-kx1' but got 'kx1'"),
    "min_saving": (lambda net: factorize(net, min_saving=1.0), "`min_saving` to be a share of the parameters, below 1"),
    "pattern of skip": (lambda net: factorize(net, skip=["head"]), "`skip` has the pattern 'head', which matches no"),
    "setting": (lambda net: factorize(net, overrides={"0": {"eps": 1}}), r"sets \['eps'\], but a layer only has"),
    "break-even by name": (
        lambda net: factorize(net, 4, overrides={"3": {"rank": 39}}),
        r"Layer '3': rank 39 saves no parameters: break-even of 40 x 576 is at rank 37.4. Give `min_saving=-1`",
    ),
    "full rank by name": (
        lambda net: factorize(net, 4, overrides={"5": {"rank": 5}}),
        "Layer '5': rank 5 is beyond its full rank 4",
    ),
    "everything skipped": (lambda net: factorize(net, skip=["*"]), r"nothing to convert in Sequential(?s:.)*skipped"),
    "an example that fails": (lambda net: factorize(net, example_input=images()[:, :, :5]), r"^(?!.*factorize)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_network_is_untouched(case):
    call, message = REFUSED[case]
    net = network()
    parameters = list(net.parameters())
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(net)
    assert [type(m) for m in net] == [type(m) for m in network()]
    assert all(
        p is q and torch.equal(p, r)
        for p, q, r in zip(net.parameters(), parameters, network().parameters(), strict=True)
    )
    assert not hasattr(net, "factorization_report")
    assert not any(m._forward_hooks for m in net.modules())


def test_nothing_to_convert_or_not_again():
    for net in (nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), nn.Identity(), nn.Sequential(nn.Linear(1, 1))):
        with pytest.raises(ValueError, match="nothing to convert in"):
            factorize(net)
    for layer in (nn.Linear(4, 2), nn.Embedding(3, 4), nn.MultiheadAttention(4, 2)):
        with pytest.raises(ValueError, match=f"is itself a {type(layer).__name__}: use LowRank{type(layer).__name__}"):
            factorize(layer)
    net = factorize(network())
    with pytest.raises(ValueError, match=r"factorised already: 0, 3, 5 \(3 layers\). Call recompose\(net\) first"):
        factorize(net)
    factorize(recompose(net))
    for explicit in (True, False):
        net = whiten(network(), explicit=explicit)
        with pytest.raises(ValueError, match=r"whitened already: 0, 3, 5 \(3 layers\). Call unwhiten\(net\) first"):
            factorize(net)
        factorize(unwhiten(net))
    net = whiten(asymmetrize(network(), n_fix=2))
    with pytest.raises(ValueError, match="Call unwhiten"):
        factorize(net)
    with pytest.raises(ValueError, match="The network itself is the layer to replace"):
        recompose(LowRankLinear(4, 4, 1))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.ModuleList([self.first, nn.Linear(8, 8)])

    def forward(self, x):
        return self.first(self.block[1](self.block[0](x)))


def test_a_shared_module_is_replaced_everywhere_by_one():
    net = Shared()
    x = torch.randn(5, 8)
    factorize(net, 2, example_input=x)
    assert net.first is net.block[0]
    assert "shared at 2 places" in str(net.factorization_report)
    assert net.factorization_report.layers["first"].multiply_adds == (2 * 64, 2 * 32)
    recompose(net)
    assert net.first is net.block[0]
    assert type(net.first) is nn.Linear


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(30, 12), nn.Linear(12, 12), nn.Linear(12, 30)
        self.head.weight = self.table.weight
        self.other = nn.Linear(12, 30)
        self.other.bias = self.head.bias
        self.images = nn.ModuleList([nn.Conv2d(4, 8, 3, stride=s, bias=False) for s in (1, 2)])
        self.images[1].weight = self.images[0].weight

    def forward(self, x):
        return self.head(self.middle(self.table(x))) + self.other(self.middle(self.table(x)))


@pytest.mark.filterwarnings("error")
def test_tied_weights_get_the_same_factors():
    net = Tied()
    x = torch.randint(0, 30, (6,))
    expected = net(x)
    before = sum(p.numel() for p in net.parameters())
    factorize(net, 1.0, min_saving=-1)
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)
    for a, b in ((net.table, net.head), (net.images[0], net.images[1])):
        assert a.left is b.left
        assert a.right is b.right
    assert net.head.bias is net.other.bias
    report = net.factorization_report
    assert "tied to head" in str(report)
    assert report.layers["head"].parameters == (0, 0)
    assert report.parameters[0] == before
    changes = [after - before for before, after in (layer.parameters for layer in report.layers.values())]
    assert report.parameters[1] - report.parameters[0] == sum(changes)
    recompose(net)
    assert net.head.weight is net.table.weight
    assert net.images[0].weight is net.images[1].weight
    assert net.head.bias is net.other.bias
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)


def test_tied_weights_stay_together():
    net = Tied()
    with pytest.warns(UserWarning, match=r"table \(its weight is tied to head, which is left alone\)"):
        factorize(net, 2, skip=["head"])
    assert net.head.weight is net.table.weight
    net = Tied()
    net.head.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="head .it has hooks"):
        factorize(net, 2)
    assert net.head.weight is net.table.weight
    with pytest.raises(ValueError, match="table and head have the same weight, so that they need the same settings"):
        factorize(Tied(), 2, overrides={"head": {"rank": 3}})
    factorize(net := Tied(), 7, overrides={"other": {"min_saving": -1}, "middle": {"rank": 1}}, min_saving=0.5)
    assert net.factorization_report.changed == ["middle", "other"]
    assert net.head.weight is net.table.weight


class Special(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


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


NETWORKS = {
    "residual network": (lambda: ResNet20(num_classes=10), (2, 3, 32, 32)),
    "mobilenet": (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), (2, 3, 32, 32)),
    "vision transformer": (
        lambda: torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=10),
        (2, 3, 16, 16),
    ),
}


@pytest.mark.filterwarnings("ignore:factorize left")
@pytest.mark.parametrize("case", NETWORKS)
@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_networks_of_the_library_and_of_torchvision(case, scheme):
    torch.manual_seed(0)
    make, shape = NETWORKS[case]
    net, x = make().eval(), torch.randn(shape)
    keys = list(net.state_dict())
    with torch.no_grad():
        expected = net(x)
        factorize(net, 1.0, scheme=scheme, min_saving=-1, example_input=x)
        torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-4)
        recompose(net)
        torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-4)
    assert list(net.state_dict()) == keys
    factorize(net, 0.25, scheme=scheme)
    before, after = net.factorization_report.parameters
    assert after < 0.75 * before
    net(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    kinds = {type(m) for m in net.modules()}
    assert LowRankConv2d in kinds
    assert (LowRankMultiheadAttention in kinds) == (case == "vision transformer")


def test_one_dimensional_convolutions_have_one_scheme():
    net = factorize(nn.Sequential(nn.Conv1d(8, 8, 3), nn.Embedding(20, 10)), 2, scheme="1xk-kx1")
    assert [type(m) for m in net] == [LowRankConv1d, LowRankEmbedding]
    assert net[0].scheme == "kxk-1x1"
