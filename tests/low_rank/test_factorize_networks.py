"""Whole networks: their function, and what a factorisation costs and saves."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from low_rank_networks import images, network
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_symmetry import LowRankConv2d, ResNet20, factorize, recompose
from lightning_symmetry.low_rank import LowRankMultiheadAttention

CASES = {
    "convolutions": (network, images, {}),
    "separable, strides": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 16, (3, 5), (2, 1), (1, 2), groups=2),
            nn.Conv2d(16, 16, 3, 2, padding_mode="circular", padding=1),
        ),
        lambda: torch.randn(3, 4, 9, 10),
        {"scheme": "1xk-kx1", "rank": 2},
    ),
    "beyond break-even": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        lambda: torch.randn(5, 200, 16),
        {"rank": 12, "min_saving": -1, "overrides": {"1": {"rank": 3}}},
    ),
    "text": (
        lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(24, 24)),
        lambda: torch.randint(0, 50, (5, 3)),
        {"rank": 4},
    ),
    "text longer than the table": (
        lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 24)),
        lambda: torch.randint(0, 50, (5, 30)),
        {"rank": 4},
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Conv1d(6, 12, 5, stride=2), nn.Conv1d(12, 12, 3, padding="same", groups=2)),
        lambda: torch.randn(3, 6, 21),
        {"rank": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_multiply_adds_are_those_that_are_counted(case):
    """Compare with torch's own count of floating-point operations, two for a multiply-add."""
    make, sample, settings = CASES[case]
    net, x = make(), sample()
    counts = []
    for one in (net, factorize(copy.deepcopy(net), example_input=x, **settings)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            one(x)
        counts.append(counter.get_total_flops() / 2 / len(x))
    assert len(one.factorization_report.changed) == sum(1 for m in net if hasattr(m, "weight"))
    assert one.factorization_report.multiply_adds == pytest.approx(tuple(counts))
    assert "a sample" in str(one.factorization_report)


NETWORKS = {
    "residual network": (lambda: ResNet20(num_classes=10), (2, 3, 32, 32)),
    "mobilenet": (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), (2, 3, 32, 32)),
    "vision transformer": (
        lambda: torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=10),
        (2, 3, 16, 16),
    ),
}


@pytest.mark.filterwarnings("ignore:factorize left")
@pytest.mark.parametrize("case", NETWORKS)
@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_networks_of_the_library_and_of_torchvision(case, scheme):
    torch.manual_seed(0)
    make, shape = NETWORKS[case]
    net, x = make().eval(), torch.randn(shape)
    keys = list(net.state_dict())
    with torch.no_grad():
        expected = net(x)
        factorize(net, 1.0, scheme=scheme, min_saving=-1, example_input=x)
        torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-4)
        recompose(net)
        torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-4)
    assert list(net.state_dict()) == keys
    factorize(net, 0.25, scheme=scheme)
    before, after = net.factorization_report.parameters
    assert after < 0.75 * before
    net(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    kinds = {type(m) for m in net.modules()}
    assert LowRankConv2d in kinds
    assert (LowRankMultiheadAttention in kinds) == (case == "vision transformer")
