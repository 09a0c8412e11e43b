"""The VGG-like network: shapes, parameters, initialisation, and what the other rooms make of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_symmetry import VGG, collect_statistics, reparametrize, trace_permutations, whiten


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("width", "stages", "convs", "channels"), [(64, 3, 2, 3), (5, 2, 1, 1), (4, 1, 3, 2)])
def test_parameters(norm, width, stages, convs, channels):
    net = VGG(width, stages, convs, 7, channels, norm)
    total, before = 0, channels
    for stage in range(stages):
        after = width * 2**stage
        for _ in range(convs):
            total += 9 * before * after + after * (2 if norm else 1)  # scale and shift, or a bias
            before = after
    total += before * before + before * (2 if norm else 1) + 7 * (before + 1)
    assert count(net) == total
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(norms) == norm * (stages * convs + 1)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [8, 24, 32, 28])
def test_images_of_any_size(size, norm):
    net = VGG(4, in_channels=1, norm=norm)
    assert net(torch.randn(2, 1, size, size)).shape == (2, 10)
    assert net(net.example_input_array).shape == (2, 10)


def test_is_convolutions_pools_and_two_linear_layers():
    torch.manual_seed(0)
    net, x = VGG(3, 2, 2, 4, activation=nn.Tanh).double(), torch.randn(5, 3, 9, 8, dtype=torch.float64)
    hidden = x
    for convs in ((net.stages[0][0], net.stages[0][3]), (net.stages[1][0], net.stages[1][3])):
        for conv in convs:
            hidden = nn.functional.conv2d(hidden, conv.weight, conv.bias, padding=1).tanh()
        hidden = nn.functional.max_pool2d(hidden, 2)
    hidden = (hidden.mean((2, 3)) @ net.hidden.weight.T + net.hidden.bias).tanh()
    torch.testing.assert_close(net(x), hidden @ net.head.weight.T + net.head.bias)


def test_normalises_before_each_activation():
    net, seen = VGG(4, 2, norm=True), []
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    net(torch.randn(64, 3, 8, 8))
    for inputs in seen:
        rows = inputs.movedim(1, -1).flatten(0, -2)
        torch.testing.assert_close(rows.mean(0), torch.zeros(rows.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(rows.var(0, correction=0), torch.ones(rows.shape[1]), atol=0.02, rtol=0)
    assert len(seen) == 5


def test_initial_weights_keep_the_scale_of_a_deep_network():
    torch.manual_seed(0)
    net = VGG(64)
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            variance = (1 if name == "head" else 2) / layer.weight[0].numel()
            assert abs(layer.weight.var().item() / variance - 1) < 0.15  # 1,728 entries and more
            assert not layer.bias.any()


@pytest.mark.parametrize("norm", [False, True])
def test_all_layers_are_whitened_and_all_hidden_units_permuted(norm):
    torch.manual_seed(0)
    net, x = VGG(4, 2, norm=norm).double().eval(), torch.randn(64, 3, 8, 8, dtype=torch.float64)
    traced = trace_permutations(net, net.example_input_array.double())
    assert sorted(group.size for group in traced.groups.values()) == [4, 4, 8, 8, 8]
    assert not traced.frozen_by
    before = net(x)
    net.load_state_dict(traced.apply(net.state_dict(), traced.random()))
    torch.testing.assert_close(net(x), before)
    whiten(net)
    assert len(net.whitening_report.changed) == 6
    assert not net.whitening_report.left_alone
    assert not reparametrize(net, collect_statistics(net, lambda: net(x)), eps=1e-3)
    torch.testing.assert_close(net(x), before)


def test_errors():
    with pytest.raises(ValueError, match="to be at least 1 but got 0, 3, 2, 10 and 3"):
        VGG(0)
    with pytest.raises(ValueError, match=r"halves images 3 times: .* 8 pixels a side .*\(1, 3, 7, 8\)"):
        VGG(4)(torch.zeros(1, 3, 7, 8))
