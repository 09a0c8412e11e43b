"""The language model: a reference, causality, tied weights, initialisation, and what the other rooms make of it."""

from __future__ import annotations

import copy
import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.text import Perplexity

from lightning_symmetry import (
    LinearInterpolation,
    SupervisedModule,
    TransformerLM,
    asymmetrize,
    collect_statistics,
    evaluate_path,
    factorize,
    recompose,
    reparametrize,
    token_cross_entropy,
    trace_permutations,
    whiten,
)

SIZES = {"vocab_size": 50, "context": 16, "width": 24, "depth": 2, "heads": 3}


def build(seed=0, **changes):
    """Return a model in float64 whose parameters are all of ordinary size, so that each has a part in the output."""
    torch.manual_seed(seed)
    net = TransformerLM(**(SIZES | changes)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    return net


def draw(n=3, length=16, vocab=50, seed=0):
    return torch.randint(vocab, (n, length), generator=torch.Generator().manual_seed(seed))


def torch_encoder(net):
    """Return PyTorch's own encoder with the weights of the blocks."""
    width, heads, hidden = net.embedding.embedding_dim, net.blocks[0].attention.heads, net.blocks[0].up.out_features
    layer = nn.TransformerEncoderLayer(
        width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, len(net.blocks), enable_nested_tensor=False).double()
    for theirs, ours in zip(encoder.layers, net.blocks, strict=True):
        attention = ours.attention
        projections = (attention.query, attention.key, attention.value)
        theirs.self_attn.in_proj_weight.data.copy_(torch.cat([p.weight for p in projections]))
        theirs.self_attn.in_proj_bias.data.copy_(torch.cat([p.bias for p in projections]))
        pairs = [
            (theirs.self_attn.out_proj, attention.out),
            (theirs.linear1, ours.up),
            (theirs.linear2, ours.down),
            (theirs.norm1, ours.attention_norm),
            (theirs.norm2, ours.mlp_norm),
        ]
        for to, source in pairs:
            to.load_state_dict(source.state_dict())
    return encoder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False},
        {"depth": 1, "heads": 1},
        {"width": 6, "heads": 6, "hidden": 5},
        {"vocab_size": 1, "context": 1},
    ],
)
def test_equals_pytorchs_encoder_with_a_causal_mask(changes):
    net = build(**changes)
    length = net.context
    tokens = draw(length=length, vocab=net.embedding.num_embeddings)
    hidden = net.embedding.weight[tokens] + net.positions.weight[:length]
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    hidden = net.norm(torch_encoder(net)(hidden, mask=mask, is_causal=True))
    torch.testing.assert_close(net(tokens), hidden @ net.head.weight.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changed", [1, 7, 15])
def test_a_token_changes_no_logits_before_its_own_position(changed):
    net, tokens = build(), draw()
    others = tokens.clone()
    others[:, changed] = (others[:, changed] + 1) % 50
    before, after = net(tokens), net(others)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-14)
    assert (before[:, changed:] - after[:, changed:]).abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("length", [1, 5, 16])
def test_short_inputs_have_the_logits_of_the_beginning(length):
    net, tokens = build(), draw()
    torch.testing.assert_close(net(tokens[:, :length]), net(tokens)[:, :length])
    torch.testing.assert_close(net(tokens[0]), net(tokens)[0])


def closed_form(vocab, context, width, depth, hidden, tied):
    block = 4 * width * (width + 1) + 2 * width * hidden + hidden + width + 4 * width
    return vocab * width * (1 if tied else 2) + context * width + depth * block + 2 * width


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("width", "depth", "heads", "hidden"), [(24, 2, 3, None), (8, 1, 8, 5), (16, 3, 1, 64)])
def test_parameters(width, depth, heads, hidden, tied):
    net = TransformerLM(50, 16, width, depth, heads, hidden, tied=tied)
    count = sum(p.numel() for p in net.parameters())
    assert count == closed_form(50, 16, width, depth, hidden or 4 * width, tied)
    assert net(net.example_input_array).shape == (2, 16, 50)


