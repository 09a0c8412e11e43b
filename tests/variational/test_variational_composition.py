"""Variational networks beside the other rooms: fixed entries, other conversions, measures, all networks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch_geometric.nn
from torch import nn
from torch.func import functional_call

from lightning_symmetry import (
    GNN,
    MLP,
    VGG,
    Autoencoder,
    ConvNet,
    TransformerLM,
    WideResNet,
    align,
    asymmetrize,
    evaluate_path,
    factorize,
    fixed_fraction,
    interpolate,
    num_trainable,
    parameter_distance,
    symmetries,
    trace_permutations,
    whiten,
)
from lightning_symmetry.surgery import constants_of
from lightning_symmetry.variational import (
    kl_divergence,
    sample_network,
    sampling_mode,
    to_mean,
    to_variational,
    variational_layers,
)


def plain(seed=0):
    torch.manual_seed(seed)
    return MLP(12, (16, 16), 5)


def asymmetric(seed=0, constants=0):
    return asymmetrize(plain(seed), n_fix=3, kappa=0.5, seed=constants)


def inputs():
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(3))


VERBS = {
    "asymmetrize": (asymmetrize, "asymmetry_report"),
    "factorize": (lambda net: factorize(net, 4), "factorization_report"),
    "whiten": (whiten, "whitening_report"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_other_conversions_leave_variational_layers_alone(verb):
    convert, report = VERBS[verb]
    reason = "VariationalLinear holds its weight in other coordinates"
    pattern = rf"found nothing to convert in MLP.(.|\n)*linears.1.*{reason}"
    for net in (plain(), asymmetric()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=pattern):
                convert(to_variational(net))
    net = to_variational(plain(), skip=["linears.0"])
    with pytest.warns(UserWarning, match=rf"left 2 layer\(s\) alone: linears.1 \({reason}\)"):
        convert(net)
    assert list(getattr(net, report).left_alone) == ["linears.1", "linears.2"]
    assert list(variational_layers(net)) == ["linears.1", "linears.2"]


@pytest.mark.parametrize("settings", [{"rank": 0}, {"rank": 3}, {"rank": 2, "diagonal": "learned"}], ids=str)
def test_fixed_entries_are_counted_in_mean_and_covariance(settings):
    net = to_variational(asymmetric(), **settings)
    sizes = [p.numel() for p in net.parameters()]
    net(inputs()).square().sum().backward()
    kl_divergence(net).backward()
    used = sum(int(p.grad.count_nonzero()) for p in net.parameters())  # fixed entries have no gradient
    assert num_trainable(net) == used < sum(sizes)
    assert fixed_fraction(net) == pytest.approx(1 - used / sum(sizes))


def test_constants_are_known():
    net = asymmetric()
    expected = {name: value.clone() for name, value in constants_of(net).items()}
    fixed = [layer.num_fixed for layer in net.linears]
    to_variational(net)
    found = constants_of(net)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [layer.num_fixed for layer in net.linears] == fixed
    padded = to_variational(nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 2)))
    assert constants_of(padded) == {}
    assert padded[0].num_fixed == padded[1].num_fixed == 0


@pytest.mark.parametrize("kind", [plain, asymmetric])
def test_the_means_are_interpolated(kind):
    a, b = kind(0), kind(1)
    ends = interpolate(a, b, 0.3)
    expected, distance = ends(inputs()), parameter_distance(a, b)
    middle = evaluate_path(a, b, [(inputs(), torch.arange(6) % 5)], alphas=3, progress=False).loss
    to_variational(a), to_variational(b)
    assert parameter_distance(a, b) == pytest.approx(distance, rel=1e-6)
    between = interpolate(a, b, 0.3)
    torch.testing.assert_close(between(inputs()), expected)
    assert torch.equal(between(inputs()), between(inputs()))
    found = evaluate_path(a, b, [(inputs(), torch.arange(6) % 5)], alphas=3, progress=False).loss
    torch.testing.assert_close(found, middle)


@pytest.mark.parametrize("measure", [lambda a, b: interpolate(a, b, 0.5), parameter_distance], ids=["path", "distance"])
def test_networks_of_different_constants_are_not_interpolated(measure):
    a, b = to_variational(asymmetric(0, 0)), to_variational(asymmetric(1, 1))
    for other in (b, asymmetric(1, 1)):
        with pytest.raises(ValueError, match=r"different masks: linears.0.mask of a and linears.0.mask of b"):
            measure(a, other)
    with pytest.raises(ValueError, match="Only one of them is asymmetric"):
        measure(a, to_variational(plain()))
    with pytest.raises(ValueError, match=r"different (masks|constants)"):
        interpolate(a.state_dict(), b.state_dict(), 0.5)


@pytest.mark.parametrize("kind", [plain, asymmetric])
def test_symmetries_are_those_of_the_mean(kind):
    net = kind()
    expected = str(symmetries(net, inputs()))
    assert str(symmetries(to_variational(net), inputs())) == expected


def test_networks_are_aligned_by_their_means():
    a, b = to_variational(plain(0)), to_variational(plain(1))
    assert not trace_permutations(a, inputs()).groups
    with pytest.raises(ValueError, match="Nothing can be permuted"):
        align(b, to=a, example_input=inputs())
    with pytest.raises(ValueError, match="have fixed entries"):
        align(to_variational(asymmetric(1)), to=to_variational(asymmetric(0)), example_input=inputs())
    to_mean(a), to_mean(b)
    assert align(b, to=a, example_input=inputs()).permutations


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch_geometric.nn.GCNConv(8, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        return self.head(self.conv(x, edge_index).relu())


EDGES = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
NETWORKS = {
    "language model": (lambda: TransformerLM(50, 16, 32, 2, 2), (torch.arange(21).view(3, 7),), 13),
    "untied": (lambda: TransformerLM(50, 16, 32, 2, 2, tied=False), (torch.arange(21).view(3, 7),), 15),
    "autoencoder": (lambda: Autoencoder(24, (16, 4)), (torch.rand(3, 24),), 4),
    "VGG": (lambda: VGG(8), (torch.randn(2, 3, 16, 16),), 8),
    "wide ResNet": (lambda: WideResNet(10, 1), (torch.randn(2, 3, 16, 16),), 10),
    "ConvNet": (lambda: ConvNet(), (torch.randn(2, 1, 8, 8),), 4),
    "GNN": (lambda: GNN(8, 3, 8), (torch.randn(5, 8), EDGES), 4),
    "torch-geometric": (Graph, (torch.randn(5, 8), EDGES), 1),
    "asymmetric graph": (lambda: asymmetrize(Graph(), n_fix=2, kappa=0.5), (torch.randn(5, 8), EDGES), 1),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("case", NETWORKS)
def test_networks(case):
    make, x, converted = NETWORKS[case]
    torch.manual_seed(0)
    net = make().eval()
    expected, state = net(*x), copy.deepcopy(net.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_variational(net, 2)
    report = net.variational_report
    assert len(report.changed) == converted
    if report.left_alone:
        assert all(name in str(caught[0].message) for name in report.left_alone)
        assert all("tied" in reason or "torch-geometric" in reason for reason in report.left_alone.values())
    for mode in ("local", "shared", "weight"):
        with sampling_mode(net, mode):
            net.zero_grad()
            (net(*x).square().mean() + kl_divergence(net) / 1e4).backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    net.load_state_dict(state)
    assert sample_network(net)(*x).shape == expected.shape
    with sampling_mode(net, "mean"):
        torch.testing.assert_close(net(*x), expected)
    assert torch.equal(to_mean(net)(*x), expected)
    assert list(net.state_dict()) == list(state)


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_fixed_entries_stay_fixed_in_training(optimizer):
    net = to_variational(asymmetric(), 2, diagonal="learned")
    kinds = {
        "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        "AdamW": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    }
    steps = kinds[optimizer](net.parameters())
    layers = list(net.linears)
    before = [layer.canonical_weight().detach()[~layer.mask] for layer in layers]
    for _ in range(5):
        steps.zero_grad()
        (net(inputs()).square().mean() + kl_divergence(net) / 100).backward()
        for layer in layers:
            for parameter in (layer.weight, layer.weight_factors, layer.weight_log_variance):
                assert not parameter.grad[..., ~layer.mask].any()
        steps.step()
    divergence = kl_divergence(net)
    for layer, constants in zip(layers, before, strict=True):
        assert torch.equal(layer.canonical_weight()[~layer.mask], constants)
        assert torch.equal(layer.sample()[0][~layer.mask], constants)
        assert not layer.weight_factors[:, ~layer.mask].any()
        with torch.no_grad():
            layer.weight_log_variance[~layer.mask] += 1
    assert torch.equal(kl_divergence(net), divergence)
    for layer, constants in zip(to_mean(net).linears, before, strict=True):
        assert torch.equal(layer.weight[~layer.mask], constants)


@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
def test_gradients_of_outputs(mode):
    """Against finite differences, with the noise held by the seed, for everything that a layer has."""
    torch.manual_seed(0)
    net = asymmetrize(nn.Sequential(nn.Conv2d(4, 6, 2, 2, 1, 1, 2, padding_mode="circular")), n_fix=2, kappa=0.5)
    net.double()
    layer = to_variational(net, 3, diagonal="learned", variance=0.1, mode=mode)[0]
    names = dict(layer.named_parameters())

    def output(x, *values):
        torch.manual_seed(1)
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(2, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(output, (x, *names.values()))
