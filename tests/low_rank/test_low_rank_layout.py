"""Layouts are read off networks and states, and given to other networks; states are written without factors."""

from __future__ import annotations

import copy

import pytest
import torch
from low_rank_networks import EveryKind, Tied, network
from torch import nn

from lightning_symmetry.low_rank import LowRankMultiheadAttention, factorize, recompose
from lightning_symmetry.low_rank.layout import apply_layout, layout_of, layout_of_state, recomposed_state
from lightning_symmetry.low_rank.projections import DenseProjection

SCHEMES = pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])


def every_kind(**settings):
    torch.manual_seed(0)
    overrides = {"along": {"rank": 3}, "attention": {"min_saving": 0.3}}
    return factorize(EveryKind(), 2, skip=["head"], overrides=overrides, **settings).eval()


@SCHEMES
def test_the_layout_is_seen_in_names_and_shapes(scheme):
    net, dense = every_kind(scheme=scheme), EveryKind().eval()
    layout = layout_of_state(dense, net.state_dict())
    assert layout == layout_of(net)
    assert layout["along"] == {"rank": 3}
    assert layout["image"] == {"rank": 2, "scheme": scheme}
    apply_layout(dense, layout)
    assert layout_of(dense) == layout
    dense.load_state_dict(net.state_dict())
    tokens = torch.randint(0, 30, (3, 8))
    assert torch.equal(net(tokens), dense(tokens))
    assert layout_of_state(net, EveryKind().state_dict()) == {}
    assert layout_of_state(net, {}) == layout


def test_a_layout_of_another_network_changes_nothing():
    net = network()
    parts = dict(net.named_modules())
    with pytest.raises(ValueError, match=r"factors or a posterior for 'head'.* no layer of that name"):
        apply_layout(net, {"0": {"rank": 1, "scheme": "kxk-1x1"}, "head": {"rank": 2}})
    with pytest.raises(ValueError, match="factors for '4', but it is a Tanh"):
        apply_layout(net, {"3": {"rank": 1}, "4": {"rank": 2}})
    assert dict(net.named_modules()) == parts


def test_tied_layers_of_a_layout_share_factors():
    net = factorize(Tied(), 2)
    other = Tied()
    apply_layout(other, layout_of(net))
    for a, b in ((other.table, other.head), (other.images[0], other.images[1])):
        assert a.left is b.left
        assert a.right is b.right
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.head.canonical_weight(), net.head.canonical_weight())


def test_attention_of_given_ranks_is_empty():
    plain = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, dropout=0.1, dtype=torch.float64).eval().requires_grad_(False)
    state = torch.get_rng_state()
    low = LowRankMultiheadAttention.of_ranks(plain, {"q_proj": 2, "k_proj": 1, "v_proj": 0, "out_proj": 3})
    assert torch.equal(torch.get_rng_state(), state)
    ranks = {name: part.rank for name, part in low.projections().items() if name != "v_proj"}
    assert ranks == {"q_proj": 2, "k_proj": 1, "out_proj": 3}
    assert isinstance(low.v_proj, DenseProjection)
    assert torch.equal(low.v_proj.weight, plain.v_proj_weight)
    assert not any(p.any() for name in ranks for p in getattr(low, name).parameters())
    assert low.in_proj_bias is plain.in_proj_bias
    assert not low.training
    assert {(p.dtype, p.requires_grad) for p in low.parameters()} == {(torch.float64, False)}
    with pytest.raises(ValueError, match="a rank for each projection but there is none for k_proj, out_proj"):
        LowRankMultiheadAttention.of_ranks(plain, {"q_proj": 2, "v_proj": 2})


@SCHEMES
def test_a_state_without_factors(scheme):
    net = every_kind(scheme=scheme)
    plain, before = EveryKind(), net.state_dict()
    own = copy.deepcopy(plain.state_dict())
    state = recomposed_state(plain, before)
    expected = recompose(copy.deepcopy(net)).state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(value, own[key]) for key, value in plain.state_dict().items())
    assert recomposed_state(plain, own).keys() == own.keys()


def test_a_state_of_a_compiled_or_a_shared_module():
    net = nn.Sequential(network(), nn.Linear(4, 4))
    net.append(net[1])
    factorize(net, 1)
    state = {key.replace("0.", "0._orig_mod.", 1): value for key, value in net.state_dict().items()}
    plain = nn.Sequential(network(), nn.Linear(4, 4))
    plain.append(plain[1])
    found = recomposed_state(plain, state)
    assert found.keys() == plain.state_dict().keys()
    assert torch.equal(found["1.weight"], found["2.weight"])


def test_factors_of_another_size():
    state = factorize(nn.Sequential(nn.Linear(8, 6)), 2).state_dict()
    with pytest.raises(ValueError, match="the factors of 0 are not those of its layer"):
        recomposed_state(nn.Sequential(nn.Linear(8, 7)), state)
