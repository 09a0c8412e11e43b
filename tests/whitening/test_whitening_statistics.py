"""Input statistics: streaming, merging and averaging, and collecting them from a network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from whitening_reference import CONVOLUTIONS, covariance_of, rows_of, zca

from lightning_symmetry.whitening import (
    InputStatistics,
    WhiteningError,
    collect_statistics,
    largest_eigenvalue,
    reparametrize,
    whiten,
    whitened_layers,
    zca_whitening_from_samples,
)


def assert_whitening(statistics, rows, eps=0.1, **kwargs):
    whitening = statistics.whitening(eps)
    for group, expected in enumerate(rows):
        mean, covariance = covariance_of(expected, **kwargs)
        torch.testing.assert_close(whitening.dense()[group], zca(covariance, eps))
        torch.testing.assert_close(whitening.center[group], mean if statistics.offset else torch.zeros_like(mean))


@pytest.mark.parametrize("batches", [(3,), (2, 3), (2, 3, 4, 1), (30,), (3, 30, 2)])
def test_rows_are_kept_until_they_are_more_than_the_entries(batches):
    parts = [torch.randn(n, 6) * 3 + 10 for n in batches]
    statistics = InputStatistics(6)
    for part in parts:
        statistics.add(part)
    assert statistics.num_rows == sum(batches)
    kept = statistics.state_dict()["_rows"]
    assert (kept is not None) == (sum(batches) <= 6)
    assert all(t is None or t.numel() <= 36 for t in statistics.state_dict().values() if not isinstance(t, int | float))
    assert_whitening(statistics, [torch.cat(parts)])


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 5, 6), (2, 3, 2, 6)])
def test_all_leading_axes_of_a_linear_layer_are_rows(shape):
    inputs = [torch.randn(shape) for _ in range(3)]
    statistics = InputStatistics(6)
    for input in inputs:
        statistics.add(input)
    assert_whitening(statistics, [torch.cat([input.reshape(-1, 6) for input in inputs])])


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_pixels_are_rows_of_each_group_of_channels(case):
    layer = CONVOLUTIONS[case]()
    input = torch.randn(3, 4, 5, 6) if layer.weight.ndim == 4 else torch.randn(3, 4, 7)
    net = whiten(nn.Sequential(layer))
    statistics = collect_statistics(net, lambda: net(input))["0"]
    assert_whitening(statistics, rows_of(layer, input))
    single = collect_statistics(net, lambda: [net(image) for image in input])["0"]
    torch.testing.assert_close(single.whitening(0.1).dense(), statistics.whitening(0.1).dense())
    channels_last = collect_statistics(net, lambda: net(input.transpose(1, -1).contiguous().transpose(1, -1)))["0"]
    torch.testing.assert_close(channels_last.whitening(0.1).dense(), statistics.whitening(0.1).dense())


def test_large_inputs_are_taken_in_parts():
    input = torch.randn(3, 2, 1200, 1000)
    statistics = InputStatistics(2, spatial=2)
    statistics.add(input)
    rows = input.movedim(1, -1).reshape(-1, 2).double()
    mean, covariance = statistics.moments()
    torch.testing.assert_close(mean[0], rows.mean(0))
    torch.testing.assert_close(covariance[0], rows.T.cov(correction=0))


@pytest.mark.parametrize("mode", ["full", "diagonal", "center"])
@pytest.mark.parametrize("sizes", [(2, 3), (2, 20), (20, 2), (20, 30), (0, 3), (3, 0)])
def test_merging_is_seeing_everything(sizes, mode):
    parts = [torch.randn(n, 6) + 5 for n in sizes]
    statistics = [InputStatistics(6, mode=mode) for _ in sizes]
    for one, part in zip(statistics, parts, strict=True):
        one.add(part)
    statistics[0].merge(statistics[1])
    expected = zca_whitening_from_samples(torch.cat(parts), 0.1, mode=mode)
    torch.testing.assert_close(statistics[0].whitening(0.1).dense()[0], expected.dense())
    torch.testing.assert_close(statistics[0].whitening(0.1).center[0], expected.center)


@pytest.mark.parametrize("mode", ["full", "diagonal", "center"])
@pytest.mark.parametrize("sizes", [(2, 3), (2, 20), (20, 2), (20, 30)])
def test_discounted_rows_weigh_less(sizes, mode):
    parts = [torch.randn(n, 6) + 5 for n in sizes]
    old, new = (InputStatistics(6, mode=mode) for _ in sizes)
    old.add(parts[0])
    new.add(parts[1])
    old.discount(0.5)
    old.merge(new)
    weights = torch.cat([torch.full((sizes[0],), 0.5), torch.ones(sizes[1])])
    expected = zca_whitening_from_samples(torch.cat(parts), 0.1, mode=mode, weights=weights)
    torch.testing.assert_close(old.whitening(0.1).dense()[0], expected.dense())
    torch.testing.assert_close(old.whitening(0.1).center[0], expected.center)
    with pytest.raises(ValueError, match=r"`factor` to lie in \(0, 1\] but got 0"):
        old.discount(0)


@pytest.mark.parametrize("count", [4, 20])
def test_state_goes_into_a_file_and_back(count, tmp_path):
    statistics, again = InputStatistics(6, centred=False, offset=False), InputStatistics(6, offset=False)
    statistics.add(torch.randn(count, 6))
    torch.save(statistics.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    more = torch.randn(7, 6)
    statistics.add(more)
    again.add(more)
    assert torch.equal(again.whitening(0.1).dense(), statistics.whitening(0.1).dense())


def test_large_means_do_not_cancel():
    rows = torch.randn(5000, 4, dtype=torch.float64)
    statistics = InputStatistics(4)
    for part in (rows + 1e6).split(100):
        statistics.add(part)
    torch.testing.assert_close(statistics.moments()[1][0], rows.T.cov(correction=0), rtol=1e-7, atol=1e-7)


REFUSED = {
    "channels": (lambda: InputStatistics(4).add(torch.randn(2, 5)), ValueError, "inputs of 4 channels but got"),
    "other layer": (lambda: InputStatistics(4).merge(InputStatistics(5)), ValueError, "Cannot merge"),
    "nothing": (lambda: InputStatistics(4).whitening(1.0), WhiteningError, "2 samples but got 0"),
    "mode": (lambda: InputStatistics(4, mode="zca"), ValueError, "but got 'zca'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.twice, self.never = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = []

    def forward(self, x):
        h = self.first(x)
        g = torch.tanh(self.twice(input=h))
        self.inner = [h, g]
        return self.twice(g)


def test_calls_are_pooled_and_nothing_is_left_behind():
    net = whiten(Reused())
    x = torch.randn(9, 5)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    statistics = collect_statistics(net, lambda: net(x))
    assert set(statistics) == {"first", "twice"}
    assert statistics["twice"].num_rows == 18
    assert not any(h.requires_grad for h in net.inner)
    assert_whitening(statistics["twice"], [torch.cat(net.inner)])
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert set(collect_statistics(net, lambda: net(x), ["first"])) == {"first"}


def test_hooks_are_removed_when_the_run_fails():
    net = whiten(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)))
    with pytest.raises(RuntimeError, match="running_mean"):
        collect_statistics(net, lambda: net(torch.randn(2, 3, 4)))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


def test_unknown_layers():
    net = whiten(Reused())
    with pytest.raises(ValueError, match="no whitened layer called 'second'"):
        collect_statistics(net, lambda: None, ["second"])
    with pytest.raises(ValueError, match=r"no whitened layer at all: convert it with whiten\(net\)"):
        collect_statistics(Reused(), lambda: None)


def test_a_layer_that_is_not_finite_fails_alone():
    net = whiten(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
    x = torch.randn(9, 4)
    statistics = collect_statistics(net, lambda: net(x))
    assert reparametrize(net, statistics, 0.1) == {"2": "Statistics of activations are not finite."}
    assert (net[0].form, net[2].form) == ("dense", "identity")
    with pytest.raises(ValueError, match="`eps` to be positive"):
        reparametrize(net, statistics, 0.0)
    with pytest.raises(ValueError, match="no whitened layer called 'head'"):
        reparametrize(net, {"head": statistics["0"]}, 0.1)


def test_without_bias_moments_are_about_zero_unless_they_are_normalised_away():
    x = torch.rand(20, 4, 5, 5) + 1
    norms = {
        "batch": nn.BatchNorm2d(6),
        "instance": nn.InstanceNorm2d(6),
        "group": nn.GroupNorm(2, 6),
        "relu": nn.ReLU(),
    }
    for name, norm in norms.items():
        net = whiten(nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), norm, nn.Flatten(), nn.Linear(54, 2)))
        statistics = collect_statistics(net, lambda net=net: net(x))
        assert_whitening(statistics["0"], rows_of(nn.Conv2d(4, 6, 3), x), centred=name in ("batch", "instance"))
        assert not statistics["0"].whitening(0.1).center.any()
        assert statistics["3"].whitening(0.1).center.any()
    frozen = nn.Linear(4, 3)
    frozen.bias.requires_grad_(False)
    net = whiten(nn.Sequential(frozen))
    assert_whitening(collect_statistics(net, lambda: net(x[..., :4]))["0"], [x[..., :4].reshape(-1, 4)], centred=False)


def test_compiled_networks_run_eagerly():
    net = whiten(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(9, 4)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):  # compiled code that does not look for hooks
        with torch.no_grad():
            compiled(x)
        statistics = collect_statistics(compiled, lambda: compiled(x))
    assert {name: s.num_rows for name, s in statistics.items()} == {"_orig_mod.0": 9, "_orig_mod.2": 9}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("count", "mode"), [(5, "full"), (100, "full"), (100, "diagonal")])
def test_largest_eigenvalue_of_the_whitened_covariance(count, mode, explicit):
    net = whiten(nn.Sequential(nn.Linear(8, 4)), mode, explicit=explicit).double()
    layer = whitened_layers(net)["0"]
    x, fresh = torch.randn(2, count, 8, dtype=torch.float64)
    reparametrize(net, collect_statistics(net, lambda: net(x)), 0.1)
    statistics = InputStatistics(8)
    statistics.add(fresh)
    _, covariance = covariance_of(fresh)
    matrix, center = layer.whitening_matrix()
    torch.testing.assert_close(center[0], x.mean(0))
    expected = torch.linalg.eigvalsh(matrix[0] @ covariance @ matrix[0])[-1]
    assert largest_eigenvalue(layer, statistics, steps=400) == pytest.approx(float(expected), rel=1e-3)
    with pytest.raises(ValueError, match="hold no variances"):
        centred = InputStatistics(8, mode="center")
        centred.add(x)
        largest_eigenvalue(layer, centred)
