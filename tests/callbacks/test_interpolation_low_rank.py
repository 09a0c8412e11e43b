"""The segment between dense and factorised networks has the products of the factors at its end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import INPUTS, OUTPUTS, Regression, WithLayout, fit, loader, network
from torch import Tensor, nn

from lightning_symmetry import LinearInterpolation, asymmetrize, factorize, interpolate, parameter_distance, recompose
from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import LowRankConv2d, LowRankEmbedding, LowRankMultiheadAttention


class Mixed(nn.Module):
    """Convolutions, batch normalisation, attention, and a table that is tied to a layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, (3, 2), groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.table, self.out = nn.Embedding(6, 8), nn.Linear(8, 6)
        self.out.weight = self.table.weight
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(3, device=x.device)
        x = self.grouped(self.norm(self.conv(x.view(-1, 1, 3, 4))).relu()).flatten(2).mT
        x = x + self.table(places)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.out(x).tanh().mean(1))


def switch(rank: float = 2, **settings: Any) -> SpectralFactorization:
    return SpectralFactorization(at_step=4, rank=rank, skip=["net.head"], min_saving=-1, **settings)


def path_to(reference: Any, **settings: Any) -> LinearInterpolation:
    defaults = {"num_points": 11, "split": "train", "progress": False}
    return LinearInterpolation(reference=reference, **{**defaults, **settings})


def loss_of(net: nn.Module) -> float:
    """Return the loss over all batches, which are of the same size."""
    net = copy.deepcopy(net).eval()
    with torch.no_grad():
        return sum(float(F.mse_loss(net(x), y)) for x, y in loader()) / len(loader())


def assert_between(path: LinearInterpolation, start: nn.Module, end: nn.Module) -> None:
    """The ends are these networks as they are; in between there are the dense ones."""
    assert path.result.loss[0] == pytest.approx(loss_of(start), rel=1e-5)
    assert path.result.loss[-1] == pytest.approx(loss_of(end), rel=1e-5)
    a, b = (recompose(copy.deepcopy(net)) for net in (start, end))
    for index in (3, 5):
        assert path.result.loss[index] == pytest.approx(loss_of(interpolate(a, b, index / 10)), rel=1e-5)
    assert path.distance == pytest.approx(parameter_distance(a, b), rel=1e-5)


def saved(module: Regression, folder: Path, *callbacks: Any) -> str:
    """Train a module and return the path of its checkpoint."""
    saver = ModelCheckpoint(folder, filename="end", save_last=False)
    fit(module, *callbacks, saver, steps=8, enable_checkpointing=True)
    return saver.best_model_path


@pytest.mark.parametrize("kind", ["module", "network", "checkpoint"])
@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_a_dense_reference_and_a_network_that_is_factorised_in_the_fit(scheme, kind, tmp_path):
    dense = Regression(Mixed(1))
    path = saved(dense, tmp_path)
    reference = {"module": dense, "network": dense.net, "checkpoint": path}[kind]
    module, found = Regression(Mixed()), path_to(reference)
    fit(module, switch(scheme=scheme), found, steps=8)
    kinds = [type(module.net.get_submodule(name)) for name in ("grouped", "attention", "table")]
    assert kinds == [LowRankConv2d, LowRankMultiheadAttention, LowRankEmbedding]
    assert module.net.out.left is module.net.table.left
    assert_between(found, dense.net, module.net)


@pytest.mark.parametrize("ours", ["dense", "before", "within"])
@pytest.mark.parametrize("kind", [Regression, WithLayout])
@pytest.mark.parametrize("given", ["module", "checkpoint"])
def test_a_factorised_reference(given, kind, ours, tmp_path):
    """And a network that stays dense, that is factorised before the fit, or within it, at another rank."""
    low = kind(Mixed(1))
    path = saved(low, tmp_path, switch(rank=3))
    module = Regression(Mixed() if ours != "before" else factorize(Mixed(), 2, skip=["head"], min_saving=-1))
    found = path_to(low if given == "module" else path)
    fit(module, *([switch(scheme="1xk-kx1")] if ours == "within" else []), found, steps=8)
    assert isinstance(module.net.table, LowRankEmbedding) == (ours != "dense")
    assert_between(found, low.net, module.net)


