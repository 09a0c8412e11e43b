"""``asymmetrize`` with fixed entries: what it changes, what it leaves alone, and what it says."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torchvision
from torch import nn

from lightning_symmetry import MLP, AsymmetricLinear, ResNet, asymmetrize, fixed_fraction, num_trainable
from lightning_symmetry.asymmetry import AsymmetricLayer


def layers_of(net):
    return {name: module for name, module in net.named_modules() if isinstance(module, AsymmetricLayer)}


def mlp():
    torch.manual_seed(0)
    return MLP(16, (24, 24), 5)


def state(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_untouched(net, before):
    assert not layers_of(net)
    assert not hasattr(net, "asymmetry_report")
    after = net.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value)


def test_it_changes_the_network_in_place_and_keeps_its_parameters():
    net = mlp()
    parameters, before = dict(net.named_parameters()), state(net)
    assert asymmetrize(net, n_fix=3) is net
    assert dict(net.named_parameters()).keys() == parameters.keys()
    for name, p in net.named_parameters():  # an optimizer that was built before still trains them
        assert p is parameters[name]
    for name, layer in layers_of(net).items():
        trainable = layer.trainable_entries()
        assert torch.equal(layer.weight[trainable], before[f"{name}.weight"][trainable])
        assert torch.equal(layer.bias, before[f"{name}.bias"])
        assert torch.equal(layer.weight[~trainable].view_as(layer.fixed), layer.fixed)


@pytest.mark.parametrize(
    ("n_fix", "expected"), [(None, (2, 3, 3)), (0.5, (8, 12, 12)), (0.1, (2, 2, 2)), (4, (4, 4, 4))]
)
def test_numbers_and_fractions(n_fix, expected):
    net = asymmetrize(mlp(), n_fix=n_fix)
    assert tuple(layer.n_fix for layer in layers_of(net).values()) == expected
    fixed = sum(n * rows for n, rows in zip(expected, (24, 24, 5), strict=True))
    total = sum(p.numel() for p in mlp().parameters())
    assert num_trainable(net) == total - fixed
    assert fixed_fraction(net) == pytest.approx(fixed / total)


def test_counts_with_frozen_and_shared_layers():
    shared = nn.Linear(16, 16)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(16, 4), nn.Linear(4, 4))
    net[3].weight.requires_grad_(False)
    asymmetrize(net, n_fix=2)
    assert num_trainable(net) == (16 * 16 - 32 + 16) + 4 + (16 - 8 + 4)
    assert fixed_fraction(net) == pytest.approx((32 + 8 + 8) / (272 + 68 + 20))
    assert not net[3].weight.requires_grad


@pytest.mark.parametrize("layout", ["entries", "filters"])
def test_layouts_of_convolutions(layout):
    # Three input channels have too few subsets for 16 rows of filters.
    net = asymmetrize(ResNet(1, num_classes=4), n_fix=2, layout=layout, overrides={"stem": {"layout": "entries"}})
    for name, layer in layers_of(net).items():
        assert layer.layout == ("entries" if name == "stem" else layout)
        size = layer.weight[0, 0].numel() if layer.layout == "filters" else 1
        assert int((~layer.trainable_entries()).sum()) == 2 * size * len(layer.weight)
    net(torch.randn(2, 3, 8, 8)).sum().backward()


def test_constants_of_a_layer_do_not_depend_on_the_others():
    whole, part = asymmetrize(mlp(), n_fix=3), asymmetrize(mlp(), n_fix=3, skip=["linears.0"])
    other = asymmetrize(mlp(), n_fix=3, overrides={"linears.0": {"n_fix": 5, "kappa": 3.0}})
    for name in ("linears.1", "linears.2"):
        for net in (part, other):
            for buffer, value in layers_of(whole)[name].constants().items():
                assert torch.equal(value, layers_of(net)[name].constants()[buffer])
    assert not torch.equal(layers_of(whole)["linears.1"].mask, asymmetrize(mlp(), n_fix=3, seed=1).linears[1].mask)


def test_control_has_the_same_masks_and_small_constants():
    net, control = asymmetrize(mlp(), n_fix=3, kappa=1.0), asymmetrize(mlp(), n_fix=3, kappa=0.02)
    for ours, theirs in zip(layers_of(net).values(), layers_of(control).values(), strict=True):
        assert torch.equal(ours.mask, theirs.mask)
        torch.testing.assert_close(theirs.fixed, 0.02 * ours.fixed)
    zero = asymmetrize(mlp(), n_fix=3, kappa=0)
    assert all((layer.fixed == 0).all() for layer in layers_of(zero).values())


def test_skip_and_overrides():
    net = asymmetrize(
        mlp(),
        n_fix=3,
        skip=["*.2"],
        overrides={"linears.*": {"n_fix": 4}, "linears.1": {"kappa": 0.5}, "*.1": {"n_fix": 6}, "*.2": {"n_fix": 2}},
    )
    assert {n: (m.n_fix, m.kappa) for n, m in layers_of(net).items()} == {"linears.0": (4, 1.0), "linears.1": (6, 0.5)}
    assert net.asymmetry_report.left_alone == {"linears.2": "skipped"}
    reverse = asymmetrize(mlp(), overrides={"*.1": {"n_fix": 6}, "linears.*": {"n_fix": 4}})
    assert reverse.linears[1].n_fix == 4


REFUSED = {
    "row without trainable entry": (
        lambda net: asymmetrize(net, n_fix=16),
        "Layer 'linears.0': n_fix=16 of 16 inputs leaves no trainable entry in a row; at most 15 .* overrides, or skip",
    ),
    "in the last layer": (
        lambda net: asymmetrize(net, n_fix=2, overrides={"linears.2": {"n_fix": 24}}),
        "Layer 'linears.2': n_fix=24 of 24",
    ),
    "kappa in the last layer": (
        lambda net: asymmetrize(net, n_fix=2, overrides={"linears.2": {"kappa": -1}}),
        "Layer 'linears.2': kappa must be positive .* but got -1",
    ),
    "too few masks": (
        lambda net: asymmetrize(net, n_fix=1),
        "24 rows need pairwise distinct masks, but only 16 subsets",
    ),
    "fraction": (lambda net: asymmetrize(net, n_fix=1.5), "a fraction n_fix must lie between 0 and 1, but got 1.5"),
    "whole fraction": (lambda net: asymmetrize(net, n_fix=1.0), "between 0 and 1, but got 1.0. Give an int"),
    "bool": (lambda net: asymmetrize(net, n_fix=True), "n_fix to be a number or a fraction but got True"),
    "kappa": (lambda net: asymmetrize(net, n_fix=3, kappa=-0.5), "Layer 'linears.0': kappa must be positive"),
    "layout": (lambda net: asymmetrize(net, n_fix=3, layout="rows"), "'entries' or 'filters' but got 'rows'"),
    "method": (lambda net: asymmetrize(net, "v"), "`method` to be 'w' or 'sigma' but got 'v'"),
    "scale": (
        lambda net: asymmetrize(net, "w", scale=1.0),
        r"method='w' has no scale; it has \['kappa', 'layout', 'n_fix'\]",
    ),
    "pattern of overrides": (
        lambda net: asymmetrize(net, overrides={"linear.0": {"n_fix": 3}}),
        "`overrides` has the pattern 'linear.0', which matches no layer. The network has 3; the closest names are "
        "'linears.0'",
    ),
    "pattern of skip": (lambda net: asymmetrize(net, skip=["head"]), "`skip` has the pattern 'head', which matches no"),
    "setting": (
        lambda net: asymmetrize(net, overrides={"linears.0": {"nfix": 3}}),
        r"`overrides\['linears.0'\]` sets \['nfix'\], but a layer only has \['kappa', 'layout', 'n_fix'\]",
    ),
    "everything skipped": (lambda net: asymmetrize(net, skip=["*"]), r"nothing to convert in MLP(?s:.)*skipped"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_network_is_untouched(case):
    call, message = REFUSED[case]
    net = mlp()
    before = state(net)
    with pytest.raises(ValueError, match=message):
        call(net)
    assert_untouched(net, before)


def test_nothing_to_convert():
    for net in (nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), nn.Identity()):
        with pytest.raises(ValueError, match="nothing to convert in"):
            asymmetrize(net)


def test_a_second_time_is_refused():
    net = asymmetrize(mlp())
    before = state(net)
    with pytest.raises(ValueError, match=r"W-asymmetric already: linears.0, linears.1, linears.2 \(3 layers\)"):
        asymmetrize(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(("net", "kind"), [(nn.Linear(8, 4), "Linear"), (nn.Conv2d(3, 4, 3), "Conv2d")])
def test_a_network_that_is_one_layer(net, kind):
    with pytest.raises(ValueError, match=rf"is itself a {kind}: build Asymmetric{kind}.from_layer\(net, ...\) or wrap"):
        asymmetrize(net)
    asymmetrize(nn.Sequential(net), n_fix=2)


def test_a_network_that_is_a_subclass_of_a_layer():
    class Own(nn.Linear):
        pass

    nothing = pytest.raises(ValueError, match=r"nothing to convert in Own\.(.|\n)*a subclass of Linear with a forward")
    with pytest.warns(UserWarning, match="a subclass of Linear"), nothing:
        asymmetrize(Own(8, 4))


def test_a_shared_module_is_replaced_everywhere_by_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.block = nn.ModuleDict({"inner": self.first, "own": nn.Linear(8, 8)})
            self.again = self.block

        def forward(self, x):
            return self.again["inner"](self.block["own"](self.first(x)))

    net = asymmetrize(Twice(), n_fix=2)
    assert isinstance(net.first, AsymmetricLinear)
    assert net.first is net.block["inner"]
    assert net.again["own"] is net.block["own"]
    assert len(layers_of(net)) == 2
    assert "shared at 3 places" in str(net.asymmetry_report)
    x = torch.randn(3, 8)
    weight, bias = net.first.canonical_weight(), net.first.bias
    hidden = net.block["own"](x @ weight.T + bias)
    torch.testing.assert_close(net(x), hidden @ weight.T + bias)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 10, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(self.hidden(self.embedding(x)))


def test_tied_weights_are_left_alone_with_a_warning():
    net = Tied()
    with pytest.warns(UserWarning, match=r"left 2 layer.* decoder \(its parameters are tied to embedding\)"):
        asymmetrize(net)
    assert list(layers_of(net)) == ["hidden"]
    assert net.decoder.weight is net.embedding.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asymmetrize(Tied(), skip=["decoder", "embedding"])


def test_weights_tied_to_the_network_itself():
    class Own(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))
            self.kernel = self[0].weight

    with pytest.warns(UserWarning, match=r"0 \(its parameters are tied to the network\)"):
        assert list(layers_of(asymmetrize(Own()))) == ["1"]


def with_hook(register):
    layer = nn.Linear(8, 8)
    getattr(layer, register)(lambda *_: None)
    return layer


LEFT_ALONE = {
    "lazy": (lambda: nn.LazyLinear(8), "its parameters are lazy"),
    "lazy convolution": (lambda: nn.LazyConv2d(8, 3), "its parameters are lazy"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "its weight is parametrised"),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "its weight is parametrised"),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "its weight is parametrised"),
    "pruned": (lambda: prune_half(nn.Linear(8, 8)), "its weight is parametrised"),
    "forward hook": (lambda: with_hook("register_forward_hook"), "it has hooks"),
    "forward pre-hook": (lambda: with_hook("register_forward_pre_hook"), "it has hooks"),
    "backward hook": (lambda: with_hook("register_full_backward_hook"), "it has hooks"),
    "backward pre-hook": (lambda: with_hook("register_full_backward_pre_hook"), "it has hooks"),
    "subclass": (lambda: type("Mine", (nn.Linear,), {})(8, 8), "a subclass of Linear with a forward of its own"),
    "other map": (lambda: nn.Conv3d(1, 1, 1), "its weights are not those of a linear layer or convolution"),
    "recurrent": (lambda: nn.LSTM(8, 8), "its weights are not those of"),
}


def prune_half(layer):
    from torch.nn.utils import prune

    return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize("case", LEFT_ALONE)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*spectral_norm.*:FutureWarning")
def test_layers_that_cannot_be_converted_are_named_and_left_alone(case):
    make, reason = LEFT_ALONE[case]
    layer = make()
    net = nn.ModuleDict({"plain": nn.Linear(8, 8), "other": layer})
    with pytest.warns(UserWarning, match=rf"left 1 layer\(s\) alone: other \({reason}"):
        asymmetrize(net)
    assert net["other"] is layer
    assert list(layers_of(net)) == ["plain"]
    assert reason in net.asymmetry_report.left_alone["other"]


def test_lazy_graph_linear():
    from torch_geometric.nn import Linear

    net = nn.ModuleDict({"plain": Linear(8, 8), "other": Linear(-1, 8)})
    with pytest.warns(UserWarning, match=r"other \(its parameters are lazy: run the network once before\)"):
        asymmetrize(net)
    assert isinstance(net["plain"], AsymmetricLinear)


def test_example_input_finds_layers_that_are_not_called():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x) + nn.functional.linear(x, self.unused.weight)

    with pytest.warns(UserWarning, match=r"unused \(it is not called with the example input\)"):
        net = asymmetrize(Half(), example_input=torch.randn(2, 8))
    assert list(layers_of(net)) == ["used"]


def test_the_warning_points_at_the_caller():
    with pytest.warns(UserWarning, match="left") as caught:
        asymmetrize(Tied())
    assert caught[0].filename == __file__


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_and_mode(dtype):
    net = asymmetrize(mlp().to(dtype).eval(), n_fix=3)
    single = asymmetrize(mlp(), n_fix=3)
    for name, layer in layers_of(net).items():
        assert layer.fixed.dtype == layer.weight.dtype == dtype
        assert torch.equal(layer.fixed, layers_of(single)[name].fixed.to(dtype))
        assert torch.equal(layer.mask, layers_of(single)[name].mask)
        assert not layer.training
    assert net(torch.randn(2, 16, dtype=dtype)).dtype == dtype


def test_meta_network():
    with torch.device("meta"):
        net = asymmetrize(MLP(16, (24, 24), 5), n_fix=3)
    real = asymmetrize(mlp(), n_fix=3, seed=8)
    assert net.state_dict().keys() == real.state_dict().keys()
    net.load_state_dict(real.state_dict(), assign=True)
    x = torch.randn(2, 16)
    assert torch.equal(net(x), real(x))


def test_report():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Embedding(3, 4))
    with pytest.warns(UserWarning):
        asymmetrize(net, n_fix=3, kappa=0.5, skip=["2"])
    report = net.asymmetry_report
    assert report.changed == ["0"]
    lines = str(report).splitlines()
    assert lines[0] == "asymmetrize: 1 of 3 layers changed"
    assert [line.split()[0] for line in lines[1:]] == ["layer", "0", "2", "3"]
    assert lines[2].endswith("3 of 8 entries a row fixed, kappa 0.5")
    assert "left alone  skipped" in lines[3]
    assert "its weights are not those of a linear layer" in lines[4]
    assert str(copy.deepcopy(net).asymmetry_report) == str(report)
    net = asymmetrize(nn.Sequential(nn.Conv2d(4, 4, 3)), n_fix=1, layout="filters")
    assert str(net.asymmetry_report).endswith("1 of 4 filters a row fixed, kappa 1")


def encoder(activation="relu", layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation=activation, batch_first=True)
    return nn.TransformerEncoder(layer, layers)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("example", [None, torch.randn(2, 5, 16)], ids=["no example", "example"])
def test_transformer_encoder(training, example):
    net = encoder().train(training)
    with pytest.warns(UserWarning, match=r"layers.0.self_attn.out_proj \(nn.MultiheadAttention reads its weight"):
        asymmetrize(net, n_fix=4, example_input=example)
    assert list(layers_of(net)) == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert set(net.asymmetry_report.left_alone) == {
        f"layers.{i}.self_attn{part}" for i in (0, 1) for part in ("", ".out_proj")
    }
    assert net.training == training


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()])
def test_evaluation_of_a_transformer_encoder_is_its_forward_with_gradients(activation):
    net = encoder(activation)
    with pytest.warns(UserWarning):
        asymmetrize(net, n_fix=4, kappa=1.0)
    x = torch.randn(3, 5, 16)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    net.eval()
    for arguments in ({}, {"src_key_padding_mask": mask}):
        with torch.no_grad():  # where the plain encoder takes its fast path
            found = net(x, **arguments)
        # Only now: the pass with gradients restores the constants.
        expected = net(x, **arguments)
        keep = ~mask if arguments else torch.ones_like(mask)
        torch.testing.assert_close(found[keep], expected[keep])
        optimizer.step()


def test_window_attention_of_swin_is_named_and_left_alone():
    net = torchvision.models.SwinTransformer([2, 2], 24, [2], [2], [2, 2], num_classes=4)
    with pytest.warns(UserWarning, match=r"attn.qkv \(torchvision's window attention reads its weight"):
        asymmetrize(net, n_fix=3)
    left = net.asymmetry_report.left_alone
    attention = {n for n, m in net.named_modules() if type(m).__name__.startswith("ShiftedWindowAttention")}
    assert attention
    assert set(left) == {f"{name}.{part}" for name in attention for part in ("qkv", "proj")}
    net(torch.randn(2, 3, 16, 16)).sum().backward()
    for name, layer in layers_of(net).items():
        assert (layer.weight.grad[~layer.trainable_entries()] == 0).all(), name


def tiny_vit():
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)


MODELS = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "resnet50": lambda: torchvision.models.resnet50(num_classes=10),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "vit": tiny_vit,
    "convnext_tiny": lambda: torchvision.models.convnext_tiny(num_classes=10),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.filterwarnings("ignore:asymmetrize left")
def test_torchvision_networks(model):
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = MODELS[model]()
    x = torch.randn(2, 3, 32, 32)
    convertible = [
        name for name, m in net.named_modules() if type(m) in (nn.Linear, nn.Conv2d) and not name.endswith("out_proj")
    ]
    asymmetrize(net, n_fix=0.25)
    assert list(layers_of(net)) == convertible == net.asymmetry_report.changed
    for layer in layers_of(net).values():
        for rows in layer.mask.chunk(getattr(layer, "groups", 1)):
            assert len(torch.unique(rows, dim=0)) == len(rows)
        units = layer.weight[0].numel()
        assert layer.n_fix == max(1, round(units / 4))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, weight_decay=0.1)
    net(x).logsumexp(1).sum().backward()
    for name, layer in layers_of(net).items():
        assert (layer.weight.grad[~layer.trainable_entries()] == 0).all(), name
        assert math.isfinite(layer.weight.grad.abs().sum().item())
    optimizer.step()
    saved = net.state_dict()
    for name, layer in layers_of(net).items():
        weight = saved[f"{name}.weight"].flatten(1)
        assert torch.equal(weight[~layer.mask].view_as(layer.fixed), layer.fixed)


def test_grouped_layout_of_filters_that_cannot_fit_says_so():
    with pytest.raises(
        ValueError, match=r"Layer 'features.0.0': .*rows need|features.1.conv.0.0': n_fix=1 of 1 inputs"
    ):
        asymmetrize(torchvision.models.mobilenet_v2(), n_fix=1, layout="filters")


def test_a_compiled_network_has_the_constants_of_the_plain_one() -> None:
    plain, compiled = MLP(8, (12, 12), 3), torch.compile(MLP(8, (12, 12), 3), backend="eager")
    asymmetrize(plain, n_fix=3, kappa=1.0)
    asymmetrize(compiled, n_fix=3, kappa=1.0)
    theirs = {name.replace("_orig_mod.", ""): buffer for name, buffer in compiled.named_buffers()}
    assert theirs.keys() == dict(plain.named_buffers()).keys()
    assert all(buffer.equal(theirs[name]) for name, buffer in plain.named_buffers())
