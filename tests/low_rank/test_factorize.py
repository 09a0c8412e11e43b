"""``factorize``: what it changes, with which settings, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from low_rank_networks import images, network
from low_rank_reference import best_error
from torch import nn

from lightning_symmetry import (
    LowRankConv2d,
    LowRankEmbedding,
    LowRankLinear,
    asymmetrize,
    factorize,
    recompose,
    unwhiten,
    whiten,
)
from lightning_symmetry.low_rank import LowRankConv1d, break_even


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


def test_one_dimensional_convolutions_have_one_scheme():
    net = factorize(nn.Sequential(nn.Conv1d(8, 8, 3), nn.Embedding(20, 10)), 2, scheme="1xk-kx1")
    assert [type(m) for m in net] == [LowRankConv1d, LowRankEmbedding]
    assert net[0].scheme == "kxk-1x1"
