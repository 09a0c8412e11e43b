"""Each scaling, sign flip or linear map that is listed leaves the function as it is; what is none is not listed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from trace_reference import Net, normal

from lightning_symmetry import GNN, MLP, FiGLU, ResNet20, asymmetrize
from lightning_symmetry.permutation.symmetries import symmetries
from lightning_symmetry.surgery import call

EXACT = 1e-10  # relative to the largest entry of the output, in float64


def seq(*layers):
    return nn.Sequential(*layers)


def linear(n, m, bias=True):
    return nn.Linear(n, m, bias)


def around(activation, n=5):
    return seq(linear(3, n), activation, linear(n, 2))


def ends(function, **parts):
    return Net(function, **{"a": linear(3, 4), "b": linear(4, 2), **parts})


def skipping(net, x):
    h = torch.relu(net.a(x))
    return net.c(torch.relu(h + net.b(h)))


def layer_scaled(net, x):
    return net.b(net.gamma * torch.relu(net.a(x)))


def reversed_product(net, x):
    return net.b(torch.relu(x @ net.a))


def attention(net, x):
    q, k, v = net.q(x), net.k(x), net.v(x)
    return net.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


def looked_up(net, x):
    return net.out(torch.relu(net.table(x)))


VECTORS = (4, 3)
IMAGES = (4, 1, 6, 6)
INDICES = torch.tensor([[0, 1, 2], [2, 2, 0]])
P, S, F, V, G = "positive scaling", "scaling", "sign flip", "scale invariance", "general linear"
CASES = {  # network, input, what is expected
    "relu": (lambda: around(nn.ReLU()), VECTORS, {(P, "0")}),
    "leaky relu": (lambda: around(nn.LeakyReLU(0.3)), VECTORS, {(P, "0")}),
    "prelu": (lambda: around(nn.PReLU()), VECTORS, {(P, "0")}),
    "prelu of each": (lambda: around(nn.PReLU(5)), VECTORS, {(P, "0")}),
    "tanh": (lambda: around(nn.Tanh()), VECTORS, {(F, "0")}),
    "hardshrink": (lambda: around(nn.Hardshrink()), VECTORS, {(F, "0")}),
    "tanhshrink": (lambda: around(nn.Tanhshrink()), VECTORS, {(F, "0")}),
    "gelu": (lambda: around(nn.GELU()), VECTORS, set()),
    "silu": (lambda: around(nn.SiLU()), VECTORS, set()),
    "sigmoid": (lambda: around(nn.Sigmoid()), VECTORS, set()),
    "softplus": (lambda: around(nn.Softplus()), VECTORS, set()),
    "relu6": (lambda: around(nn.ReLU6()), VECTORS, set()),
    "relu of tanh": (lambda: around(seq(nn.Tanh(), nn.ReLU())), VECTORS, set()),
    "shifted relu": (lambda: ends(lambda net, x: net.b(torch.relu(net.a(x) + 1))), VECTORS, set()),
    "squared": (lambda: ends(lambda net, x: net.b(net.a(x) ** 2)), VECTORS, set()),
    "softmax": (lambda: around(nn.Softmax(-1)), VECTORS, set()),
    "two layers": (
        lambda: seq(linear(3, 4), nn.ReLU(), linear(4, 4), nn.Tanh(), linear(4, 2)),
        VECTORS,
        {(P, "0"), (F, "2")},
    ),
    "linear": (lambda: seq(linear(3, 4), linear(4, 2, False)), VECTORS, {(G, "0")}),
    "skip": (lambda: Net(skipping, a=linear(3, 4), b=linear(4, 4), c=linear(4, 2)), VECTORS, {(P, "a")}),
    # The next two are scalings, but of a form that is not proposed or that the check refuses.
    "layer scale": (lambda: ends(layer_scaled, gamma=nn.Parameter(torch.ones(4))), VECTORS, set()),
    "weight on the right": (lambda: ends(reversed_product, a=nn.Parameter(torch.ones(3, 4))), VECTORS, set()),
    "max pool": (
        lambda: seq(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), linear(12, 2)),
        IMAGES,
        {(P, "0")},
    ),
    "mean pool": (
        lambda: seq(nn.Conv2d(1, 3, 3), nn.AvgPool2d(2), nn.Flatten(), linear(12, 2)),
        IMAGES,
        {(S, "0")},
    ),
    "transposed": (
        lambda: seq(nn.ConvTranspose2d(1, 3, 2), nn.ReLU(), nn.ConvTranspose2d(3, 1, 2)),
        IMAGES,
        {(P, "2")},
    ),
    "depthwise": (
        lambda: seq(
            *(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 3, 2, groups=3, bias=False), nn.ReLU(), nn.Conv2d(3, 1, 1))
        ),
        IMAGES,
        {(P, "0")},
    ),
    "embedding": (
        lambda: Net(looked_up, table=nn.Embedding(3, 4), out=linear(4, 2)),
        INDICES,
        {(P, "table.weight[:, 0:4]")},
    ),
    "attention": (
        lambda: Net(attention, q=linear(3, 4), k=linear(3, 4), v=linear(3, 4), out=linear(4, 2)),
        (2, 4, 3),
        {(G, "v")},
    ),
    "batch norm": (
        lambda: seq(linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), linear(4, 2)),
        VECTORS,
        {(P, "0"), (V, "0.weight")},
    ),
    "batch norm alone": (
        lambda: seq(linear(3, 4), nn.BatchNorm1d(4), linear(4, 2)),
        VECTORS,
        {(S, "0"), (V, "0.weight")},
    ),
    "batch norm without weights": (
        lambda: seq(linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU(), linear(4, 2)),
        VECTORS,
        {(V, "0.weight")},
    ),
    "layer norm": (
        lambda: seq(linear(3, 4), nn.LayerNorm(4), nn.GELU(), linear(4, 2)),
        VECTORS,
        {(V, "0.weight")},
    ),
    "layer norm and relu": (
        lambda: seq(linear(3, 4), nn.LayerNorm(4), nn.ReLU(), linear(4, 2)),
        VECTORS,
        {(P, "0"), (V, "0.weight")},
    ),
    "layer norm after relu": (lambda: seq(linear(3, 4), nn.ReLU(), nn.LayerNorm(4), linear(4, 2)), VECTORS, set()),
}


def build(make, shape, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make().double()
        for parameter in net.parameters():
            nn.init.normal_(parameter)
    return net.eval(), shape if isinstance(shape, torch.Tensor) else normal(*shape, seed=seed)


def assert_symmetry(net, x, rescaling, seed):
    """Random factors leave the function, and change the parameters."""
    net = copy.deepcopy(net)
    if rescaling.kind == "scale invariance":  # holds up to eps, and with the statistics that follow the parameters
        for module in net.modules():
            if hasattr(module, "eps"):
                module.eps = 1e-30
                module.train()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = call(net, x)
    factors = rescaling.random(torch.Generator().manual_seed(seed))
    moved = rescaling.apply(state, factors)
    assert any(not torch.equal(moved[name], state[name]) for name in state) or bool((factors == 1).all())
    net.load_state_dict(moved)
    actual = call(net, x)
    assert float((actual - expected).detach().abs().max()) <= EXACT * float(expected.detach().abs().max())
    for action in rescaling.actions:  # the other half of it is needed
        if len(rescaling.actions) > 1 and action.exponent < 0 and not bool((factors == 1).all()):
            net.load_state_dict({**moved, action.tensor: state[action.tensor]})
            assert not torch.allclose(call(net, x), expected)


@pytest.mark.parametrize("name", CASES)
def test_what_is_listed_is_a_symmetry_and_nothing_else(name):
    net, x = build(*CASES[name][:2])
    report = symmetries(net, x)
    assert {(r.kind, r.where) for r in report.rescalings} == CASES[name][2]
    for seed in range(3):
        net, x = build(*CASES[name][:2], seed=seed)
        for rescaling in report.rescalings:
            assert_symmetry(net, x, rescaling, seed)


def test_a_scaling_by_hand():
    net, x = build(*CASES["relu"][:2])
    (rescaling,) = symmetries(net, x).rescalings
    s = torch.tensor([1.0, 2.0, 3.0, 0.5, 7.0], dtype=torch.float64)
    old = net.state_dict()
    new = rescaling.apply(old, s)
    assert torch.equal(new["0.weight"], old["0.weight"] * s[:, None])
    assert torch.equal(new["0.bias"], old["0.bias"] * s)
    torch.testing.assert_close(new["2.weight"], old["2.weight"] / s, rtol=1e-15, atol=0)
    assert torch.equal(new["2.bias"], old["2.bias"])


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("relu", {P}), ("tanh", {F}), ("linear", {S}), ("max pool", {P}), ("batch norm", {P, V})],
)
def test_fixed_zeros_keep_scalings_but_no_general_linear_maps(name, kinds):
    net, x = build(*CASES[name][:2])
    few_inputs = net[0].weight[0].numel() < 4
    net = asymmetrize(net, "w", kappa=0.0, skip=["0"] if few_inputs else [])
    report = symmetries(net, x)
    assert {r.kind for r in report.rescalings} == kinds
    for rescaling in report.rescalings:
        assert_symmetry(net, x, rescaling, 1)


def test_other_constants_break_scalings():
    net, x = build(lambda: seq(linear(4, 5), nn.ReLU(), linear(5, 6), nn.Tanh(), linear(6, 2)), (4, 4))
    report = symmetries(asymmetrize(copy.deepcopy(net), "w", kappa=1.0, n_fix=2), x)
    assert report.rescalings == []
    assert report.notes == {
        "nonzero constants break the positive scaling": ["0"],
        "nonzero constants break the sign flip": ["2"],
    }
    net = asymmetrize(net, "w", kappa=1.0, n_fix=1, skip=["0", "2"])  # two of six units have a fixed outgoing weight
    report = symmetries(net, x)
    kinds = {r.kind: r for r in report.rescalings}
    broken = (~net[4].mask).any(0)
    assert kinds[F].units.tolist() == (~broken).nonzero().flatten().tolist()
    assert report.notes == {"nonzero constants break the sign flip of 2 of 6 units": ["2"]}
    for rescaling in report.rescalings:
        assert_symmetry(net, x, rescaling, 1)
        assert (net[4].canonical_weight()[~net[4].mask] == net[4].fixed.flatten()).all()


def test_other_constants_break_scale_invariance():
    for name, kind in (("batch norm", "batch norm"), ("layer norm", "layer norm")):
        net, x = build(lambda name=name: seq(linear(5, 4), *CASES[name][0]()[1:]), (4, 5))
        report = symmetries(asymmetrize(net, "w", kappa=1.0, n_fix=2, skip=["3"]), x)
        assert V not in {r.kind for r in report.rescalings}
        assert report.notes[f"nonzero constants break the scale invariance before the {kind}"] == ["0.weight"]


def gated(entries):
    net, x = build(lambda: seq(linear(3, 4), FiGLU(4), linear(4, 2)), VECTORS)
    net[1].fixed.copy_(entries)
    return net, x


def test_gates():
    entries = normal(4, 4, seed=3)
    report = symmetries(*gated(entries))
    assert report.rescalings == []
    assert report.notes == {"no zero entry, so no diagonal equivariance (Proposition 5)": ["1.fixed"]}
    entries[0, 1] = entries[2, 2] = 0
    report = symmetries(*gated(entries))
    assert report.rescalings == []
    assert report.notes == {"zero entries, but no zero column, so no diagonal equivariance": ["1.fixed"]}
    entries[:, 1] = 0
    net, x = gated(entries)
    report = symmetries(net, x)
    (rescaling,) = report.rescalings
    assert (rescaling.kind, rescaling.where, rescaling.units.tolist()) == (S, "0", [1])
    assert report.notes == {"zero columns: Proposition 5 does not hold, no gate sees these units": ["1.fixed"]}
    for seed in range(4):
        assert_symmetry(net, x, rescaling, seed)


def test_resnet20_and_gnn():
    net = ResNet20(norm="batch")
    found = {(r.kind, r.where) for r in symmetries(net).rescalings}
    assert sum(kind == P for kind, _ in found) == 12
    assert sum(kind == V for kind, _ in found) == 21
    assert symmetries(asymmetrize(net, preset="resnet20")).rescalings == []
    layers = symmetries(asymmetrize(ResNet20(), "sigma")).rescalings
    assert {r.kind for r in layers} == {V} and len(layers) == 21
    x, edges = torch.randn(4, 6), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    assert {(r.kind, r.where) for r in symmetries(GNN(6, 3, 5), (x, edges)).rescalings} >= {(P, "linears.2")}


def test_the_table_lists_them():
    text = str(symmetries(MLP(4, (3, 3), 2, norm=False, activation=nn.ReLU)))
    assert "positive scaling, each unit (relu between the layers): linears.0, linears.1" in text


def test_random_signs_are_not_all_one():
    net, x = build(lambda: seq(linear(3, 2), nn.Tanh(), linear(2, 2)), VECTORS)
    (flip,) = symmetries(net, x).rescalings
    for seed in range(20):
        assert (flip.random(torch.Generator().manual_seed(seed)) < 0).any()


def test_factors_are_checked():
    net, x = build(*CASES["two layers"][:2])
    scaling, flip = symmetries(net, x).rescalings
    (general,) = symmetries(*build(*CASES["linear"][:2])).rescalings
    state = net.state_dict()
    with pytest.raises(ValueError, match="Expected 4 factors for '0' but got the shape"):
        scaling.apply(state, torch.ones(3))
    with pytest.raises(ValueError, match=r"-1\.0 is no factor of a positive scaling"):
        scaling.apply(state, torch.tensor([1.0, -1.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match=r"2\.0 is no factor of a sign flip"):
        flip.apply(state, torch.tensor([1.0, -1.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match="Expected a matrix of shape"):
        general.apply(state, torch.ones(4))


def test_the_network_and_the_random_state_are_left_as_they_were():
    net, x = build(*CASES["batch norm"][:2])
    before, state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    symmetries(net, x)
    assert torch.equal(torch.random.get_rng_state(), state) and net[1].eps == 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_weight_that_is_normalised_twice_and_one_that_is_only_once():
    def both(net, x):
        return net.b(torch.tanh(net.n(net.a(x))) + torch.tanh(net.m(net.a(2 * x))))

    def once(net, x):
        return net.b(torch.tanh(net.n(net.a(x))) + torch.tanh(net.a(2 * x)))

    norms = {"n": nn.LayerNorm(4), "m": nn.LayerNorm(4)}
    for function, expected in ((both, {(V, "a.weight")}), (once, set())):
        net, x = build(lambda function=function: ends(function, **norms), VECTORS)
        found = symmetries(net, x).rescalings
        assert {(r.kind, r.where) for r in found if r.kind == V} == expected
        for rescaling in found:
            assert_symmetry(net, x, rescaling, 0)


def test_a_network_that_cannot_be_checked():
    net = Net(lambda net, x: net.b(torch.relu(net.a(x.float()))), a=linear(3, 4), b=linear(4, 2))
    report = symmetries(net, torch.zeros(4, 3))
    assert report.rescalings == []
    assert list(report.notes.values()) == [["the network"]]
