"""Attention in all its forms: heads are permuted among each other, and the entries within each head by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trace_reference import Net, assert_symmetric, normal, parameter, randomise, sizes

from lightning_symmetry.permutation.spec import trace_permutations

tokens, others = normal(2, 5, 3), normal(2, 7, 3, seed=1)


def projections(width=12, kv=12, inputs=3):
    return {
        "q": nn.Linear(inputs, width),
        "k": nn.Linear(inputs, kv),
        "v": nn.Linear(inputs, kv),
        "o": nn.Linear(width, 2),
    }


def heads(x, number):
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def fused(net, x, **kwargs):
    q, k, v = heads(net.q(x), 3), heads(net.k(x), 3), heads(net.v(x), 3)
    return net.o(joined(F.scaled_dot_product_attention(q, k, v, **kwargs)))


def by_hand(net, x):
    q, k, v = (layer(x).view(2, 5, 3, 4).permute(0, 2, 1, 3) for layer in (net.q, net.k, net.v))
    weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
    return net.o((weights @ v).permute(0, 2, 1, 3).reshape(2, 5, 12))


def by_einsum(net, x):
    q, k, v = (torch.einsum("bti,hdi->bhtd", x, weight) for weight in (net.q, net.k, net.v))
    weights = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
    return torch.einsum("bhts,bhsd,ohd->bto", weights, v, net.o)


def packed(net, x):
    q, k, v = net.qkv(x).chunk(3, -1)
    return net.o(joined(F.scaled_dot_product_attention(*(heads(part, 3) for part in (q, k, v)))))


def packed_by_head(net, x):
    q, k, v = net.qkv(x).view(2, 5, 3, 3, 4).permute(3, 0, 2, 1, 4).unbind(0)  # (q, k, v) within each head
    return net.o(joined(F.scaled_dot_product_attention(q, k, v)))


def grouped_query(net, x, how):
    q, k, v = heads(net.q(x), 6), heads(net.k(x), 2), heads(net.v(x), 2)
    if how == "expand":
        k, v = (t[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, 5, 4) for t in (k, v))
    elif how == "repeat_interleave":
        k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
    return net.o(joined(F.scaled_dot_product_attention(q, k, v, enable_gqa=how == "fused")))


def rotary(net, x):
    q, k, v = heads(net.q(x), 3), heads(net.k(x), 3), heads(net.v(x), 3)
    angle = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3, 1.0, 0.3], dtype=x.dtype)

    def turned(t):
        return t * angle.cos() + torch.cat([-t[..., 2:], t[..., :2]], -1) * angle.sin()

    return net.o(joined(F.scaled_dot_product_attention(turned(q), turned(k), v)))


def rotary_complex(net, x):
    q, k, v = heads(net.q(x), 3), heads(net.k(x), 3), heads(net.v(x), 3)
    angle = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (2, 2))) * turn).flatten(-2) for t in (q, k))
    return net.o(joined(F.scaled_dot_product_attention(q, k, v)))


def relative(net, x):
    position = torch.arange(5)
    bias = net.table[position[:, None] - position + 4].permute(2, 0, 1)
    return fused(net, x, attn_mask=bias.unsqueeze(0))


def class_token(net, x):
    x = torch.cat([net.token.expand(2, -1, -1), net.embed(x)], 1) + net.position
    return net.o((x + net.block(net.norm(x), net.norm(x), net.norm(x), need_weights=False)[0])[:, 0])


def queried(net, x):
    return net.o(net.block(net.queries.expand(2, -1, -1), net.embed(x), net.embed(x))[0])


def stacked(net, x):
    found = [F.scaled_dot_product_attention(q(x), k(x), v(x)) for q, k, v in zip(net.q, net.k, net.v, strict=True)]
    return net.o(torch.stack(found, 2).flatten(2))


def three(width):
    return nn.ModuleList(nn.Linear(3, width) for _ in range(3))


def linear_attention(net, x):
    q, k, v = heads(F.elu(net.q(x)) + 1, 3), heads(F.elu(net.k(x)) + 1, 3), heads(net.v(x), 3)
    return net.o(joined(q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(2).unsqueeze(-1))))


def mixture(net, x):
    gate = net.gate(x).softmax(-1)
    hidden = torch.einsum("bti,ehi->bteh", x, net.up).relu()
    return torch.einsum("bte,bteh,eoh->bto", gate, hidden, net.down)


KEYS = [4] * 3  # the entries of queries and keys within each of three heads
VALUES = [4] * 3
HEADS = sorted([3, *KEYS, *VALUES])
ATTENTION = {
    "fused": (lambda: Net(fused, **projections()), tokens, HEADS),
    "fused, causal": (lambda: Net(lambda net, x: fused(net, x, is_causal=True), **projections()), tokens, HEADS),
    "fused, masked": (
        lambda: Net(lambda net, x: fused(net, x, attn_mask=torch.ones(5, 5).tril().bool()), **projections()),
        tokens,
        HEADS,
    ),
    "by hand": (lambda: Net(by_hand, **projections()), tokens, HEADS),
    "by einsum": (
        lambda: Net(by_einsum, q=parameter(3, 4, 3), k=parameter(3, 4, 3), v=parameter(3, 4, 3), o=parameter(2, 3, 4)),
        tokens,
        [3, 4, 4],  # an axis of a parameter is permuted alike along its other axes: in all heads
    ),
    "packed": (lambda: Net(packed, qkv=nn.Linear(3, 36), o=nn.Linear(12, 2)), tokens, HEADS),
    "packed by head": (lambda: Net(packed_by_head, qkv=nn.Linear(3, 36), o=nn.Linear(12, 2)), tokens, HEADS),
    "grouped queries, expanded": (
        lambda: Net(lambda net, x: grouped_query(net, x, "expand"), **projections(24, 8)),
        tokens,
        [2, 3, 3, 4, 4, 4, 4],
    ),
    "grouped queries, repeated": (
        lambda: Net(lambda net, x: grouped_query(net, x, "repeat_interleave"), **projections(24, 8)),
        tokens,
        [2, 3, 3, 4, 4, 4, 4],
    ),
    "grouped queries, fused": (
        lambda: Net(lambda net, x: grouped_query(net, x, "fused"), **projections(24, 8)),
        tokens,
        [2, 3, 3, 4, 4, 4, 4],
    ),
    "rotary": (lambda: Net(rotary, **projections()), tokens, [3, *VALUES]),
    "rotary, complex": (lambda: Net(rotary_complex, **projections()), tokens, [3, *VALUES]),
    "relative bias": (lambda: Net(relative, table=parameter(9, 3), **projections()), tokens, HEADS),
    "class token": (
        lambda: Net(
            class_token,
            token=parameter(1, 1, 12),
            position=parameter(1, 6, 12),
            embed=nn.Linear(3, 12),
            norm=nn.LayerNorm(12),
            block=nn.MultiheadAttention(12, 3, batch_first=True),
            o=nn.Linear(12, 2),
        ),
        tokens,
        sorted([*HEADS, 12]),
    ),
    "learned queries": (
        lambda: Net(
            queried,
            queries=parameter(1, 4, 12),
            embed=nn.Linear(3, 12),
            block=nn.MultiheadAttention(12, 3, batch_first=True),
            o=nn.Linear(12, 2),
        ),
        tokens,
        sorted([*HEADS, 12, 12]),
    ),
    "heads in a list": (
        lambda: Net(stacked, q=three(4), k=three(4), v=three(4), o=nn.Linear(12, 2)),
        tokens,
        [*KEYS, *VALUES],
    ),
    "linear attention": (lambda: Net(linear_attention, **projections()), tokens, HEADS),
    "kdim and vdim": (
        lambda: Net(
            lambda net, x: net.o(net.block(net.q(x), x, torch.cat([x, x], -1))[0]),
            q=nn.Linear(3, 12),
            block=nn.MultiheadAttention(12, 3, kdim=3, vdim=6, batch_first=True),
            o=nn.Linear(12, 2),
        ),
        tokens,
        sorted([*HEADS, 12, 12]),
    ),
    "bias_kv and a zero key": (
        lambda: Net(
            lambda net, x: net.block(x, x, x)[0],
            block=nn.MultiheadAttention(12, 3, add_bias_kv=True, add_zero_attn=True),
        ),
        normal(5, 2, 12),
        HEADS,
    ),
    "weights as output": (
        lambda: Net(
            lambda net, x: net.block(x, x, x, average_attn_weights=False),
            block=nn.MultiheadAttention(12, 3, batch_first=True),
        ),
        normal(2, 5, 12),
        [*KEYS, *VALUES],
    ),
    "mixture of experts": (
        lambda: Net(mixture, gate=nn.Linear(3, 4), up=parameter(4, 5, 3), down=parameter(4, 2, 5)),
        tokens,
        [4, 5],
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_keeps_the_output_and_is_free(name):
    factory, inputs, expected = ATTENTION[name]
    spec = assert_symmetric(factory().double(), inputs)
    assert sizes(spec) == expected, spec.report()
    assert not spec.frozen_by


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder(norm_first, batch_first):
    layer = nn.TransformerEncoderLayer(12, 3, 10, batch_first=batch_first, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12), enable_nested_tensor=False)
    net = nn.Sequential(nn.Linear(3, 12), encoder, nn.Linear(12, 2)).double()
    spec = assert_symmetric(net, tokens)
    assert sizes(spec) == sorted([12, *2 * [10, *HEADS]])  # the stream; in each layer the MLP and the heads
    assert set(spec.moved) == set(net.state_dict()) - {"2.bias"}


def test_transformer_encoder_with_masks():
    layer = nn.TransformerEncoderLayer(12, 3, 10, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    inputs = {"src": normal(2, 5, 12), "mask": torch.ones(5, 5).triu(1).bool(), "src_key_padding_mask": padding}
    spec = assert_symmetric(net.double(), inputs)
    assert sizes(spec) == sorted(2 * [10, *HEADS])


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_decoder(norm_first):
    layer = nn.TransformerDecoderLayer(12, 3, 10, batch_first=True, norm_first=norm_first)
    net = Net(
        lambda net, x, y: net.out(net.decoder(net.embed(x), net.embed(y))),
        embed=nn.Linear(3, 12),
        decoder=nn.TransformerDecoder(layer, 2),
        out=nn.Linear(12, 2),
    )
    spec = assert_symmetric(net.double(), (tokens, others))
    assert sizes(spec) == sorted([12, *2 * [10, *HEADS, *HEADS]])


def test_transformer():
    net = nn.Transformer(12, 3, 1, 1, 10, batch_first=True)
    spec = assert_symmetric(net.double(), (normal(2, 5, 12), normal(2, 7, 12)))
    assert sizes(spec) == sorted([10, 10, *HEADS, *HEADS, *HEADS])


def test_heads_are_blocks_with_their_entries_within():
    net = randomise(Net(fused, **projections()).double())
    spec = trace_permutations(net, tokens)
    (name,) = spec.blocks
    outer = spec.groups[name]
    assert outer.size == 3
    assert {(place.tensor, place.axis) for place in outer.places} == {
        *((f"{layer}.{kind}", 0) for layer in "qkv" for kind in ("weight", "bias")),
        ("o.weight", 1),
    }
    for place in outer.places:
        assert torch.equal(place.index, torch.arange(12).view(3, 4))
    for kind in spec.blocks[name]:
        for block, inner in enumerate(kind):
            group = spec.groups[inner]
            assert (group.block_of, group.block, group.size) == (name, block, 4)
            assert all(torch.equal(place.index.flatten(), torch.arange(4) + 4 * block) for place in group.places)
