"""Points between two networks against loops over state dicts in float64."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_symmetry import GNN, MLP, AsymmetricLinear, FiGLU, asymmetrize, interpolate, parameter_distance
from lightning_symmetry.landscape import Segment
from lightning_symmetry.surgery import ReparametrizedLayer

ALPHAS = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, -0.5, 1.5]


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def mlp() -> MLP:
    return MLP(6, (8, 8), 4)


class Factorised(ReparametrizedLayer):
    """A linear map ``U V``: its canonical weight is not affine in the parameters."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(rows, rank))
        self.right = nn.Parameter(torch.randn(rank, columns))

    def canonical_weight(self) -> Tensor:
        return self.left @ self.right

    def to_layer(self) -> nn.Linear:
        layer = nn.Linear(self.right.shape[1], self.left.shape[0], bias=False)
        with torch.no_grad():
            layer.weight.copy_(self.canonical_weight())
        return layer

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.linear(input, self.right), self.left)


class Tied(nn.Module):
    """An autoencoder whose decoder shares the encoder's weight."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        if tie:
            self.decoder.weight = self.encoder.weight


class Masked(nn.Module):
    """A layer with a constant buffer of infinities, as causal attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))


def w_mlp() -> MLP:
    return asymmetrize(mlp(), n_fix=2, kappa=1.5, seed=3)


def sigma_mlp() -> MLP:
    return asymmetrize(mlp(), "sigma", seed=3)


CASES = {
    "mlp": mlp,
    "convnet with batch norm": convnet,
    "gnn": lambda: GNN(5, 3, hidden=8),
    "w": w_mlp,
    "sigma": sigma_mlp,
    "w with filters": lambda: asymmetrize(
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)), n_fix=2, kappa=0.5, layout="filters"
    ),
    "tied": Tied,
    "constant infinities": Masked,
}


def pair(build) -> tuple[nn.Module, nn.Module]:
    """Two networks that differ in every parameter and running statistic."""
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = build()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in net.named_buffers():
                if "running" in name:
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
                if "num_batches" in name:
                    buffer.fill_(5 + seed)
        nets.append(net)
    return nets[0], nets[1]


