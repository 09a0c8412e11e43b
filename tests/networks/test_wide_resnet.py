"""Wide residual networks: the published sizes, the block by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_symmetry import WideResNet, factorize
from lightning_symmetry.networks import WideBlock


@pytest.mark.parametrize(
    ("depth", "width", "millions"),
    [(40, 1, 0.6), (40, 2, 2.2), (40, 4, 8.9), (16, 8, 11.0), (16, 10, 17.1), (22, 8, 17.2), (28, 10, 36.5)],
)
def test_sizes_of_the_papers_table_4(depth, width, millions):
    with torch.device("meta"):
        net = WideResNet(depth, width)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == millions
    assert sum(isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3) for m in net.modules()) == depth - 3


@pytest.mark.parametrize(("out_channels", "stride"), [(6, 1), (8, 1), (8, 2)])
def test_block_by_hand(out_channels, stride):
    torch.manual_seed(0)
    block = WideBlock(6, out_channels, stride, "batch", 0.0).double()
    x = torch.randn(4, 6, 8, 8, dtype=torch.float64)

    def normalise(x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        return ((x - mean) / (variance + 1e-5).sqrt()).clamp(min=0)

    hidden = F.conv2d(normalise(x), block.conv1.weight, stride=stride, padding=1)
    expected = F.conv2d(normalise(hidden), block.conv2.weight, padding=1)
    changed = out_channels != 6 or stride != 1
    expected = expected + (F.conv2d(normalise(x), block.skip.weight, stride=stride) if changed else x)
    torch.testing.assert_close(block(x), expected)
    assert (block.skip is not None) == changed


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_any_image_size(norm):
    net = WideResNet(10, 1, 7, 1, norm)
    for size in (8, 13, 32):
        assert net(torch.randn(3, 1, size, size)).shape == (3, 7)
    assert net(net.example_input_array).shape == (2, 7)


def test_factorised_at_full_rank_it_is_the_same_function():
    torch.manual_seed(0)
    net = WideResNet(10, 2).eval()
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        before = net(x)
        factorize(net, 1.0, min_saving=-10.0)
        assert len(net.factorization_report.changed) == 11  # stem, 6 convolutions, 3 skips, head
        torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)


def test_dropout_is_between_the_convolutions():
    torch.manual_seed(0)
    block, x = WideBlock(4, 4, 1, "layer", 1.0), torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x)
    assert not torch.equal(block.eval()(x), x)


@pytest.mark.parametrize(
    ("values", "message"), [({"depth": 20}, "6 n \\+ 4"), ({"depth": 4}, "6 n \\+ 4"), ({"width": 0}, "at least 1")]
)
def test_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        WideResNet(**values)
