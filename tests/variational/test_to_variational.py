"""``to_variational``: settings, what it leaves alone, errors, and whole networks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch_geometric.nn
import torchvision
from layer_contract import Shared, Special
from torch import nn
from variational_cases import images, small_network

from lightning_symmetry import MLP, AsymmetricLinear, ResNet20, asymmetrize, factorize, whiten
from lightning_symmetry.variational import (
    Posterior,
    VariationalConv2d,
    VariationalEmbedding,
    VariationalLayer,
    VariationalLinear,
    check_finite,
    kl_divergence,
    optimal_prior_variances,
    sample_network,
    sampling_mode,
    to_mean,
    to_variational,
)


def test_the_paper_s_setting():
    net = to_variational(MLP(20, (16,) * 3, 5), prior="fan_in:100")
    report = net.variational_report
    assert report.changed == [f"linears.{i}" for i in range(4)]
    assert report.left_alone == {}
    layer = net.linears[1]
    assert (layer.posterior.rank, layer.posterior.diagonal, layer.mode) == (4, "constant", "local")
    assert layer.posterior.variance == math.exp(-10)
    assert layer.prior_variance == 100 / 16
    assert "rank 4, constant diagonal 4.54e-05, prior variance 6.25, 272 entries" in str(report)
    assert type(net.norms[0]) is nn.LayerNorm


def test_frozen_layers_are_reported():
    net = small_network()
    net[0].requires_grad_(False)
    rows = {row.name: row.detail for row in to_variational(net).variational_report.rows}
    assert [name for name, detail in rows.items() if "frozen" in detail] == ["0"]
    assert not any(p.requires_grad for p in net[0].parameters())


def test_priors():
    """N counts the inputs of an output in its group, those with fixed entries too."""
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 5))
    asymmetrize(net, n_fix=2, kappa=0.5, skip=["3"])
    net.append(nn.Embedding(3, 4))
    to_variational(net, prior="fan_in:100")
    assert [net[i].prior_variance for i in (0, 2, 3, 4)] == [100 / 18, 100 / 24, 100 / 5, 100]


def test_settings_of_single_layers():
    net = to_variational(
        small_network(),
        2,
        skip=["0"],
        overrides={"5": {"rank": 0, "diagonal": "learned"}, "7": {"prior": "optimal", "mode": "shared"}},
    )
    assert type(net[0]) is nn.Conv2d
    assert net.variational_report.left_alone == {"0": "skipped"}
    assert [net[i].posterior.rank for i in (3, 5, 7)] == [2, 0, 2]
    assert net[5].weight_factors is None
    assert torch.equal(net[5].weight_log_variance, torch.full((24, 128), -10.0))
    assert (net[7].prior_variance, net[7].mode) == (None, "shared")
    assert set(optimal_prior_variances(net)) == {"3", "5", "7"}
    with sampling_mode(net, "mean"):
        assert net[7].mode == "mean"
        assert torch.equal(net.eval()(images()), net(images()))
    assert [net[i].mode for i in (3, 5, 7)] == ["local", "local", "shared"]


class Leftovers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lazy, self.special, self.recurrent = nn.LazyLinear(4), Special(4, 4), nn.GRU(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.tied, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.other.weight = self.tied.weight
        self.hooked, self.limited = nn.Linear(4, 4), nn.Embedding(4, 4, max_norm=1.0)
        self.hooked.register_forward_hook(lambda *_: None)
        self.conv3d, self.graph = nn.Conv3d(2, 2, 1), torch_geometric.nn.Linear(4, 4)
        self.empty, self.broken, self.away = nn.Linear(0, 4), nn.Linear(4, 4), nn.Linear(4, 4, device="meta")
        nn.init.constant_(self.broken.weight, float("nan"))
        self.attention, self.whitened, self.good = nn.MultiheadAttention(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)
        whitened = whiten(nn.Sequential(self.whitened))
        self.whitened = whitened[0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_that_cannot_be_converted_are_named():
    net = Leftovers()
    with pytest.warns(UserWarning, match=r"to_variational left 16 layer\(s\) alone: .*special \(a subclass of Linear"):
        to_variational(net)
    assert net.variational_report.changed == ["good"]
    expected = {
        "lazy": "lazy",
        "special": "forward of its own",
        "recurrent": "not those of a linear layer",
        "normed": "parametrised",
        "tied": "tied to other",
        "other": "tied to tied",
        "hooked": "hooks",
        "limited": "max_norm",
        "conv3d": "not those",
        "graph": "torch-geometric's Linear",
        "empty": "is empty",
        "broken": "not finite",
        "away": "meta device",
        "attention": "not those of a linear layer",
        "attention.out_proj": "without calling it",
        "whitened": "unwhiten",
    }
    reasons = net.variational_report.left_alone
    assert reasons.keys() == expected.keys()
    for name, part in expected.items():
        assert part in reasons[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_variational(to_mean(net), skip=list(reasons))


ERRORS = {
    "rank": ({"rank": -1}, "`rank` to be an int of at least 0 .* but got -1"),
    "rank that is no int": ({"rank": 2.0}, "`rank` to be an int"),
    "variance": ({"variance": 0.0}, "`variance` to be positive and finite .* but got 0.0"),
    "negative variance": ({"variance": -10.0}, "a variance, not its logarithm"),
    "variance NaN": ({"variance": math.nan}, "`variance` to be positive"),
    "prior": ({"prior": -1.0}, "`prior` to be positive"),
    "prior NaN": ({"prior": math.nan}, "`prior` to be positive"),
    "prior's name": ({"prior": "fan_out"}, "'fan_in', 'fan_in:100' or 'optimal' but got 'fan_out'"),
    "prior's number": ({"prior": "fan_in:x"}, "but got 'fan_in:x'"),
    "diagonal": ({"diagonal": "free"}, "'constant' or 'learned' but got 'free'"),
    "mode": ({"mode": "global"}, "'local', 'shared', 'weight' or 'mean' but got 'global'"),
    "scale": ({"scale": 0.0}, "saddle"),
    "skip": ({"skip": ["9"]}, "matches no layer"),
    "overrides": ({"overrides": {"9": {"rank": 1}}}, "matches no layer"),
    "overrides' setting": ({"overrides": {"5": {"width": 1}}}, "sets .*width"),
    "overrides' value": ({"overrides": {"5": {"rank": -1}}}, "`rank`"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    settings, message = ERRORS[case]
    net = small_network()
    before = dict(net.named_modules())
    with pytest.raises(ValueError, match=message):
        to_variational(net, **settings)
    assert dict(net.named_modules()) == before
    assert not hasattr(net, "variational_report")


def test_errors_of_networks():
    with pytest.raises(ValueError, match="found nothing to convert in Sequential"):
        to_variational(nn.Sequential(nn.ReLU()))
    for layer in (nn.Linear(3, 3), nn.Embedding(3, 3), AsymmetricLinear(6, 4, 2, 0.5)):
        with pytest.raises(ValueError, match=f"itself a {type(layer).__name__}"):
            to_variational(layer)
    for layer in (nn.LSTM(3, 4), nn.MultiheadAttention(4, 2), nn.EmbeddingBag(3, 4)):
        with pytest.raises(ValueError, match=f"found nothing to convert in {type(layer).__name__}"):
            to_variational(layer)
    with pytest.raises(ValueError, match=r"variational already: 0, 3, 5 \(4 layers\). Call to_mean"):
        to_variational(to_variational(small_network()))
    for function in (kl_divergence, sample_network, optimal_prior_variances, check_finite):
        with pytest.raises(ValueError, match="Sequential has no variational layer: call to_variational"):
            function(small_network())
    with pytest.raises(ValueError, match="`mode`"), sampling_mode(to_variational(small_network()), "none"):
        pass
    with pytest.raises(ValueError, match="either `posterior` or single settings"):
        VariationalLinear.from_layer(nn.Linear(3, 3), Posterior(), rank=2)


def test_parameters_that_are_not_finite_are_named():
    net = to_variational(small_network())
    check_finite(net)
    with torch.no_grad():
        net[5].weight_factors[1, 2, 3] = math.nan
    assert kl_divergence(net).isnan()
    with pytest.raises(ValueError, match=r"`5.weight_factors` is not finite"):
        check_finite(net)


def test_shared_modules_stay_shared():
    net = to_variational(Shared(), 2)
    assert net.first is net.block[0]
    assert isinstance(net.first, VariationalLinear)
    assert "shared at 2 places" in str(net.variational_report)
    assert torch.equal(kl_divergence(net), net.first.kl_divergence() + net.block[1].kl_divergence())
    drawn = sample_network(net)
    assert drawn.first is drawn.block[0]
    assert to_mean(net).first is net.block[0]


def test_factorised_layers_have_a_posterior_of_their_product():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    factorize(net, 4, skip=["2"])
    x = torch.randn(3, 16)
    expected = net(x)
    to_variational(net, 2)
    assert "its other coordinates are gone" in str(net.variational_report)
    torch.testing.assert_close(to_mean(net)(x), expected)
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize("kind", ["standard", "asymmetric"])
@pytest.mark.parametrize("case", ["torchvision", "ResNet20", "MLP"])
def test_whole_networks(case, kind):
    torch.manual_seed(0)
    if case == "torchvision":
        net, x = torchvision.models.resnet18(num_classes=5), torch.randn(2, 3, 32, 32)
    elif case == "ResNet20":
        net, x = ResNet20(), torch.randn(2, 3, 16, 16)
    else:
        net, x = MLP(12, (32, 32), 5), torch.randn(2, 12)
    if kind == "asymmetric":
        asymmetrize(net, n_fix=4, kappa=0.5)
    net.eval()
    expected = net(x)
    to_variational(net, 2, variance=math.exp(-12))
    assert not any(isinstance(m, VariationalLayer) for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    for mode in ("local", "shared", "weight"):
        with sampling_mode(net, mode):
            output = net(x)
        assert not torch.equal(output, expected)
        (output.square().mean() + kl_divergence(net) / 1000).backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
    net.zero_grad()
    torch.testing.assert_close(sample_network(net)(x).shape, expected.shape)
    torch.testing.assert_close(to_mean(net)(x), expected, rtol=0, atol=0)


def test_transformer_layers_call_what_is_in_them():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    net = nn.Sequential(nn.Embedding(10, 8, padding_idx=0), layer)
    with pytest.warns(UserWarning, match="MultiheadAttention"):
        to_variational(net, 2)
    assert isinstance(net[0], VariationalEmbedding)
    assert net.variational_report.changed == ["0", "1.linear1", "1.linear2"]
    x = torch.randint(0, 10, (3, 5))
    with torch.no_grad():
        assert not torch.equal(net(x), net(x))


def test_constructors():
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, 2, 1, 1, 2)
    torch.manual_seed(0)
    layer = VariationalConv2d(4, 6, 3, 2, 2, 1, groups=2, diagonal="learned", prior=0.3, mode="shared")
    assert torch.equal(layer.weight, plain.weight)
    assert layer.weight_factors.shape == (2, 6, 18)
    assert "rank=2, diagonal='learned', prior=0.3, mode='shared'" in repr(layer)
    assert "4, 6, kernel_size=(3, 3), stride=(2, 2)" in repr(layer)
    assert "padding_idx=1" in repr(VariationalEmbedding(5, 3, padding_idx=1))
    constant = nn.init.zeros_(nn.Linear(12, 500).weight)
    plain = nn.Linear(12, 500)
    plain.weight = nn.Parameter(constant)
    deviation = VariationalLinear.from_layer(plain, rank=1).weight_factors.detach().std()
    assert float(deviation) == pytest.approx(0.5 / 6, rel=0.05)