def test_gpt2_has_124_million_parameters():
    with torch.device("meta"):
        net = TransformerLM(50_257, 1024, 768, 12, 12)
    assert sum(p.numel() for p in net.parameters()) == 124_439_808


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    net = TransformerLM(1000, 64, 128, 8, 4)
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / 4 if name.endswith((".out", ".down")) else 0.02  # sqrt(2 * 8) = 4
            assert module.weight.std().item() == pytest.approx(std, rel=0.05), name  # 8,192 entries and more
            assert getattr(module, "bias", None) is None or not module.bias.any()
    tokens = draw(4, 64, 1000)
    # The logits are small, so the model begins near the uniform distribution.
    assert token_cross_entropy(net(tokens), tokens.roll(-1, 1)).item() == pytest.approx(math.log(1000), abs=0.1)


def test_dropout_in_training_only():
    torch.manual_seed(0)
    net, tokens = TransformerLM(**SIZES, dropout=0.5), draw()
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))
    plain = TransformerLM(**SIZES)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net(tokens), plain(tokens))


def test_dropout_of_embeddings_and_of_what_blocks_add():
    net, dropped = TransformerLM(**SIZES, dropout=0.5), []
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *arguments: dropped.append((arguments[2] == 0).double().mean().item()))
    net(draw())
    assert dropped == pytest.approx([0.5] * (1 + 2 * 2), abs=0.1)  # of 1,152 entries each: six standard deviations


def test_attention_drops_weights_in_training():
    torch.manual_seed(0)
    attention = TransformerLM(**SIZES, dropout=0.5).blocks[0].attention
    x = torch.randn(2, 16, 24)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def is_tied(net):
    names = [name for name, _ in net.named_parameters()]
    if hasattr(net.head, "left"):
        both = net.head.left is net.embedding.left and net.head.right is net.embedding.right
        return both and not any(name.startswith("head.") for name in names)
    return net.head.weight is net.embedding.weight and "head.weight" not in names


def test_the_head_stays_tied():
    net, tokens = build(), draw()
    assert is_tied(net)
    assert not is_tied(build(tied=False))
    assert is_tied(copy.deepcopy(net))

    loaded = build(seed=1)
    loaded.load_state_dict(net.state_dict())
    assert is_tied(loaded)
    assert torch.equal(loaded(tokens), net(tokens))

    wide = factorize(copy.deepcopy(net), 24, skip=["positions"], min_saving=-1)  # the full rank: the same function
    assert is_tied(wide)
    assert is_tied(copy.deepcopy(wide))
    assert not wide.factorization_report.left_alone.keys() - {"positions"}
    torch.testing.assert_close(wide(tokens), net(tokens))
    assert is_tied(recompose(wide))
    torch.testing.assert_close(wide(tokens), net(tokens))


def test_gradients_of_both_uses_add_up_in_a_tied_table():
    net, tokens = build(), draw()
    untied = build(tied=False)
    untied.load_state_dict(net.state_dict())
    for model in (net, untied):
        token_cross_entropy(model(tokens), tokens.roll(-1, 1)).backward()
    torch.testing.assert_close(net.embedding.weight.grad, untied.embedding.weight.grad + untied.head.weight.grad)


def test_permutations_of_units_heads_and_the_residual_stream_keep_the_function():
    net, tokens = build(), draw()
    traced = trace_permutations(net, tokens)
    # A block has its MLP's units, its heads, and within each head the units of queries and keys and those of values;
    # the residual stream is one group.
    block = [96, 3, *3 * [8], *3 * [8]]
    assert sorted(group.size for group in traced.groups.values()) == sorted([24, *2 * block])
    assert not traced.frozen_by
    before = net(tokens)
    moved = copy.deepcopy(net)
    moved.load_state_dict(traced.apply(net.state_dict(), traced.random()))
    assert not torch.equal(moved.embedding.weight, net.embedding.weight)
    torch.testing.assert_close(moved(tokens), before)


