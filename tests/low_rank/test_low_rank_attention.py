"""Attention with factorised projections against ``nn.MultiheadAttention``, and transformers of it."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_symmetry import factorize, recompose
from lightning_symmetry.low_rank import LowRankLinear, LowRankMultiheadAttention, low_rank_maps
from lightning_symmetry.low_rank.projections import DenseProjection, LowRankProjection
from lightning_symmetry.surgery import plain_copy

SIZES = {"same": {}, "own": {"kdim": 6, "vdim": 10}}


def attention(**settings):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, **{"dtype": torch.float64, **settings})
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape) * 0.4)
    return layer.eval()


def mask_of(kind, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[..., 0] = False  # each query sees something
    return {"none": None, "boolean": mask, "float": mask.double() * -2.5}[kind]


@settings(deadline=None, max_examples=250)
@given(
    sizes=st.sampled_from(list(SIZES)),
    batch_first=st.booleans(),
    batched=st.booleans(),
    bias=st.booleans(),
    bias_kv=st.booleans(),
    zero=st.booleans(),
    mask=st.sampled_from(["none", "boolean", "float"]),
    per_head=st.booleans(),
    padding=st.sampled_from(["none", "boolean", "float"]),
    need_weights=st.booleans(),
    average=st.booleans(),
)
def test_it_is_plain_attention_with_the_products(
    sizes, batch_first, batched, bias, bias_kv, zero, mask, per_head, padding, need_weights, average
):
    flags = {"bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero, "batch_first": batch_first}
    plain = attention(**flags, **SIZES[sizes])
    low = LowRankMultiheadAttention.from_layer(plain, 4)
    back = low.to_layer()
    batch, queries, keys = 2, 5, 4
    generator = torch.Generator().manual_seed(2)

    def sequence(length, size):
        shape = (length, size) if not batched else (batch, length, size) if batch_first else (length, batch, size)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = sequence(queries, 12), sequence(keys, low.kdim), sequence(keys, low.vdim)
    shape = (3 * (batch if batched else 1), queries, keys) if per_head else (queries, keys)
    settings_ = {
        "attn_mask": mask_of(mask, shape),
        "key_padding_mask": mask_of(padding, (batch, keys) if batched else (keys,)),
        "need_weights": need_weights,
        "average_attn_weights": average,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")  # torch's own, of masks of two kinds
        expected, expected_weights = back(*inputs, **settings_)
    output, weights = low(*inputs, **settings_)
    torch.testing.assert_close(output, expected)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_causal_hint(need_weights, padded):
    plain = attention(batch_first=True)
    low = LowRankMultiheadAttention.from_layer(plain, 1.0)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.float64) if padded else None
    given_ = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights, "key_padding_mask": padding}
    torch.testing.assert_close(low(x, x, x, **given_)[0], plain(x, x, x, **given_)[0])
    with pytest.raises(ValueError, match="`is_causal` is a hint about `attn_mask` and needs it"):
        low(x, x, x, is_causal=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_on_the_weights(need_weights):
    low = LowRankMultiheadAttention.from_layer(attention(dropout=0.5), 1.0)
    x = torch.randn(6, 2, 12, dtype=torch.float64)
    torch.testing.assert_close(low(x, x, x, need_weights=need_weights)[0], low(x, x, x)[0])
    low.train()
    torch.manual_seed(0)
    drawn = torch.stack([low(x, x, x, need_weights=need_weights)[0] for _ in range(3000)])
    error = (drawn.mean(0) - low.eval()(x, x, x)[0]).abs()
    assert (error < 5 * drawn.std(0) / 3000**0.5).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_the_round_trip(sizes):
    plain = attention(add_bias_kv=True, batch_first=True, **SIZES[sizes]).train()
    plain.bias_k.requires_grad_(False)
    plain.out_proj.weight.requires_grad_(False)
    low = LowRankMultiheadAttention.from_layer(plain, 1.0)
    assert low.in_proj_bias is plain.in_proj_bias
    assert low.training
    back = low.to_layer()
    assert list(back.state_dict()) == list(plain.state_dict())
    for (name, p), (_, q) in zip(back.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert p is not q, name
        assert p.requires_grad == q.requires_grad, name
    assert (back.training, back.batch_first, back.num_heads) == (True, True, 3)
    if sizes == "same":
        torch.testing.assert_close(low.canonical_weight(), plain.in_proj_weight)
    else:
        with pytest.raises(ValueError, match="Keys and values have sizes of their own"):
            low.canonical_weight()


def test_projections_that_would_not_save_stay_dense():
    plain = attention(kdim=3, vdim=40)
    net = factorize(nn.ModuleDict({"a": plain}), 4)
    kinds = {name: type(part) for name, part in net["a"].projections().items()}
    assert kinds == {
        "q_proj": LowRankProjection,
        "k_proj": DenseProjection,  # rank 4 is beyond its 3
        "v_proj": LowRankProjection,
        "out_proj": LowRankProjection,
    }
    assert list(low_rank_maps(net)) == ["a.q_proj", "a.v_proj", "a.out_proj"]
    became = net.factorization_report.layers["a"]
    assert became.ranks == {"q_proj": (4, 12), "v_proj": (4, 12), "out_proj": (4, 12)}
    assert became.parameters == (12 * (12 + 3 + 40 + 12), 4 * 24 + 12 * 3 + 4 * 52 + 4 * 24)
    assert torch.equal(net["a"].to_layer().k_proj_weight, plain.k_proj_weight)
    with pytest.raises(ValueError, match=r"nothing to convert(?s:.)*rank 6 saves too little in all of its projections"):
        factorize(nn.ModuleDict({"a": attention()}), 6)


def test_random_factors_have_the_variance_of_xavier():
    plain = nn.MultiheadAttention(200, 4)
    low = LowRankMultiheadAttention.from_layer(plain, 40, "random")
    for key in ("q_proj", "k_proj", "v_proj"):
        variance = float(getattr(low, key).canonical_weight().detach().var())
        assert variance == pytest.approx(float(plain.in_proj_weight.detach().var()), rel=0.1)
    assert float(low.out_proj.canonical_weight().detach().var()) == pytest.approx(
        float(plain.out_proj.weight.detach().var()), rel=0.1
    )
    assert not torch.equal(low.q_proj.left, low.k_proj.left)


def transformer(**settings):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64, **settings)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("skip", [(), ("*.self_attn",), ("*.linear?",)])
def test_transformer_encoders(skip, padded, gradients, norm_first):
    """Also in evaluation, where a fast path reads the weights of the layers, and takes padded tokens out."""
    net = transformer(norm_first=norm_first)
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [3]]) if padded else None
    visible = slice(None) if padding is None else ~padding
    expected = net(x, src_key_padding_mask=padding)
    factorize(net, 1.0, min_saving=-1, skip=skip)
    assert len(net.factorization_report.changed) == {0: 6, 1: 4 if "attn" in "".join(skip) else 2}[len(skip)]
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(net(x, src_key_padding_mask=padding)[visible], expected[visible])
        torch.testing.assert_close(plain_copy(net)(x)[0], recompose(net)(x)[0])
        torch.testing.assert_close(net(x, src_key_padding_mask=padding)[visible], expected[visible])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_refused():
    net = factorize(transformer(), 2)
    rows = [torch.randn(length, 16, dtype=torch.float64) for length in (6, 3)]
    with pytest.raises(ValueError, match="takes no nested tensors: pad them and give `key_padding_mask`"):
        net(torch.nested.nested_tensor(rows))


def test_encoders_and_decoders_train():
    torch.manual_seed(0)
    net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    factorize(net, 0.25)
    changed = net.factorization_report.changed
    assert {name.rsplit(".", 1)[-1] for name in changed} == {"self_attn", "multihead_attn", "linear1", "linear2"}
    assert isinstance(net.encoder.layers[0].linear1, LowRankLinear)
    source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    net(source, target, tgt_mask=mask, tgt_is_causal=True).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_multiply_adds_of_attention():
    net = nn.ModuleDict({"a": attention(batch_first=True, kdim=6, vdim=10)})
    net.forward = lambda q, k, v: net["a"](q, k, value=v)[0]
    example = [torch.randn(2, n, size, dtype=torch.float64) for n, size in ((5, 12), (7, 6), (7, 10))]
    factorize(net, 2, example_input=tuple(example))
    before = 5 * 144 + 7 * 72 + 7 * 120 + 5 * 144
    after = 2 * (5 * 24 + 7 * 18 + 7 * 22 + 5 * 24)
    assert net.factorization_report.layers["a"].multiply_adds == (before, after)


def test_hooks_on_the_projections_fire():
    low = LowRankMultiheadAttention.from_layer(attention(), 2)
    seen = []
    for name, part in low.projections().items():
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    x = torch.randn(4, 1, 12, dtype=torch.float64)
    for need in (True, False):
        low(x, x, x, need_weights=need)
    assert sorted(seen) == sorted(["q_proj", "k_proj", "v_proj", "out_proj"] * 2)