@pytest.mark.parametrize("before", [True, False])
def test_from_the_initialisation(before):
    module = Regression(factorize(Mixed(), 2, skip=["head"], min_saving=-1) if before else Mixed())
    start, found = copy.deepcopy(module.net), path_to("init")
    fit(module, *([] if before else [switch()]), found, steps=8)
    assert_between(found, start, module.net)


def test_from_an_initialisation_with_constants_that_are_given_up():
    module = Regression(asymmetrize(network(), n_fix=2, kappa=1.0))
    start, found = copy.deepcopy(module.net), path_to("init")
    fit(module, SpectralFactorization(at_step=4, skip=["net.4"]), found, steps=8)
    assert found.result.loss[0] == pytest.approx(loss_of(start), rel=1e-5)
    assert found.result.loss[-1] == pytest.approx(loss_of(module.net), rel=1e-5)


class Still(Regression):
    """Stays as it is in training, statistics and all."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.eval()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("batch_norm", ["recompute", "repair"])
def test_statistics_of_batch_norm_are_taken_anew(batch_norm):
    dense, module = Regression(Mixed(1)), Regression(Mixed())
    fit(dense, steps=8)
    found = path_to(dense, batch_norm=batch_norm)
    fit(module, switch(), found, steps=8)
    plain = recompose(copy.deepcopy(module.net))
    again = path_to(dense, batch_norm=batch_norm)
    fit(Still(plain), again, steps=1)
    torch.testing.assert_close(found.result.loss, again.result.loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("align", ["weights", "activations"])
def test_a_factorised_network_is_aligned_to(align):
    """The reference is the network itself with its hidden units permuted: all of the path has its loss."""
    module = Regression(network())
    fit(module, SpectralFactorization(at_step=4, rank=3, skip=["net.4"]), steps=8)
    plain = recompose(copy.deepcopy(module.net))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain[0].weight.copy_(plain[0].weight[order])
        plain[0].bias.copy_(plain[0].bias[order])
        plain[2].weight.copy_(plain[2].weight[:, order])
    found, still = path_to(plain, align=align), Still(module.net)
    still.example_input_array = torch.zeros(1, INPUTS)
    fit(still, found, steps=1)
    assert found.alignment is not None
    expected = torch.full((11,), loss_of(module.net), dtype=torch.float64)
    torch.testing.assert_close(found.result.loss, expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_reference(tmp_path):
    low = Regression(torch.compile(network(), backend="eager"))
    path = saved(low, tmp_path, SpectralFactorization(at_step=4, skip=["*4"]))
    module, found = Regression(network()), path_to(path)
    fit(module, found, steps=4)
    assert found.result.loss[0] == pytest.approx(loss_of(low.net._orig_mod), rel=1e-5)


def test_factors_of_another_size_are_refused(tmp_path):
    wide = nn.Sequential(nn.Linear(INPUTS, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))
    path = saved(Regression(wide), tmp_path, SpectralFactorization(at_step=4, skip=["net.4"]))
    with pytest.raises(MisconfigurationException, match=r"architecture: the factors of net\.0 are not those"):
        fit(Regression(), path_to(path), steps=1)


def test_networks_with_tied_weights_are_compared_without_a_trainer():
    dense, low = Mixed(1), factorize(Mixed(), 1.0, skip=["head"], min_saving=-1)
    middle = interpolate(dense, low, 0.5)
    assert middle.out.weight is middle.table.weight
    expected = interpolate(dense, Mixed(), 0.5)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(middle.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert parameter_distance(dense, low) == pytest.approx(parameter_distance(dense, Mixed()), rel=1e-5)
