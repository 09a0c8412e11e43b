"""Statistics of repaired networks against those measured by forward passes written out in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from repair_networks import (
    CLASSES,
    SAMPLES,
    SHAPES,
    assert_interpolated,
    bn_cnn,
    cnn,
    conv1d,
    data,
    layer_norm,
    mlp,
    moments,
    pair,
    samples,
    sequence,
)
from torch import Tensor, nn

from lightning_symmetry import interpolate
from lightning_symmetry.landscape import repair
from lightning_symmetry.landscape.unit_moments import UnitMoments


@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.25])
@pytest.mark.parametrize("batch_size", [SAMPLES, 10], ids=["one batch", "batches"])
@pytest.mark.parametrize("build", [mlp, cnn, conv1d, sequence, layer_norm])
def test_hidden_statistics_are_the_interpolated_ones(build, batch_size, alpha):
    a, b = pair(build)
    x, _ = samples(SHAPES[build])
    net = interpolate(a, b, alpha)
    last = copy.deepcopy(net[-1].state_dict())
    with pytest.raises(AssertionError):
        assert_interpolated(net, a, b, x, alpha, 1e-2)
    assert repair(net, data(SHAPES[build], batch_size), (a, b), alpha, progress=False) is net
    assert_interpolated(net, a, b, x, alpha, 1e-11)
    assert all(torch.equal(value, last[name]) for name, value in net[-1].state_dict().items())


def test_in_float32():
    a, b = pair(cnn, torch.float32)
    x, _ = samples(SHAPES[cnn])
    net = repair(interpolate(a, b, 0.4), data(SHAPES[cnn], dtype=torch.float32), (a, b), 0.4, progress=False)
    assert_interpolated(net, a, b, x, 0.4, 2e-5)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_the_shrunken_variance_of_a_mean_of_wide_networks_is_restored():
    """The mean of two independent rows has 1/sqrt(2) of their standard deviation, and less in deeper layers."""
    a, b = pair(lambda: mlp(400))
    x, _ = samples((6,))
    net = interpolate(a, b, 0.5)

    def mean_std(part: nn.Module) -> Tensor:
        return torch.stack([std.mean() for _, std in list(moments(part, x).values())[:-1]])

    ends = (mean_std(a) + mean_std(b)) / 2
    collapsed = mean_std(net) / ends
    assert collapsed[0] < 0.8
    assert collapsed[1] < 0.6
    repair(net, data((6,)), (a, b), progress=False)
    torch.testing.assert_close(mean_std(net) / ends, torch.ones(2, dtype=torch.float64), rtol=1e-11, atol=0)


def test_a_layer_without_bias_is_rescaled_only():
    def build():
        return mlp(bias=False)

    a, b = pair(build)
    x, _ = samples((6,))
    net = interpolate(a, b, 0.5)
    keys = net.state_dict().keys()
    first = net[0].weight.detach().clone()
    repair(net, data((6,)), (a, b), progress=False)
    assert net.state_dict().keys() == keys
    assert_interpolated(net, a, b, x, 0.5, 1e-11, means=False)
    factors = net[0].weight / first  # one for each row
    torch.testing.assert_close(factors, factors[:, :1].expand_as(factors), rtol=1e-12, atol=0)


@pytest.mark.parametrize("build", [mlp, bn_cnn])
@pytest.mark.parametrize("alpha", [0, 1.0])
def test_an_end_stays_as_it_is(build, alpha):
    a, b = pair(build, torch.float32)
    net = interpolate(a, b, alpha)
    repair(net, data(SHAPES[build], dtype=torch.float32), (a, b), alpha, progress=False)
    end = (a, b)[int(alpha)].state_dict()
    assert all(torch.equal(value, end[name]) for name, value in net.state_dict().items())
    x, _ = samples(SHAPES[build])
    other = interpolate(a, b, 0.3)  # another network is brought to the statistics of the end
    repair(other, data(SHAPES[build], dtype=torch.float32), (a, b), alpha, progress=False)
    assert not torch.equal(other(x.float()), net(x.float()))
    if build is mlp:
        assert_interpolated(other, a, b, x, alpha, 2e-5)


class Siamese(nn.Module):
    """One layer for two halves of the input: pooled statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(3, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(x[:, :3]).relu() + self.shared(x[:, 3:] ** 2).relu())


