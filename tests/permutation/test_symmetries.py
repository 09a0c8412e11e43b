"""What constants leave of the permutation symmetries, against brute force over all permutations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from symmetries_reference import assert_kept, elements, generated, key, residual, set_constants
from torch import nn
from trace_reference import Net

from lightning_symmetry import GNN, MLP, FiGLU, ResNet20, asymmetrize
from lightning_symmetry.asymmetry.layer import AsymmetricLayer
from lightning_symmetry.permutation.symmetries import symmetries

MANY = settings(max_examples=100, deadline=None)


def mlp(*widths, activation=nn.ReLU, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(widths[0], widths[1:-1], widths[-1], norm=False, activation=activation).double()


def assert_agrees(net, example_input):
    """Order, generators, orbits and the orders within single groups are those of brute force."""
    report = symmetries(net, example_input)
    spec, kept = residual(net, example_input)
    assert report.order == len(kept)
    assert report.is_asymmetric == (len(kept) == 1)
    assert generated(spec, [{**spec.identity(), **g} for g in report.generators]) == {key(e) for e in kept}
    for name, group in spec.groups.items():
        if group.block_of is None and name not in spec.blocks:
            assert report.groups[name].order == len({tuple(e[name].tolist()) for e in kept})
            orbits = {tuple(sorted({int(e[name][unit]) for e in kept})) for unit in range(group.size)}
            assert {tuple(orbit) for orbit in report.orbits[name]} == {o for o in orbits if len(o) > 1}
            assert report.groups[name].moved == sum(len(o) for o in orbits if len(o) > 1)
    return report


def draw_constants(data, layer, values):
    """Draw a mask with as many fixed entries in each row as the layer has, and constants from a small set."""
    mask = torch.ones_like(layer.mask)
    for row in mask:
        row[data.draw(st.permutations(range(len(row))))[: layer.n_fix]] = False
    size = layer.weight[0].numel()
    drawn = data.draw(st.lists(st.sampled_from(values), min_size=len(mask) * size, max_size=len(mask) * size))
    set_constants(layer, mask, drawn)


def draw_asymmetric(data, net, values, layout="entries", skip=()):
    """Make some layers of a network asymmetric, with random constants that need not be distinct."""
    layers = {n: m for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and n not in skip}
    overrides = {}
    for name, layer in layers.items():
        rows = layer.weight.shape[0] // getattr(layer, "groups", 1)
        units = layer.weight.shape[1] if layout == "filters" else layer.weight[0].numel()
        fits = [n for n in range(1, units) if math.comb(units, n) >= rows]
        if fits and data.draw(st.booleans()):
            overrides[name] = {"n_fix": data.draw(st.sampled_from(fits))}
    if not overrides:
        return net
    left = [name for name in layers if name not in overrides]
    net = asymmetrize(net, "w", kappa=1.0, layout=layout, skip=[*left, *skip], overrides=overrides)
    for module in net.modules():
        if isinstance(module, AsymmetricLayer):
            draw_constants(data, module, values)
    return net


def test_a_plain_mlp_has_every_permutation():
    report = assert_agrees(mlp(3, 4, 3, 2), torch.zeros(1, 3, dtype=torch.float64))
    assert report.order == math.factorial(4) * math.factorial(3)
    assert not report.is_asymmetric
    assert {g.order for g in report.groups.values()} == {g.plain_order for g in report.groups.values()} == {24, 6}
    assert report.log10_order == pytest.approx(math.log10(144))
    assert {g.reason for g in report.groups.values()} == {"no constants on its units"}


@pytest.mark.parametrize("kappa", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_w_asymmetric_mlp_has_none(kappa, seed):
    net = asymmetrize(mlp(4, 5, 4, 3), "w", n_fix=2, kappa=kappa, seed=seed)
    report = assert_agrees(net, torch.zeros(1, 4, dtype=torch.float64))
    assert report.is_asymmetric
    assert report.generators == []
    expected = "masks distinct (Theorem 3)" if kappa == 0 else "constants distinct"
    assert {group.reason for group in report.groups.values()} == {expected}


@pytest.mark.parametrize("seed", range(3))
def test_a_sigma_asymmetric_mlp_has_none(seed):
    net = asymmetrize(mlp(4, 5, 4, 3), "sigma", seed=seed, example_input=torch.zeros(1, 4, dtype=torch.float64))
    report = assert_agrees(net, torch.zeros(1, 4, dtype=torch.float64))
    assert report.is_asymmetric
    assert all("Proposition 4" in group.reason for group in report.groups.values())


@MANY
@given(data=st.data())
def test_any_masks_and_constants_of_an_mlp(data):
    widths = data.draw(st.lists(st.integers(2, 4), min_size=3, max_size=4))
    values = data.draw(st.sampled_from([[0.0], [0.0, 1.0], [1.0], [1.0, 2.0]]))
    net = draw_asymmetric(data, mlp(*widths), values)
    x = torch.randn(3, widths[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = assert_agrees(net, x)
    for generator in report.generators:
        assert_kept(net, report.spec, generator, (x,))


@MANY
@given(data=st.data())
def test_any_gates(data):
    widths = data.draw(st.lists(st.integers(2, 4), min_size=3, max_size=4))
    net = asymmetrize(mlp(*widths), "sigma", example_input=torch.zeros(1, widths[0], dtype=torch.float64))
    for module in net.modules():
        if isinstance(module, FiGLU):
            n = module.dim**2
            entries = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=n, max_size=n))
            module.fixed.copy_(torch.tensor(entries).view(module.dim, -1))
    x = torch.randn(3, widths[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = assert_agrees(net, x)
    for generator in report.generators:
        assert_kept(net, report.spec, generator, (x,))


def test_two_units_that_are_alike():
    net = asymmetrize(mlp(4, 5, 4, 3), "w", n_fix=2, kappa=1.0)
    first, second, _ = net.linears
    mask, values = first.mask.clone(), first.canonical_weight().detach()
    mask[3], values[3] = mask[1], values[1]
    set_constants(first, mask, values)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert assert_agrees(net, x).is_asymmetric  # the columns of the next layer still differ
    mask = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 0, 1, 1], [0, 1, 0, 1, 1], [1, 0, 1, 0, 1]]).bool()
    values = torch.arange(20.0).view(4, 5) * ~mask
    set_constants(second, mask, values)
    assert assert_agrees(net, x).is_asymmetric  # now the masks agree, but not the constants
    values[:, 3] = values[:, 1]
    set_constants(second, mask, values)
    report = assert_agrees(net, x)
    assert report.order == 2
    assert report.orbits == {"linears.0": [[1, 3]], "linears.1": []}
    assert report.groups["linears.0"].order == 2 and report.groups["linears.1"].is_trivial
    (generator,) = report.generators
    assert list(generator) == ["linears.0"]
    assert generator["linears.0"].tolist() == [0, 3, 2, 1, 4]
    assert_kept(net, report.spec, generator, (x,))
    assert "linears.0  5      120    2" in str(report)


def test_groups_that_only_move_together():
    """Unit i of the second layer is fixed on unit i of the first: one permutation moves both."""
    net = asymmetrize(mlp(3, 4, 4, 2), "w", n_fix=1, kappa=0.0, skip=["linears.0", "linears.2"])
    set_constants(net.linears[1], ~torch.eye(4, dtype=torch.bool), torch.zeros(4, 4))
    report = assert_agrees(net, torch.randn(2, 3, dtype=torch.float64))
    assert report.order == 24
    assert [group.order for group in report.groups.values()] == [24, 24]
    assert report.groups["linears.0"].reason == "its constants tell no unit from another"


def test_groups_that_are_partly_free():
    """24 ways to order the second layer, each with 2^4 for the twins that stand before its units."""
    net = asymmetrize(mlp(3, 8, 4, 2), "w", n_fix=2, kappa=0.0, skip=["linears.0", "linears.2"])
    set_constants(net.linears[1], ~torch.eye(4, dtype=torch.bool).repeat_interleave(2, 1), torch.zeros(4, 8))
    report = symmetries(net, torch.zeros(1, 3, dtype=torch.float64))
    assert report.order == 24 * 2**4
    assert report.groups["linears.0"].order == 24 * 2**4
    assert report.groups["linears.1"].order == 24


def conv_net(data, layout):
    net = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 2)
    ).double()
    return draw_asymmetric(data, net, data.draw(st.sampled_from([[0.0], [1.0, 2.0]])), layout)


@MANY
@given(data=st.data(), layout=st.sampled_from(["entries", "filters"]))
def test_convolutions_and_flattening(data, layout):
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = conv_net(data, layout)
    report = assert_agrees(net, x)
    for generator in report.generators:
        assert_kept(net, report.spec, generator, (x,))


def test_a_kernel_counts_position_by_position():
    net = asymmetrize(
        nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1)).double(), n_fix=1, kappa=0.0, skip=["2"]
    )
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[[0, 1, 2], [0, 3, 3]] = False
    set_constants(net[0], mask, torch.zeros(3, 4))
    report = assert_agrees(net, torch.zeros(1, 1, 3, 3, dtype=torch.float64))
    assert report.orbits == {"0": [[1, 2]]}


def concatenated(net, x):
    h = torch.relu(net.a(x))
    return net.c(torch.cat([h, torch.relu(net.b(x)), h, x], 1))


def crossed(net, x):
    first, second = torch.relu(net.a(x)), torch.relu(net.b(x))
    return net.c((first.unsqueeze(2) * second.unsqueeze(1)).flatten(1))


def residual_stream(net, x):
    h = torch.relu(net.a(x))
    h = h + torch.relu(net.b(h))
    return net.c(h)


def trilinear(net, x):
    a, b = torch.relu(net.a(x)), torch.relu(net.b(x))
    return net.c(torch.relu(a @ net.w.t() + b))


def heads(net, x):
    """Attention of two heads with two query and two value units each."""
    q, k, v = (layer(x).view(*x.shape[:2], 2, 2).transpose(1, 2) for layer in (net.q, net.k, net.v))
    mixed = torch.softmax(q @ k.transpose(2, 3), -1) @ v
    return net.out(mixed.transpose(1, 2).flatten(2))


def linear(n, m):
    return nn.Linear(n, m)


NETS = {
    "concatenated": lambda: (Net(concatenated, a=linear(2, 3), b=linear(2, 2), c=linear(10, 2)), (2, 2)),
    "crossed": lambda: (Net(crossed, a=linear(2, 3), b=linear(2, 2), c=linear(6, 2)), (2, 2)),
    "residual": lambda: (Net(residual_stream, a=linear(2, 4), b=linear(4, 4), c=linear(4, 2)), (2, 2)),
    "shared": lambda: (nn.Sequential(linear(2, 4), nn.Tanh(), *[linear(4, 4), nn.Tanh()] * 2, linear(4, 2)), (2, 2)),
    "heads": lambda: (
        Net(heads, q=linear(4, 4), k=linear(4, 4), v=linear(4, 4), out=linear(4, 3)),
        (2, 3, 4),
    ),
    "grouped": lambda: (
        nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 1, 1)),
        (1, 1, 2, 2),
    ),
    "depthwise": lambda: (
        nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 2, groups=3), nn.ReLU(), nn.Conv2d(3, 1, 1)),
        (1, 1, 2, 2),
    ),
}


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_other_networks(name, data):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, shape = NETS[name]()
        net = net.double()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = draw_asymmetric(data, net, data.draw(st.sampled_from([[0.0], [1.0, 2.0]])))
    report = assert_agrees(net, x)
    for generator in report.generators[:4]:
        assert_kept(net, report.spec, generator, (x,))


@pytest.mark.parametrize("name", NETS)
def test_other_plain_networks_have_the_whole_group(name):
    net, shape = NETS[name]()
    report = symmetries(net, torch.zeros(*shape))
    assert report.order == sum(1 for _ in elements(report.spec)) > 1


def test_heads_that_are_alike_can_be_exchanged():
    net, shape = NETS["heads"]()
    net = asymmetrize(net.double(), "w", n_fix=1, kappa=1.0, skip=["q", "k", "out"])
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1]]).bool()
    set_constants(net.v, mask, torch.ones(4, 4))
    report = assert_agrees(net, torch.randn(*shape, dtype=torch.float64))
    assert report.order == 2 * 2**2  # the heads, and the query units in each; the value units follow the heads
    (family,) = report.groups.values()
    assert (family.size, family.order, family.plain_order) == (2, 8, 2 * 2**4)


def test_constants_of_three_axes():
    """A tensor of constants whose three axes all move, which no layer of the library has."""
    from lightning_symmetry.surgery import HasConstants

    class Trilinear(nn.Module, HasConstants):
        def __init__(self, entries):
            super().__init__()
            self.register_buffer("fixed", entries)

        def constants(self):
            return {"fixed": self.fixed}

        num_fixed = 0

        def forward(self, a, b):
            return torch.einsum("ni,nj,ijk->nk", a, b, self.fixed)

    def function(net, x):
        return net.out(torch.tanh(net.mix(torch.tanh(net.a(x)), torch.tanh(net.b(x)))))

    x = torch.randn(2, 2, dtype=torch.float64)
    orders = set()
    for seed in range(12):
        entries = (torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(seed)) < 0.15).double()
        net = Net(function, a=linear(2, 3), b=linear(2, 2), mix=Trilinear(entries), out=linear(3, 1)).double()
        orders.add(assert_agrees(net, x).order)
    assert len(orders) > 1
    entries = torch.ones(3, 2, 3, dtype=torch.float64)
    net = Net(function, a=linear(2, 3), b=linear(2, 2), mix=Trilinear(entries), out=linear(3, 1)).double()
    assert assert_agrees(net, x).order == 72


def test_constants_of_an_unknown_kind_freeze_their_layer():
    from lightning_symmetry.surgery import HasConstants, ReparametrizedLayer

    class Shifted(ReparametrizedLayer, HasConstants):
        def __init__(self, n, m):
            super().__init__()
            self.layer = linear(n, m)
            self.register_buffer("fixed", torch.randn(m, n))

        def constants(self):
            return {"fixed": self.fixed}

        num_fixed = 0

        def canonical_weight(self):
            return self.layer.weight + self.fixed

        def to_layer(self):
            layer = copy.deepcopy(self.layer)
            with torch.no_grad():
                layer.weight.copy_(self.canonical_weight())
            return layer

        def forward(self, x):
            return nn.functional.linear(x, self.canonical_weight(), self.layer.bias)

    net = nn.Sequential(linear(2, 3), nn.ReLU(), Shifted(3, 3), nn.ReLU(), linear(3, 4), nn.ReLU(), linear(4, 1))
    report = symmetries(net, torch.zeros(1, 2))
    assert {name: group.order for name, group in report.groups.items()} == {"4": 24}


def test_resnet20():
    net = ResNet20()
    plain = symmetries(net)
    sizes = [16] * 4 + [32] * 4 + [64] * 4
    assert plain.order == math.prod(map(math.factorial, sizes))
    assert [group.size for group in plain.groups.values()] == sizes
    for kappa in (0.0, 2.0):
        assert symmetries(asymmetrize(copy.deepcopy(net), preset="resnet20", kappa=kappa)).is_asymmetric
    assert symmetries(asymmetrize(copy.deepcopy(net), "sigma")).is_asymmetric


def test_resnet20_with_two_channels_alike():
    net = asymmetrize(ResNet20(norm="batch"), preset="resnet20", skip=["stage1.0.conv2"]).double().eval()
    layer = net.stage1[0].conv1
    mask, values = layer.mask.clone(), layer.canonical_weight().detach().flatten(1)
    mask[[7, 11]], values[[7, 11]] = mask[2].clone(), values[2].clone()
    set_constants(layer, mask, values)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    report = symmetries(net, x)
    assert report.order == 6
    assert {name: o for name, o in report.orbits.items() if o} == {"stage1.0.conv1": [[2, 7, 11]]}
    for generator in report.generators:
        assert_kept(net, report.spec, generator, (x,))


def test_gnn():
    x, edges = torch.randn(4, 6), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    net = GNN(6, 3, 5)
    assert symmetries(net, (x, edges)).order == 120**3
    for preset in ("gnn", "gnn-sigma"):
        changes = {"n_fix": 2} if preset == "gnn" else {}
        assert symmetries(asymmetrize(copy.deepcopy(net), preset=preset, **changes), (x, edges)).is_asymmetric
    only_last = asymmetrize(copy.deepcopy(net), n_fix=2, skip=["linears.0", "linears.1", "linears.2"])
    report = symmetries(only_last, (x, edges))
    assert report.groups["linears.0"].order == report.groups["linears.1"].order == 120
    assert report.order == 120**2 * report.groups["linears.2"].order


def test_filters_of_a_convolutional_network():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        linear(8, 2),
    )
    asymmetrize(net, layout="filters", n_fix=2, kappa=0.0, overrides={"0": {"layout": "entries", "n_fix": 4}})
    report = symmetries(net, torch.zeros(1, 3, 8, 8))
    assert report.is_asymmetric
    assert {group.reason for group in report.groups.values()} == {"masks distinct (Theorem 3)"}
    # With the masks of the first layer alike, only the columns of the second can tell its channels apart.
    set_constants(net[0], net[0].mask[:1].repeat(8, 1), torch.zeros(8, 27))
    reasons = {group.reason for group in symmetries(net, torch.zeros(1, 3, 8, 8)).groups.values()}
    assert not any("Theorem 3" in reason for reason in reasons)


def test_the_paper_mlp_with_twins():
    """Large networks are decided as well: a whole layer without constants between two with some."""
    net = asymmetrize(MLP(784, (512, 512, 512), 10), preset="mlp")
    assert symmetries(net).is_asymmetric
    net = asymmetrize(MLP(784, (512, 512, 512), 10), preset="mlp", skip=["linears.0", "linears.1"])
    report = symmetries(net)
    assert report.groups["linears.0"].order == math.factorial(512)
    assert report.order == math.factorial(512)
    assert "10^1166.5" in str(report)


def test_the_network_is_left_as_it_was():
    net = asymmetrize(MLP(4, (3,), 2), n_fix=1).train()
    before = copy.deepcopy(net.state_dict())
    state = torch.random.get_rng_state()
    symmetries(net)
    assert net.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_errors():
    with pytest.raises(ValueError, match="has no `example_input_array`"):
        symmetries(linear(2, 2))
    with pytest.raises(ValueError, match="cannot be called with the example input"):
        symmetries(mlp(3, 2, 2), torch.zeros(1, 5, dtype=torch.float64))


def test_a_network_without_units():
    report = symmetries(nn.Sequential(linear(2, 3)), torch.zeros(1, 2))
    assert report.is_asymmetric and report.groups == {}
    assert "none but the identity, in 0 groups" in str(report)


def test_what_cannot_be_seen_through_is_noted():
    def function(net, x):
        return net.b(torch.linalg.qr(torch.tanh(net.a(x)))[0])

    report = symmetries(Net(function, a=linear(2, 3), b=linear(3, 2)), torch.zeros(3, 2))
    assert report.notes == {"no rule for linalg_qr, symmetries behind it are not seen": ["the network itself"]}
    assert "linalg_qr" in str(report)
