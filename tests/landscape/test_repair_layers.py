"""Which layers are repaired, and which are left alone: outputs, those before batch norm, those that cannot be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from repair_networks import (
    CLASSES,
    SAMPLES,
    SHAPES,
    axes_before_norm,
    bn_cnn,
    data,
    mixed,
    mlp,
    moments,
    pair,
    samples,
)
from torch import Tensor, nn

from lightning_symmetry import asymmetrize, interpolate
from lightning_symmetry.landscape import repair
from lightning_symmetry.landscape.steps import supervised_step


def reset_by_hand(net: nn.Module, batches) -> nn.Module:
    net = copy.deepcopy(net).eval()
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
    with torch.no_grad():
        for x, _ in batches:
            net(x)
    return net.eval()


@pytest.mark.parametrize("with_ends", [False, True])
def test_with_batch_norm_behind_each_layer_it_is_the_reset(with_ends):
    a, b = pair(bn_cnn)
    net = interpolate(a, b, 0.5)
    expected = reset_by_hand(net, data(SHAPES[bn_cnn])).state_dict()
    momenta = [m.momentum for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    repair(net, data(SHAPES[bn_cnn]), (a, b) if with_ends else None, progress=False)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=0)
        if "running" not in name and "tracked" not in name:
            assert torch.equal(value, interpolate(a, b, 0.5).state_dict()[name])
    assert momenta == [m.momentum for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize("build", [mixed, axes_before_norm])
def test_only_layers_that_batch_norm_does_not_undo_are_corrected(build):
    a, b = pair(build)
    net = interpolate(a, b, 0.5)
    before = copy.deepcopy(net.state_dict())
    repair(net, data(SHAPES[build], SAMPLES), (a, b), progress=False)
    assert torch.equal(net[0].weight, before["0.weight"])
    assert torch.equal(net[0].bias, before["0.bias"])
    # With one batch the equations hold under its own statistics.
    x, _ = samples(SHAPES[build])
    found = moments(net.train(), x)
    first, second = moments(a.eval(), x), moments(b.eval(), x)
    for name in ["3", "7"] if build is mixed else ["3"]:
        for i in (0, 1):
            expected = (first[name][i] + second[name][i]) / 2
            torch.testing.assert_close(found[name][i], expected, rtol=1e-11, atol=1e-11)
    expected = reset_by_hand(net, data(SHAPES[build], SAMPLES)).state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-11)


class Heads(nn.Module):
    """Two outputs, one of which is written into a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).relu()
        output = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        output[:, :2] = self.left(hidden)
        output[:, 2] = self.right(hidden).squeeze(1)
        return output


class Loss(nn.Module):
    """A module that gives its loss, with the network and the criterion within."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = mlp(), nn.CrossEntropyLoss()


def loss_step(net: Loss, batch):
    return net.criterion(net.net(batch[0]), batch[1]).detach(), len(batch[1])


def item_step(net: nn.Module, batch):
    return torch.tensor(F.cross_entropy(net(batch[0]), batch[1]).item()), len(batch[1])


OUTPUTS = {
    "activation": (lambda: nn.Sequential(*mlp(), nn.LogSoftmax(1)), supervised_step, ["4"], ["0", "2"]),
    "selection": (mlp, lambda net, batch: (net(batch[0])[batch[1] > 0], batch[1]), ["4"], ["0", "2"]),
    "features too": (
        mlp,
        lambda net, batch: ([net(batch[0]), {"features": net[2](net[1](net[0](batch[0])))}], batch[1]),
        ["2", "4"],
        ["0"],
    ),
    "two heads": (Heads, supervised_step, ["left", "right"], ["body"]),
    "loss": (Loss, loss_step, ["net.4"], ["net.0", "net.2"]),
    "a number": (mlp, item_step, ["4"], ["0", "2"]),
    "norm last": (lambda: nn.Sequential(*mlp(), nn.LayerNorm(CLASSES)), supervised_step, ["5"], ["0", "2", "4"]),
}


@pytest.mark.parametrize("case", OUTPUTS.values(), ids=OUTPUTS)
def test_output_layers_are_left_alone(case):
    build, step, outputs, hidden = case
    a, b = pair(build)
    net = interpolate(a, b, 0.5)
    before = copy.deepcopy(net.state_dict())
    repair(net, data((6,)), (a, b), step=step, progress=False)
    changed = {
        name.rpartition(".")[0] for name, value in net.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == set(hidden)
    assert not changed & set(outputs)


def w_mlp() -> nn.Module:
    return asymmetrize(mlp(), n_fix=2, kappa=1.0, seed=5, skip=["0"])


def test_layers_with_fixed_entries_are_left_alone():
    a, b = pair(w_mlp)
    net = interpolate(a, b, 0.5)
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(UserWarning, match="REPAIR leaves 2 alone: constants"):
        repair(net, data((6,)), (a, b), progress=False)
    changed = [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["0.weight", "0.bias"]
    a, b = pair(lambda: asymmetrize(mlp(), n_fix=2, kappa=1.0, seed=5))
    with pytest.raises(ValueError, match="nothing to repair"), pytest.warns(UserWarning, match="leaves 0, 2 alone"):
        repair(interpolate(a, b, 0.5), data((6,)), (a, b), progress=False)


class Standardised(nn.Linear):
    """Undoes a rescaling of its weight by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Tied(nn.Module):
    """Two layers of one weight, one of another forward, a weight norm and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.own = Standardised(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.idle = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.plain, self.one, self.two, self.own, self.normed):
            x = layer(x).relu()
        return self.last(x)


def test_layers_that_cannot_be_rescaled_are_left_alone():
    a, b = pair(Tied)
    net = interpolate(a, b, 0.5)
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(UserWarning, match="leaves one, two, own, normed alone"):
        repair(net, data((6,)), (a, b), progress=False)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"plain.weight", "plain.bias"}
    assert net.one.weight is net.two.weight


def test_attention_is_left_alone_and_its_feed_forward_part_is_not():
    def build():
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        return nn.Sequential(nn.Linear(5, 8), layer, nn.Flatten(), nn.Linear(32, CLASSES))

    a, b = pair(build)
    net = interpolate(a, b, 0.5)
    before = copy.deepcopy(net.state_dict())
    repair(net, data((4, 5)), (a, b), progress=False)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    layers = ("0", "1.linear1", "1.linear2")
    assert changed == {f"{name}.{part}" for name in layers for part in ("weight", "bias")}
    x, _ = samples((4, 5))
    found = []
    for part in (net, a, b):  # written out: post-norm attention, then the first layer of the feed-forward part
        part.eval()
        with torch.no_grad():
            inner = part[0](x)
            inner = part[1].norm1(inner + part[1].self_attn(inner, inner, inner)[0])
            found.append(F.linear(inner, part[1].linear1.weight, part[1].linear1.bias).flatten(0, 1))
    for statistic in (lambda h: h.mean(0), lambda h: h.std(0, correction=0)):
        ours, first, second = map(statistic, found)
        torch.testing.assert_close(ours, (first + second) / 2, rtol=1e-11, atol=1e-11)
