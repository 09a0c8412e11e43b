"""``asymmetrize`` with FiGLU: what it sees, what it replaces, what it leaves as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lightning_symmetry import GNN, MLP, FiGLU, ResNet, asymmetrize
from lightning_symmetry.asymmetry.sigma import FiGLUs


def figlus_of(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, FiGLU)}


def nonlinearities(net):
    return [m for m in net.modules() if isinstance(m, nn.ReLU | nn.GELU | nn.ReLU6 | nn.SiLU | nn.Hardswish)]


CASES = {
    "tensor": (lambda: MLP(8, (12, 6), 3), torch.zeros(1, 8), (12, 6)),
    "tuple": (lambda: GNN(8, 3, 12, 2), (torch.zeros(2, 8), torch.tensor([[0], [1]])), (12, 12)),
    "dictionary": (
        lambda: GNN(8, 3, 12, 2),
        {"x": torch.zeros(2, 8), "edge_index": torch.tensor([[0], [1]])},
        (12, 12),
    ),
    "its own": (lambda: GNN(8, 3, 12, 2), None, (12, 12)),
}


@pytest.mark.parametrize("case", CASES)
def test_example_inputs(case):
    make, example, dims = CASES[case]
    net = asymmetrize(make(), "sigma", scale=0.5, example_input=example)
    assert not nonlinearities(net)
    assert [(f.dim, f.channel_dim, f.scale) for f in figlus_of(net).values()] == [(dim, -1, 0.5) for dim in dims]


def test_residual_network():
    net = asymmetrize(ResNet(1), "sigma")
    assert not nonlinearities(net)
    assert [(f.dim, f.channel_dim) for f in figlus_of(net).values()] == [(d, 1) for d in (16, 16, 16, 32, 32, 64, 64)]
    constants = [f.fixed for f in figlus_of(net).values()]
    assert not torch.equal(constants[0], constants[1])  # each place has constants of its own
    again = asymmetrize(ResNet(1), "sigma", skip=["stem_activation"])
    for name, figlu in figlus_of(again).items():
        assert torch.equal(figlu.fixed, figlus_of(net)[name].fixed)
    assert isinstance(again.stem_activation, nn.ReLU)


def test_the_network_computes_equation_4_in_each_place():
    torch.manual_seed(0)
    net = asymmetrize(MLP(8, (12, 6), 3), "sigma", seed=5).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    hidden = x
    for linear, norm, figlu in zip(net.linears, net.norms, net.activations, strict=False):
        normed = norm(linear(hidden))
        hidden = torch.sigmoid(normed @ figlu.fixed.T) * normed
    torch.testing.assert_close(net(x), net.linears[-1](hidden))


def test_it_leaves_modes_buffers_and_random_state_as_they_were():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 3), nn.RReLU()
    )
    net[1].eval()
    modes = [m.training for m in (net, *net[:2], net[3], net[4])]
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    asymmetrize(net, "sigma", example_input=torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in (net, *net[:2], net[3], net[4])] == modes
    for name, value in buffers.items():
        assert torch.equal(dict(net.named_buffers())[name], value)
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_hooks_are_removed_after_an_error():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        asymmetrize(net, "sigma", example_input=torch.zeros(2, 7))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert net.training


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner = nn.ModuleDict({"block": nn.Linear(4, 4)})
        self.act = nn.ReLU()
        self.function = function

    def forward(self, x):
        return self.function(self.act(self.inner["block"](x)))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (F.gelu, "gelu"),
        (torch.tanh, "tanh"),
        (lambda x: x.relu(), "relu"),
        (lambda x: x.clone().relu_(), "relu"),
        (lambda x: F.leaky_relu(x, 0.1), "leaky_relu"),
        (F.silu, "silu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functional_activations_are_refused_with_their_module(function, name):
    net = nn.Sequential(nn.Linear(4, 4), Functional(function))
    with pytest.raises(ValueError, match=rf"cannot replace functional activations: {name} in 1. Use modules"):
        asymmetrize(net, "sigma", example_input=torch.zeros(2, 4))
    assert isinstance(net[1].act, nn.ReLU)


def test_missing_example_input_and_second_time():
    with pytest.raises(ValueError, match="give `example_input`"):
        asymmetrize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "sigma")
    net = asymmetrize(MLP(8, (12,), 3), "sigma")
    with pytest.raises(ValueError, match=r"sigma-asymmetric already: activations.0 \(1 FiGLUs\)"):
        asymmetrize(net, "sigma")
    with pytest.raises(ValueError, match="nothing to convert"):
        asymmetrize(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), "sigma", example_input=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="method='sigma' has no kappa, n_fix"):
        asymmetrize(MLP(8, (12,), 3), "sigma", n_fix=3, kappa=1.0)
    with pytest.raises(ValueError, match="`scale` to be positive"):
        asymmetrize(MLP(8, (12,), 3), "sigma", scale=-1.0)


def test_overrides_skip_and_report():
    net = asymmetrize(MLP(8, (12, 6, 4), 3), "sigma", skip=["*.2"], overrides={"activations.1": {"scale": 0.1}})
    assert [f.scale for f in figlus_of(net).values()] == [1.0, 0.1]
    report = str(net.asymmetry_report)
    assert report.startswith("asymmetrize: 2 of 3 layers changed")
    assert "FiGLU of 6 channels, scale 0.1" in report
    assert net.asymmetry_report.left_alone == {"activations.2": "skipped"}


def test_both_methods_compose():
    net = asymmetrize(asymmetrize(MLP(8, (12, 12), 3), n_fix=3), "sigma")
    out = net(torch.randn(2, 8))
    out.sum().backward()
    assert len(figlus_of(net)) == 2


def test_squeeze_and_excitation_gates_are_left_alone():
    net = torchvision.models.mobilenet_v3_small(num_classes=4)
    asymmetrize(net, "sigma", example_input=torch.zeros(1, 3, 32, 32))
    gates = {n: m for n, m in net.named_modules() if isinstance(m, nn.Hardsigmoid)}
    assert gates
    for name in gates:
        assert net.asymmetry_report.left_alone[name] == "a gate or an output, not a hidden nonlinearity"
    assert not nonlinearities(net)
    net(torch.randn(2, 3, 32, 32)).sum().backward()


def test_one_activation_with_several_widths():
    net = nn.Sequential()
    act = nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 5), act, nn.Linear(5, 2))
    asymmetrize(net, "sigma", example_input=torch.zeros(1, 4))
    assert isinstance(net[1], FiGLUs)
    assert net[1] is net[3]
    assert sorted(f.dim for f in net[1].values()) == [5, 6]
    x = torch.randn(3, 4)
    by_dim = {f.dim: f for f in net[1].values()}
    torch.testing.assert_close(net(x), net[4](by_dim[5](net[2](by_dim[6](net[0](x))))))
    with pytest.raises(ValueError, match=r"seen with \[6, 5\] channels, but the input has shape \(2, 7\)"):
        net[1](torch.zeros(2, 7))


def test_one_activation_on_images_and_on_tokens():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear, self.act = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.GELU()

        def forward(self, x):
            x = self.act(self.conv(x))
            return self.act(self.linear(x.flatten(2).transpose(1, 2)))

    x = torch.randn(2, 3, 7, 7)
    net = asymmetrize(Both(), "sigma", example_input=x)
    images, tokens = (next(f for f in net.act.values() if f.channel_dim == axis) for axis in (1, -1))
    hidden = tokens(net.linear(images(net.conv(x)).flatten(2).transpose(1, 2)))
    torch.testing.assert_close(net(x), hidden)


def test_one_activation_on_square_images_as_wide_as_features():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            return self.act(self.linear(self.act(self.conv(x)).mean((2, 3))))

    x = torch.randn(2, 3, 8, 8)
    net = asymmetrize(Square(), "sigma", example_input=x)
    images = next(f for f in net.act.values() if f.channel_dim == 1)
    features = next(f for f in net.act.values() if f.channel_dim == -1)
    torch.testing.assert_close(net(x), features(net.linear(images(net.conv(x)).mean((2, 3)))))


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()], ids=["relu", "gelu", "module"])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(activation, training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, activation=activation, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).train(training)
    x = torch.randn(3, 5, 16)
    asymmetrize(net, "sigma", example_input=x)
    assert [f.dim for f in figlus_of(net).values()] == [24, 24]
    layer = net.layers[0]
    assert isinstance(layer.activation, FiGLU)

    hidden = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
    wide = layer.linear1(hidden)
    gated = torch.sigmoid(wide @ layer.activation.fixed.T) * wide
    expected = layer.norm2(hidden + layer.linear2(gated))
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), net.layers[1](expected))


def test_transformer_decoder():
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 24, dropout=0.0, batch_first=True), 1)
    x = torch.randn(2, 5, 16)
    before = net(x, x)
    asymmetrize(net, "sigma", example_input=(x, x))
    assert isinstance(net.layers[0].activation, FiGLU)
    assert not torch.allclose(net(x, x), before)


MODELS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), 1, {64, 128, 256, 512}),
    "resnet50": (lambda: torchvision.models.resnet50(num_classes=10), 1, {64, 128, 256, 512, 1024, 2048}),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(num_classes=10), 1, None),
    "vit": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5), -1, {64}),
    "convnext_tiny": (lambda: torchvision.models.convnext_tiny(num_classes=10), -1, {384, 768, 1536, 3072}),
}


@pytest.mark.parametrize("model", MODELS)
def test_torchvision_networks(model):
    make, axis, dims = MODELS[model]
    torch.manual_seed(0)
    net = make()
    x = torch.randn(2, 3, 32, 32)
    asymmetrize(net, "sigma", example_input=x[:1])
    assert not nonlinearities(net)
    assert {f.channel_dim for f in figlus_of(net).values()} == {axis}
    if dims is not None:
        assert {f.dim for f in figlus_of(net).values()} == dims
    net(x).logsumexp(1).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    assert torch.equal(net.eval()(x), net(x))


def test_shared_activation_of_resnet50_blocks():
    net = torchvision.models.resnet50(num_classes=10)
    asymmetrize(net, "sigma", example_input=torch.zeros(1, 3, 32, 32))
    block = net.layer1[0]
    assert isinstance(block.relu, FiGLUs)
    assert sorted(f.dim for f in block.relu.values()) == [64, 256]
    assert "FiGLU of 256, 64 channels" in str(net.asymmetry_report)


def test_functional_network_of_torchvision_is_refused():
    net = torchvision.models.densenet121(num_classes=4)
    with pytest.raises(ValueError, match="relu in DenseNet"):
        asymmetrize(net, "sigma", example_input=torch.zeros(1, 3, 32, 32))


def test_dtype():
    net = asymmetrize(MLP(8, (12,), 3).double(), "sigma", example_input=torch.zeros(1, 8, dtype=torch.float64))
    single = asymmetrize(MLP(8, (12,), 3), "sigma")
    assert net.activations[0].fixed.dtype == torch.float64
    assert torch.equal(net.activations[0].fixed.float(), single.activations[0].fixed)