def test_calls_of_a_shared_layer_are_pooled():
    a, b = pair(Siamese)
    net = interpolate(a, b, 0.5)
    repair(net, data((6,)), (a, b), progress=False)
    x, _ = samples((6,))
    both = torch.cat([x[:, :3], x[:, 3:] ** 2])
    ours, first, second = (part.shared(both).detach() for part in (net, a, b))
    torch.testing.assert_close(ours.mean(0), (first.mean(0) + second.mean(0)) / 2, rtol=1e-11, atol=1e-11)
    std = [h.std(0, correction=0) for h in (ours, first, second)]
    torch.testing.assert_close(std[0], (std[1] + std[2]) / 2, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_units_stay_finite(dtype):
    a, b = pair(mlp, dtype)
    with torch.no_grad():
        a[0].weight[0], b[0].weight[0] = 0.0, 0.0  # constant at both ends
        b[0].weight[1] = -a[0].weight[1]  # constant in the middle
        b[0].weight[3] = torch.nextafter(-a[0].weight[3], b[0].weight[3])  # constant in the middle but for rounding
        a[2].weight[2], b[2].weight[2] = 0.0, 1.0  # constant at one end
        a[0].bias[:2], b[0].bias[:2] = torch.tensor([3.0, 0.3]), torch.tensor([5.0, 0.1])
    net = interpolate(a, b, 0.5)
    repair(net, data((6,), dtype=dtype), (a, b), progress=False)
    assert all(torch.isfinite(p).all() for p in net.parameters())
    x, _ = samples((6,))
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    (mean, std), (first, _), (second, _) = (moments(part, x)["0"] for part in (net, a, b))
    torch.testing.assert_close(mean, (first + second) / 2, rtol=tolerance, atol=tolerance)
    assert std[0] == 0
    assert std[[1, 3]].max() < 1e-6  # not rounding blown up to the deviation of the ends
    assert mean[0].item() == pytest.approx(4, rel=1e-6)
    assert_interpolated(net, a, b, x, 0.5, tolerance, skip=["0"])


def test_a_deviation_extrapolated_below_zero_is_zero():
    a, b = pair(mlp)
    with torch.no_grad():
        b[0].weight[0] *= 0.01
    net = repair(interpolate(a, b, 1.25), data((6,)), (a, b), 1.25, progress=False)
    x, _ = samples((6,))
    assert moments(net, x)["0"][1][0] < 1e-15
    assert_interpolated(net, a, b, x, 1.25, 1e-11)


def test_statistics_that_are_not_finite_spoil_no_other_unit():
    a, b = pair(mlp)
    with torch.no_grad():
        b[2].bias[3] = torch.inf
    net = interpolate(a, b, 0.5)
    weight = net[2].weight.detach().clone()
    repair(net, data((6,)), (a, b), progress=False)
    assert torch.equal(net[2].weight[3], weight[3])
    assert torch.isfinite(net[2].weight).all()
    assert not torch.equal(net[2].weight[:3], weight[:3])


def test_moments_are_exact_where_the_mean_is_large():
    torch.manual_seed(0)
    parts = [1e7 + torch.randn(count, 3, 4, dtype=torch.float64) for count in (5, 1, 8, 0)]
    units = UnitMoments()
    for part in parts:
        units.update(part, 1)
    values = torch.cat(parts).transpose(0, 1).flatten(1)
    exact = values - 1e7
    torch.testing.assert_close(units.mean - 1e7, exact.mean(1), rtol=0, atol=1e-8)
    torch.testing.assert_close(units.std, exact.std(1, correction=0), rtol=1e-8, atol=0)
    assert units.count == 14 * 4
    assert units.calls == 4
