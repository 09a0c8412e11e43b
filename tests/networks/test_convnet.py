"""The small convolutional classifier: sizes, the computation by hand, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_symmetry import ConvNet


def expected_count(channels, in_channels, num_classes):
    convs = sum(9 * n * m for n, m in pairwise([in_channels, *channels]))
    return convs + 2 * sum(channels) + channels[-1] * num_classes + num_classes


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize(
    ("channels", "in_channels", "num_classes"), [((16, 16, 32), 1, 10), ((4,), 3, 2), ((5, 3, 7, 7, 9), 2, 4)]
)
def test_number_of_parameters(channels, in_channels, num_classes, norm):
    net = ConvNet(channels, norm, num_classes, in_channels, size=9)
    assert sum(p.numel() for p in net.parameters()) == expected_count(channels, in_channels, num_classes)
    assert net(net.example_input_array).shape == (2, num_classes)
    assert net.example_input_array.shape == (2, in_channels, 9, 9)


def test_default_has_the_documented_size():
    net = ConvNet()
    assert sum(p.numel() for p in net.parameters()) == 7_514
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, 1, 8, 8))
    assert counter.get_total_flops() == 2 * 230_720  # a multiplication and an addition each


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_computation_by_hand(norm, training):
    torch.manual_seed(0)
    net = ConvNet((4, 6, 6, 8), norm, 3, 2, activation=nn.Tanh).double().train(training)
    for module in net.norms:
        for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            nn.init.uniform_(tensor, 0.5, 1.5)
    hidden = images = torch.randn(5, 2, 7, 7, dtype=torch.float64)
    for conv, norm_layer, stride in zip(net.convs, net.norms, (1, 2, 1, 2), strict=True):
        hidden = F.conv2d(hidden, conv.weight, stride=stride, padding=1)
        if norm == "layer":
            mean, variance = hidden.mean(1, keepdim=True), hidden.var(1, correction=0, keepdim=True)
        elif training:
            mean, variance = hidden.mean((0, 2, 3)), hidden.var((0, 2, 3), correction=0)
        else:
            mean, variance = norm_layer.running_mean.clone(), norm_layer.running_var.clone()
        mean, variance = (value if value.ndim == 4 else value[None, :, None, None] for value in (mean, variance))
        hidden = (hidden - mean) / (variance + 1e-5).sqrt()
        hidden = torch.tanh(hidden * norm_layer.weight[:, None, None] + norm_layer.bias[:, None, None])
    assert hidden.shape == (5, 8, 2, 2)
    torch.testing.assert_close(net(images), net.head(hidden.mean((2, 3))), rtol=1e-10, atol=1e-10)


def test_initialisation_is_he_normal():
    torch.manual_seed(0)
    for conv in ConvNet((64, 64, 128)).convs:
        fan_in = 9 * conv.in_channels
        bound = 5 * (2 / conv.weight.numel()) ** 0.5  # five standard errors of a sample variance of one
        assert abs(conv.weight.var().item() * fan_in / 2 - 1) < bound
        assert conv.bias is None


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_many_networks_at_once(norm):
    nets = [ConvNet((4, 6), norm).eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(nets)
    images = torch.randn(5, 1, 8, 8)
    found = torch.vmap(lambda p, b: torch.func.functional_call(nets[0], (p, b), (images,)))(parameters, buffers)
    for logits, net in zip(found, nets, strict=True):
        torch.testing.assert_close(logits, net(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": ()}, "at least 1"),
        ({"channels": (4, 0)}, "at least 1"),
        ({"num_classes": 0}, "at least 1"),
        ({"in_channels": 0}, "at least 1"),
        ({"size": 0}, "at least 1"),
        ({"norm": "group"}, "'layer' or 'batch' but got 'group'"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConvNet(**arguments)
