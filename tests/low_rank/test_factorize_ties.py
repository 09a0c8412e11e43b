"""Modules at several places and tied weights: ``factorize`` and ``recompose`` keep what is shared."""

from __future__ import annotations

import pytest
import torch
from layer_contract import Shared
from low_rank_networks import Tied
from torch import nn

from lightning_symmetry import factorize, recompose
from lightning_symmetry.surgery import plain_copy


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


def test_a_plain_copy_is_tied_as_the_plain_network_is():
    net = factorize(Tied(), 2, skip=["other"])
    copied = plain_copy(net)
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in Tied().named_parameters()]
    assert copied.head.weight is copied.table.weight
    assert copied.images[1].weight is copied.images[0].weight
    assert copied.head.bias is copied.other.bias
    assert copied.head.bias is not net.head.bias