@pytest.mark.filterwarnings("ignore:.* left 3 layer.* alone")
def test_all_rooms_find_the_linear_layers():
    net, tokens = build(), draw(32)
    linear = {name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)} - {"head"}
    assert len(linear) == 2 * 6
    before = net(tokens)
    whitened = whiten(copy.deepcopy(net))
    assert set(whitened.whitening_report.changed) == linear
    assert not reparametrize(whitened, collect_statistics(whitened, lambda: whitened(tokens)), eps=1e-3)
    torch.testing.assert_close(whitened(tokens), before)
    assert set(asymmetrize(copy.deepcopy(net), "w").asymmetry_report.changed) == linear
    assert len(asymmetrize(copy.deepcopy(net), "sigma").asymmetry_report.changed) == 2  # the GELUs


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_populations_and_gradients_of_single_samples():
    nets, tokens = [build(seed) for seed in range(3)], draw()
    parameters, buffers = stack_module_state(nets)
    together = torch.vmap(lambda p, b: functional_call(nets[0], (p, b), (tokens,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([net(tokens) for net in nets]))

    net, targets = nets[0], tokens.roll(-1, 1)

    def loss(parameters, tokens, targets):
        return token_cross_entropy(functional_call(net, parameters, (tokens[None],)), targets[None])

    detached = {name: p.detach() for name, p in net.named_parameters()}
    gradients = torch.vmap(torch.func.grad(loss), (None, 0, 0))(detached, tokens, targets)
    token_cross_entropy(net(tokens), targets).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[name].mean(0), parameter.grad)


def test_path_begins_and_ends_at_the_networks():
    nets = [build(0), build(1)]
    loader = DataLoader(TensorDataset(draw(12), draw(12, seed=1)), batch_size=5)
    metrics = {"perplexity": Perplexity()}
    result = evaluate_path(*nets, loader, 3, loss=token_cross_entropy, metrics=metrics, progress=False)
    for net, loss, perplexity in zip(nets, result.loss[[0, -1]], result.metrics["perplexity"][[0, -1]], strict=True):
        expected = token_cross_entropy(net(draw(12)), draw(12, seed=1))
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(perplexity, expected.detach().exp(), rtol=1e-5, atol=0)  # torchmetrics: float32


def test_cross_entropy_is_that_of_all_positions_alike():
    logits, tokens = torch.randn(3, 5, 7, dtype=torch.float64), draw(3, 5, 7)
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    picked = torch.stack([probabilities[n, t, tokens[n, t]] for n in range(3) for t in range(5)])
    torch.testing.assert_close(token_cross_entropy(logits, tokens), -picked.log().mean())


def test_trains_with_perplexity_and_interpolation(tmp_path):
    torch.manual_seed(0)
    tokens = (torch.arange(17) + torch.randint(50, (64, 1))) % 50  # counts upwards: easy to learn
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=24, shuffle=True)
    held_out = DataLoader(TensorDataset(tokens[:20, :-1], tokens[:20, 1:]), batch_size=8)
    module = SupervisedModule(
        TransformerLM(**SIZES),
        loss=token_cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        metrics={"perplexity": Perplexity()},
    )
    path = LinearInterpolation(num_points=3, split="val", progress=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[path],
    )
    trainer.fit(module, loader, held_out)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    for split in ("train", "val"):
        assert logged[f"{split}/perplexity"] == pytest.approx(math.exp(logged[f"{split}/loss"]), rel=1e-5)
    assert logged["val/loss"] < 1 < math.log(50) - 0.2 < path.result.loss[0]
    assert path.result.loss[-1].item() == pytest.approx(logged["val/loss"], rel=1e-5)
    assert path.result.metrics["perplexity"][-1].item() == pytest.approx(logged["val/perplexity"], rel=1e-5)
    (result,) = trainer.test(module, held_out, verbose=False)
    assert result["test/perplexity"] == pytest.approx(math.exp(result["test/loss"]), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "`vocab_size` to be at least 1 but got 0"),
        ({"context": 0}, "`context` to be at least 1 but got 0"),
        ({"width": -1}, "`width` to be at least 1 but got -1"),
        ({"depth": 0}, "`depth` to be at least 1 but got 0"),
        ({"heads": 0}, "`heads` to be at least 1 but got 0"),
        ({"hidden": 0}, "`hidden` to be at least 1 but got 0"),
        ({"heads": 5}, "`heads` to divide `width` but got 5 heads and width 24"),
        ({"dropout": 1.0}, r"`dropout` to be in \[0, 1\) but got 1.0"),
    ],
)
def test_bad_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerLM(**(SIZES | changes))


def test_input_longer_than_the_context():
    with pytest.raises(ValueError, match=r"has 16 positions, but the input of shape \(2, 17\) has 17: .* `context`"):
        TransformerLM(**SIZES)(draw(2, 17))
