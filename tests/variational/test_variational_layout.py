"""A network gets the posterior of another one's layout, whatever it was before, and then loads its state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from variational_cases import images, small_network

from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.low_rank import factorize
from lightning_symmetry.variational import (
    VariationalLayer,
    apply_layout,
    kl_divergence,
    layout_of,
    sampling_mode,
    to_mean,
    to_variational,
    variational_layers,
)

OVERRIDES = {"5": {"diagonal": "learned", "prior": "optimal", "rank": 0}, "7": {"mode": "shared", "variance": 0.02}}


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([self.first, nn.Linear(4, 4), self.first])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def shared() -> nn.Module:
    torch.manual_seed(0)
    return Shared()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": small_network,
    "asymmetric": lambda: asymmetrize(small_network(), n_fix=0.2, kappa=0.5, seed=1),
    "factorised": lambda: factorize(small_network(), 0.5, min_saving=-1),
    "shared": shared,
}
INPUTS = {"shared": torch.arange(6).view(2, 3)}


def bayesian(kind: str) -> nn.Module:
    net = NETWORKS[kind]()
    net = to_variational(net, 2, variance=0.05, prior="fan_in:100", overrides={} if kind == "shared" else OVERRIDES)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return net.eval()


BEFORE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deterministic": lambda net: net,
    "other": lambda net: to_variational(net, 3, diagonal="learned", mode="weight"),
    "mean": lambda net: to_mean(to_variational(net, 1)),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_takes_the_layout_and_state_of_another(kind, before):
    whole = bayesian(kind)
    file = io.BytesIO()
    torch.save({"layout": layout_of(whole), "state": whole.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    net = BEFORE[before](NETWORKS[kind]())
    apply_layout(net, saved["layout"])
    net.load_state_dict(saved["state"])
    assert layout_of(net.eval()) == saved["layout"]
    assert torch.equal(kl_divergence(net), kl_divergence(whole))
    inputs = INPUTS.get(kind, images())
    torch.manual_seed(3)
    expected = whole(inputs)
    torch.manual_seed(3)
    assert torch.equal(net(inputs), expected)
    if kind == "shared":
        assert net.blocks[0] is net.blocks[2] is net.first and isinstance(net.first, VariationalLayer)
    with sampling_mode(whole, "mean"):
        assert torch.equal(to_mean(net)(inputs), whole(inputs))


def test_settings_are_told_layer_by_layer():
    found = layout_of(bayesian("plain"))
    defaults = {"rank": 2, "diagonal": "constant", "variance": 0.05, "prior": "fan_in:100", "mode": "local"}
    assert found["0"] == {**defaults, "scale": None}
    assert found["5"] == {**defaults, "scale": None, **OVERRIDES["5"]}
    net = to_variational(small_network(), variance=np.float64(0.1))
    net[0].mode = "weight"
    assert layout_of(net)["0"]["mode"] == "weight" and type(layout_of(net)["0"]["variance"]) is float
    assert layout_of(small_network()) == {}


def test_the_same_layout_changes_nothing():
    net = bayesian("plain")
    layers, state = variational_layers(net), copy.deepcopy(net.state_dict())
    apply_layout(net, layout_of(net))
    assert all(layer is layers[name] for name, layer in variational_layers(net).items())
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name])


def test_an_empty_layout_is_the_mean():
    net, expected = bayesian("plain"), to_mean(copy.deepcopy(bayesian("plain")))
    apply_layout(net, {})
    assert layout_of(net) == {}
    assert torch.equal(net(images()), expected(images()))


def test_parameters_made_in_inference_mode_can_be_trained():
    net, layout = small_network(), layout_of(bayesian("plain"))
    with torch.inference_mode():
        apply_layout(net, layout)
    assert not any(parameter.is_inference() for parameter in net.parameters())
    net(images()).sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nowhere": {"rank": 2}}, "has no layer of that name"),
        ({"1": {"rank": 2}}, "has a posterior for '1', but it is a BatchNorm2d"),
        ({"0": {"rank": -1}}, "Expected `rank` to be an int of at least 0"),
    ],
)
@pytest.mark.parametrize("before", BEFORE)
def test_a_layout_that_does_not_fit_changes_nothing(before, change, message):
    net = BEFORE[before](small_network())
    modules, state = list(net.modules()), list(net.state_dict())
    with pytest.raises(ValueError, match=message):
        apply_layout(net, {**layout_of(bayesian("plain")), **change})
    assert list(net.modules()) == modules and list(net.state_dict()) == state
