"""The papers' networks: shapes, parameter counts, reference computations, and what they refuse."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_symmetry import GNN, MLP, Autoencoder, ResNet, ResNet20, ResNet110
from lightning_symmetry.networks import ChannelNorm


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [(512, 512, 512), (7, 5), ()])
def test_mlp(hidden, norm, bias):
    net = MLP(784, hidden, 10, norm=norm, bias=bias)
    widths = [784, *hidden, 10]
    expected = sum(m * (n + bias) for n, m in pairwise(widths)) + 2 * norm * sum(hidden)
    assert count(net) == expected
    x = torch.randn(3, 1, 28, 28)
    assert net(x).shape == (3, 10)
    assert torch.equal(net(x), net(x.flatten(1)))
    assert net(net.example_input_array).shape == (2, 10)


def test_mlp_of_the_paper_is_linear_norm_gelu():
    torch.manual_seed(0)
    net, x = MLP(6, (5, 4), 3).double(), torch.randn(7, 6, dtype=torch.float64)
    hidden = x
    for linear, norm in zip(net.linears, net.norms, strict=False):
        hidden = hidden @ linear.weight.T + linear.bias
        hidden = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, correction=0, keepdim=True) + norm.eps).sqrt()
        hidden = hidden * norm.weight + norm.bias
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(net(x), hidden @ net.linears[-1].weight.T + net.linears[-1].bias)


def test_autoencoder_is_the_papers():
    torch.manual_seed(0)
    net = Autoencoder()
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    assert [tuple(linear.weight.shape) for linear in net.linears] == [(m, n) for n, m in pairwise(widths)]
    assert count(net) == sum(m * (n + 1) for n, m in pairwise(widths))
    for linear in net.linears:
        assert abs(linear.weight.std().item() * linear.in_features**0.5 - 1) < 0.05  # 7,500 entries and more
        assert not linear.bias.any()
    x = torch.rand(3, 1, 28, 28)
    hidden = x.flatten(1)
    for linear in net.linears:
        hidden = 1 / (1 + torch.exp(-(hidden @ linear.weight.T + linear.bias)))
    torch.testing.assert_close(net(x), hidden)
    assert net(net.example_input_array).shape == (2, 784)
    with pytest.raises(ValueError, match="takes 784 features"):
        net(torch.zeros(2, 7))
    normed = Autoencoder(8, (6, 3), norm=True)
    assert count(normed) == count(Autoencoder(8, (6, 3))) + 2 * (6 + 3 + 6)  # all hidden layers, not the output
    with pytest.raises(ValueError, match="a code"):
        Autoencoder(hidden=())


def resnet_count(blocks, width, classes, channels):
    """Sum over the layers of He et al.'s table for CIFAR, with projections where the shape changes."""
    total, before = 9 * channels * 16 * width + 2 * 16 * width, 16 * width
    for after in (16 * width, 32 * width, 64 * width):
        for block in range(blocks):
            reads = before if block == 0 else after
            total += 9 * reads * after + 9 * after * after + 4 * after
            if reads != after:
                total += reads * after + 2 * after
        before = after
    return total + before * classes + classes


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize(("blocks", "width", "classes", "channels"), [(3, 1, 10, 3), (3, 8, 10, 3), (1, 2, 5, 1)])
def test_resnet_parameters(norm, blocks, width, classes, channels):
    net = ResNet(blocks, norm, width, classes, channels)
    assert count(net) == resnet_count(blocks, width, classes, channels)
    assert not any(isinstance(m, nn.Conv2d) and m.bias is not None for m in net.modules())


