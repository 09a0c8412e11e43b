"""A standard MLP embedded in a W-asymmetric one is the same function, and the constants are what they are."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_symmetry import MLP, AsymmetricLinear, asymmetrize
from lightning_symmetry.asymmetry.embed import EmbeddedMLP, embed

EXACT = 1e-8  # relative to the largest output, in float64

ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "softplus": lambda: nn.Softplus(threshold=60),  # not zero at zero
}


def mlp(*widths, activation=nn.ReLU, bias=True, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(widths[0], widths[1:-1], widths[-1], norm=False, activation=activation, bias=bias).double()


@torch.no_grad()
def deviation(net, embedded, shape):
    x = torch.randn(500, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = net(x)
    actual = embedded(x)
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def assert_constants_as_drawn(embedded, n_fix, kappa, seed):
    """The constants are those of a standard MLP of the same widths that `asymmetrize` has converted."""
    *widths, num_outputs = embedded.widths
    reference = MLP(widths[0], widths[1:], num_outputs, norm=False).double()
    asymmetrize(reference, "w", n_fix=n_fix, kappa=kappa, seed=seed)
    assert len(reference.linears) == len(embedded.linears)
    for layer, drawn in zip(embedded.linears, reference.linears, strict=True):
        assert type(layer) is AsymmetricLinear
        for name, value in drawn.constants().items():
            assert torch.equal(layer.constants()[name], value)
        fixed = ~layer.mask
        assert (fixed.sum(1) == n_fix).all()
        assert len(torch.unique(fixed, dim=0)) == len(fixed)
        assert torch.equal(layer.canonical_weight()[fixed], drawn.fixed.flatten())
        assert torch.equal(layer.weight[fixed], drawn.fixed.flatten())


@pytest.mark.parametrize("n_fix", [1, 2, 4, 8])
@pytest.mark.parametrize("hidden", [(), (16,), (16, 24)], ids=["1 layer", "2 layers", "3 layers"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compact_construction(activation, hidden, n_fix):
    net = mlp(12, *hidden, 5, activation=ACTIVATIONS[activation], seed=n_fix)
    embedded = embed(net, n_fix=n_fix, seed=3)
    assert deviation(net, embedded, (12,)) < EXACT
    assert len(embedded.linears) == 2 * (1 + len(hidden))
    assert_constants_as_drawn(embedded, n_fix, 1.0, 3)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_paper_construction_at_its_widths(activation):
    net = mlp(30, 100, 10, activation=activation)
    embedded = embed(net, n_fix=2, width=512, construction="paper")
    assert embedded.widths == (512, 24 * 512, 512, 24 * 512, 10)
    assert deviation(net, embedded, (30,)) < EXACT


@pytest.mark.parametrize(
    ("n_fix", "width", "hidden"),
    [(1, 504, None), (1, None, None), (2, 64, None), (3, 96, 24 * 20), (4, None, None), (8, 300, None)],
)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_paper_construction(activation, n_fix, width, hidden):
    net = mlp(18, 20, 15, 4, activation=activation)
    embedded = embed(net, n_fix=n_fix, width=width, hidden=hidden, construction="paper", seed=5)
    assert deviation(net, embedded, (18,)) < EXACT
    assert_constants_as_drawn(embedded, n_fix, 1.0, 5)


def test_paper_construction_has_triples_of_equal_neurons():
    width = 64
    net = mlp(width, width, 3)
    first, second, *_ = embed(net, n_fix=2, width=width, construction="paper").linears
    rows, counts = torch.unique(first.canonical_weight().detach().round(decimals=8), dim=0, return_counts=True)
    assert sorted(counts.tolist()) == [3] * 4 * width + [12] * width
    opposite = torch.cdist(rows, -rows).min(1).values < 1e-6
    assert torch.equal(opposite, counts == 3)
    assert len(second.weight) == width


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    n_fix=st.integers(1, 6),
    kappa=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(0, 2**31),
    bias=st.booleans(),
)
def test_any_shape_seed_and_kappa(widths, n_fix, kappa, seed, bias):
    net = mlp(*widths, activation=nn.GELU, bias=bias, seed=seed % 1000)
    embedded = embed(net, n_fix=n_fix, kappa=kappa, seed=seed)
    assert deviation(net, embedded, (widths[0],)) < EXACT
    assert_constants_as_drawn(embedded, n_fix, kappa, seed)


@pytest.mark.parametrize("construction", ["compact", "paper"])
def test_every_constant_takes_part(construction):
    """Were a live constant ignored, or the layers plain ones, removing the constants would not change the function."""
    net = mlp(10, 12, 3, activation=nn.GELU)
    embedded = embed(net, n_fix=4, construction=construction)
    for number, layer in enumerate(embedded.linears):
        live = [10, None, 12, None][number]
        changed = copy.deepcopy(embedded)
        fixed = changed.linears[number].fixed
        fixed[~layer.mask[:, :live].all(1)] *= 1.5
        changed.linears[number].restore_constants()
        assert deviation(net, changed, (10,)) > 1e-3
        assert not torch.equal(layer.fixed, fixed)


@pytest.mark.parametrize("seed", range(5))
def test_widths_stay_small(seed):
    """The compact construction needs no more than the width of the MLP while few entries are fixed."""
    net = mlp(16, 16, 4)
    assert embed(net, n_fix=2, width=16, seed=seed).widths == (16, 64, 16, 64, 4)
    assert embed(net, n_fix=4, width=16, seed=seed).widths == (16, 64, 16, 64, 4)
    assert deviation(net, embed(net, n_fix=8, width=32, seed=seed), (16,)) < EXACT
    assert deviation(net, embed(net, n_fix=1, width=34, seed=seed), (16,)) < EXACT
    assert deviation(net, embed(net, n_fix=2, width=20, hidden=40, seed=seed), (16,)) < EXACT


def test_sequential_of_any_leading_axes():
    net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.SiLU(), nn.Linear(8, 8, bias=False)), nn.SiLU())
    net = nn.Sequential(net, nn.Linear(8, 2)).double()
    assert deviation(net, embed(net), (3, 6)) < EXACT
    images = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    assert deviation(images, embed(images), (3, 4)) < EXACT
    assert deviation(mlp(12, 5, 3), embed(mlp(12, 5, 3)), (3, 4)) < EXACT


def test_a_zero_map():
    net = mlp(4, 5, 3, bias=False)
    nn.init.zeros_(net.linears[1].weight)
    with torch.no_grad():
        assert embed(net)(torch.randn(9, 4, dtype=torch.float64)).abs().max() < 1e-12


def test_type_mode_and_the_mlp_itself_are_kept():
    net = mlp(8, 12, 3).float().eval()
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    embedded = embed(net, n_fix=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not embedded.training and all(p.dtype == torch.float32 and p.requires_grad for p in embedded.parameters())
    double = embed(net.double(), n_fix=2)
    for layer, reference in zip(embedded.linears, double.linears, strict=True):
        assert torch.equal(layer.fixed.double(), reference.fixed)
    x = torch.randn(100, 8)
    torch.testing.assert_close(embedded(x), net.float()(x), rtol=1e-3, atol=1e-3)
    assert embedded(embedded.example_input_array).shape == (2, 3)


def test_result_trains_copies_and_pickles():
    net = mlp(8, 12, 3, activation=nn.GELU)
    embedded = embed(net, n_fix=2, kappa=0.5, seed=9)
    assert isinstance(embedded, EmbeddedMLP)
    x = torch.randn(40, 8, dtype=torch.float64)
    for twin in (copy.deepcopy(embedded), pickle.loads(pickle.dumps(embedded))):
        assert torch.equal(twin(x), embedded(x))
    other = embed(mlp(8, 12, 3, activation=nn.GELU, seed=1), n_fix=2, kappa=0.5, seed=9)
    other.load_state_dict(embedded.state_dict())
    assert torch.equal(other(x), embedded(x))

    optimizer = torch.optim.AdamW(embedded.parameters(), 1e-3, weight_decay=0.1)
    losses = []
    for _ in range(20):
        loss = embedded(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    embedded.state_dict()
    assert_constants_as_drawn(embedded, 2, 0.5, 9)


def test_inadmissible_masks_name_the_neuron_the_block_or_the_row():
    net = mlp(16, 16, 4)
    with pytest.raises(
        ValueError, match=r"Map 0 .*neuron \d+ \(row \d+ of B', fixed at the live inputs .* share .*seed"
    ):
        embed(net, n_fix=8, width=16)
    with pytest.raises(ValueError, match=r"block \d+ cannot be filled.* 12 neurons has \d+, fixed at .*larger width"):
        embed(net, n_fix=8, width=64, construction="paper")
    with pytest.raises(ValueError, match=r"row 0 of A' is fixed on 2 of 16 pairs .* too few for 16 inputs"):
        embed(net, n_fix=2, width=40, hidden=32)
    with pytest.raises(ValueError, match=r"linears\.1: 33 rows need pairwise distinct masks.*width=33"):
        embed(net, n_fix=1, width=33)
    with pytest.raises(ValueError, match="rounding"):
        embed(net, n_fix=2, kappa=1e5)


def test_a_fixed_triple_is_named():
    from lightning_symmetry.asymmetry.embed_paper import paper_map

    b, a = AsymmetricLinear(24, 24, 1, 1.0, dtype=torch.float64), AsymmetricLinear(24, 20, 22, 1.0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the map: row 0 of A' is fixed on all three copies of triple \d of block 0"):
        paper_map(torch.ones(1, 3, dtype=torch.float64), b, a, "the map")


@pytest.mark.parametrize(
    ("net", "error", "text"),
    [
        (MLP(4, (5,)), ValueError, "norm=False"),
        (MLP(4, (5,), norm=False, activation=nn.Tanh), ValueError, r"Tanh\(\) does not satisfy eta"),
        (MLP(4, (5,), norm=False, activation=nn.LeakyReLU), ValueError, "does not satisfy eta"),
        (nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4)), ValueError, "does not satisfy eta"),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), TypeError, "LayerNorm"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ValueError, "Linear -> ReLU"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ValueError, "Linear -> Linear"),
        (nn.Sequential(), ValueError, "nothing"),
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(4, 4)), ValueError, "do not follow"),
        (nn.Linear(4, 4), TypeError, "Linear"),
        (asymmetrize(MLP(9, (5,), norm=False), n_fix=2), TypeError, "AsymmetricLinear"),
    ],
)
def test_what_cannot_be_embedded(net, error, text):
    with pytest.raises(error, match=text):
        embed(net)


def test_activations_must_agree():
    net = nn.Sequential(*[nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="one activation"):
        embed(net)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"n_fix": 0}, "n_fix"),
        ({"n_fix": 1.5}, "n_fix"),
        ({"kappa": -1.0}, "kappa"),
        ({"kappa": math.nan}, "kappa"),
        ({"construction": "other"}, "construction"),
        ({"width": 7}, "at least 8"),
        ({"hidden": 1}, "hidden"),
        ({"hidden": 100, "construction": "paper"}, "multiple of 24"),
        ({"n_fix": 8, "width": 8}, "leaves no trainable entry"),
    ],
)
def test_wrong_settings(wrong, text):
    with pytest.raises(ValueError, match=text):
        embed(mlp(8, 8, 2), **wrong)


def test_wrong_input():
    with pytest.raises(ValueError, match="Expected 8 features"):
        embed(mlp(8, 8, 2))(torch.zeros(3, 7))