def reference(a: dict[str, Tensor], b: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The definition, entry by entry in float64."""
    point = {}
    for name, tensor in a.items():
        if torch.equal(tensor, b[name]) or not tensor.is_floating_point():
            point[name] = tensor if alpha < 0.5 else b[name]
        else:
            point[name] = ((1 - alpha) * tensor.double() + alpha * b[name].double()).to(tensor.dtype)
    return point


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
@pytest.mark.parametrize("form", ["networks", "state dicts"])
def test_interpolate_matches_a_loop_in_float64(build, alpha, form):
    a, b = pair(build)
    ours, theirs = a.state_dict(), b.state_dict()
    point = interpolate(a, b, alpha).state_dict() if form == "networks" else interpolate(ours, theirs, alpha)
    expected = reference(ours, theirs, alpha)
    assert point.keys() == expected.keys()
    for name, value in expected.items():
        assert point[name].dtype == value.dtype
        torch.testing.assert_close(point[name], value, rtol=4e-7, atol=2e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
@pytest.mark.parametrize("form", ["networks", "state dicts"])
def test_ends_are_bitwise_exact(build, form):
    a, b = pair(build)
    for alpha, end in ((0, a), (1, b)):
        if form == "networks":
            point = interpolate(a, b, alpha).state_dict()
        else:
            point = interpolate(a.state_dict(), b.state_dict(), alpha)
        assert all(torch.equal(point[name], value) for name, value in end.state_dict().items())


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_networks_are_left_as_they_are(build):
    a, b = pair(build)
    a.train(), b.eval()
    before = [copy.deepcopy(net.state_dict()) for net in (a, b)]
    point = interpolate(a, b, 0.3)
    with torch.no_grad():
        for parameter in point.parameters():
            parameter.zero_()
    for net, state in zip((a, b), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert a.training and not b.training


def test_state_dict_form_returns_new_tensors():
    a, b = (net.state_dict() for net in pair(w_mlp))
    for alpha in (0, 0.5, 1):
        point = interpolate(a, b, alpha)
        pointers = {tensor.data_ptr() for tensor in (*a.values(), *b.values())}
        assert not pointers & {tensor.data_ptr() for tensor in point.values()}


def test_integer_buffers_are_those_of_the_nearer_end():
    a, b = pair(convnet)
    for alpha, count in ((0, 5), (0.49, 5), (0.5, 6), (1, 6)):
        assert interpolate(a, b, alpha)[1].num_batches_tracked.item() == count


@given(st.floats(-1, 2))
@settings(deadline=None, max_examples=30)
def test_constants_are_exact_everywhere(alpha):
    a, b = pair(w_mlp)
    constants = {name: layer.fixed for name, layer in a.named_modules() if isinstance(layer, AsymmetricLinear)}
    point = interpolate(a, b, alpha)
    for name, fixed in constants.items():
        layer = point.get_submodule(name)
        assert torch.equal(layer.canonical_weight()[~layer.trainable_entries()], fixed.flatten())
    state = interpolate(a.state_dict(), b.state_dict(), alpha)
    for name, fixed in constants.items():
        entries = ~a.get_submodule(name).trainable_entries()
        assert torch.equal(state[f"{name}.weight"][entries], fixed.flatten())


def test_constants_are_exact_after_weight_decay_moved_the_raw_entries():
    a, b = pair(w_mlp)
    for net, steps in ((a, 3), (b, 7)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
    layer = a.linears[1]
    assert not torch.equal(layer.weight.data[~layer.trainable_entries()], layer.fixed.flatten())  # they did move
    x = torch.randn(3, 6)
    for alpha in (0, 0.3, 1):
        point = interpolate(a, b, alpha)
        found = point.linears[1].canonical_weight()[~layer.trainable_entries()]
        assert torch.equal(found, layer.fixed.flatten())
        plain = mlp()
        expected = reference(a.state_dict(), b.state_dict(), alpha)
        plain.load_state_dict({name: value for name, value in expected.items() if name in plain.state_dict()})
        torch.testing.assert_close(point(x), plain(x), rtol=1e-5, atol=1e-5)


def test_tied_parameters_stay_tied():
    point = interpolate(*pair(Tied), 0.5)
    assert point.decoder.weight is point.encoder.weight


def test_infinite_entries_that_agree_are_kept():
    a, b = pair(Masked)
    for point in (interpolate(a, b, 0.5).state_dict(), interpolate(a.state_dict(), b.state_dict(), 0.5)):
        assert torch.equal(point["causal"], a.causal)


def test_the_result_has_the_dtype_of_the_first_network():
    a, b = pair(mlp)
    assert {p.dtype for p in interpolate(a.double(), b, 0.25).parameters()} == {torch.float64}
    a, b = pair(mlp)
    half = copy.deepcopy(b).bfloat16()
    point = interpolate(a, half, 1)
    assert torch.equal(point.linears[0].weight, half.linears[0].weight.float())


def test_segment_moves_one_network_and_can_go_back():
    a, b = pair(convnet)
    segment = Segment(a, b)
    for alpha in (0.7, 1.0, 0.2, 0.0):
        point = segment.move_to(alpha)
        assert point is segment.point
        expected = interpolate(a, b, alpha).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in point.state_dict().items())


def test_layers_in_other_coordinates_enter_by_their_canonical_weight():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), Factorised(4, 4, 2))

    a, b = pair(build)
    point = interpolate(a, b, 0.25)
    expected = 0.75 * a[1].canonical_weight().double() + 0.25 * b[1].canonical_weight().double()
    torch.testing.assert_close(point[1].weight.double(), expected, rtol=1e-6, atol=1e-6)
    assert isinstance(a[1], Factorised)
    factors = 0.75 * a[1].left + 0.25 * b[1].left
    assert not torch.allclose(factors @ (0.75 * a[1].right + 0.25 * b[1].right), expected.float(), atol=1e-3)


def test_the_same_map_in_other_factors_is_the_same_point():
    torch.manual_seed(0)
    a = nn.Sequential(Factorised(4, 4, 2))
    b = copy.deepcopy(a)
    turn = torch.linalg.qr(torch.randn(2, 2))[0]
    with torch.no_grad():
        b[0].left.copy_(a[0].left @ turn)
        b[0].right.copy_(turn.T @ a[0].right)
    torch.testing.assert_close(interpolate(a, b, 0.5)[0].weight, a[0].canonical_weight())
    assert parameter_distance(a, b, per_parameter=False) < 1e-5
    plain = nn.Sequential(a[0].to_layer())
    assert parameter_distance(a, plain) == 0


REFUSED = {
    "depth": (mlp, lambda: MLP(6, (8, 8, 8), 4), r"b has linears\.3\.weight, .* a does not"),
    "norm": (mlp, lambda: MLP(6, (8, 8), 4, norm=False), r"a has norms\.0\.weight, .* and 1 more, b does not"),
    "width": (mlp, lambda: MLP(6, (8, 9), 4), r"linears\.1\.weight has shape \(8, 8\) in a and \(9, 8\) in b"),
    "masks": (
        w_mlp,
        lambda: asymmetrize(mlp(), n_fix=2, kappa=1.5, seed=4),
        r"different masks: linears\.0\.mask of a and linears\.0\.mask of b",
    ),
    "number of fixed entries": (
        w_mlp,
        lambda: asymmetrize(mlp(), n_fix=3, kappa=1.5, seed=3),
        r"different masks: linears\.0\.mask of a and linears\.0\.mask of b",
    ),
    "constants": (
        w_mlp,
        lambda: asymmetrize(mlp(), n_fix=2, kappa=1.0, seed=3),
        r"different constants: linears\.0\.fixed of a and linears\.0\.fixed of b",
    ),
    "gates": (sigma_mlp, lambda: asymmetrize(mlp(), "sigma", seed=4), r"different constants: activations\.0\.fixed"),
    "plain b": (w_mlp, mlp, r"a has linears\.0\.(mask|fixed).* b does not"),
    "plain a": (mlp, w_mlp, r"b has linears\.0\.(mask|fixed).* a does not"),
    "w and sigma": (w_mlp, sigma_mlp, r"a has linears\.0\.(mask|fixed).* b does not"),
    "tied and not": (Tied, lambda: Tied(tie=False), r"b has decoder\.weight, a does not"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_interpolated_is_refused_with_both_sides_named(case):
    first, second, message = case
    a, b = first(), second()
    for refusing in (lambda: interpolate(a, b, 0.5), lambda: parameter_distance(a, b), lambda: Segment(a, b)):
        with pytest.raises(ValueError, match=message):
            refusing()


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "tied and not"])
def test_state_dicts_are_refused_as_networks_are(name):
    first, second, _ = REFUSED[name]
    with pytest.raises(ValueError, match=r"\ba\b.*\bb\b|\bb\b.*\ba\b"):
        interpolate(first().state_dict(), second().state_dict(), 0.5)


def test_a_network_and_a_state_dict_do_not_mix():
    net = mlp()
    with pytest.raises(TypeError, match="MLP and OrderedDict"):
        interpolate(net, net.state_dict(), 0.5)


def test_distance_in_closed_form():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    with torch.no_grad():
        for net, value in ((a, 1.0), (b, 3.0)):
            for parameter in net.parameters():
                parameter.fill_(value)
    assert parameter_distance(a, b, per_parameter=False) == pytest.approx((8 * 4) ** 0.5)
    assert parameter_distance(a, b) == pytest.approx((8 * 4) ** 0.5 / 8)
    assert parameter_distance(a, a) == 0


def test_distance_counts_trainable_entries():
    torch.manual_seed(0)
    a = nn.Sequential(AsymmetricLinear(6, 5, n_fix=2, kappa=2.0), nn.Linear(5, 2))
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].weight.add_(1)  # 4 of 6 entries in each of 5 rows are trainable
    assert parameter_distance(a, b, per_parameter=False) == pytest.approx(20**0.5, rel=1e-6)
    assert parameter_distance(a, b) == pytest.approx(20**0.5 / (20 + 5 + 12), rel=1e-6)


def test_distance_ignores_buffers_and_is_symmetric():
    a, b = pair(convnet)
    square = sum(
        (x.double() - y.double()).square().sum().item() for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )
    count = sum(p.numel() for p in a.parameters())
    assert parameter_distance(a, b) == pytest.approx(square**0.5 / count, rel=1e-12)
    assert parameter_distance(a, b) == parameter_distance(b, a)


def test_figlu_gates_do_not_count():
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 4), FiGLU(4))
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].bias.add_(1)
    assert parameter_distance(a, b) == pytest.approx(2 / 20, rel=1e-6)