@pytest.mark.parametrize(("make", "depth"), [(ResNet20, 20), (ResNet110, 110)])
def test_resnet_depth(make, depth):
    net = make()
    layers = [m for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "skip" not in n]
    assert len(layers) == depth
    assert count(net) == resnet_count((depth - 2) // 6, 1, 10, 3)


def test_parameters_of_resnet20_for_cifar10():
    # He et al. (2016) give 0.27 million; projections and affine norms add a little.
    assert count(ResNet20()) == 272_474


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_resnet_shapes(norm):
    net = ResNet(1, norm, num_classes=7)
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert net(net.example_input_array).shape == (2, 7)
    sizes = {}
    for name in ("stem", "stage1", "stage2", "stage3"):
        getattr(net, name).register_forward_hook(lambda _, __, out, name=name: sizes.update({name: tuple(out.shape)}))
    net(torch.randn(2, 3, 32, 32))
    assert sizes == {
        "stem": (2, 16, 32, 32),
        "stage1": (2, 16, 32, 32),
        "stage2": (2, 32, 16, 16),
        "stage3": (2, 64, 8, 8),
    }


def test_resnet_is_convolutions_norms_and_skips():
    torch.manual_seed(0)
    net, x = ResNet(1, num_classes=4).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def normed(norm, x):
        centred = x - x.mean(1, keepdim=True)
        x = centred / (centred.square().mean(1, keepdim=True) + norm.eps).sqrt()
        return x * norm.weight[:, None, None] + norm.bias[:, None, None]

    conv = nn.functional.conv2d
    hidden = normed(net.stem_norm, conv(x, net.stem.weight, padding=1)).relu()
    for stage, stride in ((net.stage1, 1), (net.stage2, 2), (net.stage3, 2)):
        block = stage[0]
        inner = normed(block.norm1, conv(hidden, block.conv1.weight, stride=stride, padding=1)).relu()
        inner = normed(block.norm2, conv(inner, block.conv2.weight, padding=1))
        if stride == 2:
            hidden = normed(block.skip[1], conv(hidden, block.skip[0].weight, stride=2))
        hidden = (inner + hidden).relu()
    torch.testing.assert_close(net(x), hidden.mean((2, 3)) @ net.head.weight.T + net.head.bias)


def test_resnet_under_vmap_and_for_gradients_of_single_samples():
    torch.manual_seed(0)
    net, x = ResNet(1, num_classes=4).double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(net)(x[:, None]).squeeze(1), net(x))
    parameters = dict(net.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, (x[None],)).square().sum()

    gradients = torch.vmap(torch.func.grad(loss), (None, 0))({n: p.detach() for n, p in parameters.items()}, x)
    net(x).square().sum().backward()
    for name, p in parameters.items():
        torch.testing.assert_close(gradients[name].sum(0), p.grad)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 5, 1, 1), (3, 1, 2, 2)])
def test_channel_norm_is_layer_norm_of_the_permuted_input(shape, layout):
    torch.manual_seed(0)
    norm, reference = ChannelNorm(shape[1]), nn.LayerNorm(shape[1])
    for p, q in zip(norm.parameters(), reference.parameters(), strict=True):
        nn.init.normal_(p)
        q.data.copy_(p)
    x = torch.randn(shape).contiguous(memory_format=layout).requires_grad_()
    out, expected = norm(x), reference(x.movedim(1, -1)).movedim(-1, 1)
    assert torch.equal(out, expected)
    (grad,), (wanted,) = (torch.autograd.grad(y.pow(3).sum(), x) for y in (out, expected))
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize(("features", "classes", "hidden", "layers"), [(128, 40, 256, 3), (64, 10, 32, 1)])
def test_gnn_parameters(features, classes, hidden, layers):
    net = GNN(features, classes, hidden, layers)
    expected = (features + 1) * hidden + (layers - 1) * (hidden + 1) * hidden + 2 * layers * hidden
    assert count(net) == expected + (hidden + 1) * classes
    assert net(*net.example_input_array).shape == (2, classes)


def test_gnn_of_the_paper_has_176424_parameters():
    assert count(GNN()) == 176_424  # App. E.1.2


@pytest.mark.parametrize("training", [True, False])
def test_gnn_adds_the_mean_of_the_neighbours(training):
    torch.manual_seed(0)
    net = GNN(5, 3, 6, 2).double().train(training)
    for norm in net.norms:
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    edges = [(0, 1), (1, 0), (1, 2), (2, 1), (3, 1)]  # node 4 has no edge
    x = torch.randn(5, 5, dtype=torch.float64)
    hidden = x
    for linear, norm in zip(net.linears, net.norms, strict=True):
        gathered = hidden.clone()
        for node in range(5):
            neighbours = [hidden[source] for source, target in edges if target == node]
            if neighbours:
                gathered[node] += sum(neighbours) / len(neighbours)
        hidden = gathered @ linear.weight.T + linear.bias
        mean = hidden.mean(0) if training else norm.running_mean
        var = hidden.var(0, correction=0) if training else norm.running_var
        hidden = ((hidden - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias).relu()
    expected = hidden @ net.head.weight.T + net.head.bias
    torch.testing.assert_close(net(x, torch.tensor(edges).T), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MLP(0), r"all widths to be at least 1 but got \[0, 512"),
        (lambda: MLP(4, (8, 0), 2), r"at least 1 but got \[4, 8, 0, 2\]"),
        (lambda: MLP(4, (8,), 2)(torch.zeros(3, 5)), r"takes 4 features, .* shape \(3, 5\) has 5"),
        (lambda: ResNet(blocks=0), "`blocks` and `width` to be at least 1 but got 0 and 1"),
        (lambda: ResNet20(width=0), "at least 1 but got 3 and 0"),
        (lambda: ResNet20(norm="group"), "`norm` to be 'layer' or 'batch' but got 'group'"),
        (lambda: GNN(hidden=0), r"at least 1 but got \[128, 0, 0, 0\]"),
        (lambda: GNN(num_layers=0), "widths and `num_layers` to be at least 1"),
    ],
)
def test_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_activations_are_modules_of_their_own(activation):
    for net in (
        MLP(4, (4, 4), 2, activation=activation),
        ResNet(1, activation=activation),
        GNN(4, 2, 4, 2, activation),
    ):
        found = [m for m in net.modules() if isinstance(m, activation)]
        assert len(found) >= 2
