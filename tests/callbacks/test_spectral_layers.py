"""Every kind of layer gets factors in the middle of training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from spectral_runs import INPUTS, OUTPUTS, Mixed, Regression, Rows, assert_in_order, fit, loader, network
from tiny_modules import trainer
from torch import Tensor, nn

from lightning_symmetry import asymmetrize
from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import LowRankConv2d, LowRankMultiheadAttention


@pytest.mark.parametrize("moments", ["project", "reset"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_all_kinds_of_layers(optimizer, moments, scheme):
    torch.manual_seed(0)
    module = Regression(Mixed(), optimizer)
    callback = SpectralFactorization(at_step=4, rank=1.0, min_saving=-1, scheme=scheme, moments=moments)
    run = fit(module, callback, steps=8)
    assert isinstance(module.net.conv, LowRankConv2d)
    assert isinstance(module.net.attention, LowRankMultiheadAttention)
    assert module.net.decode.left is module.net.encode.left
    assert_in_order(run, module)
    assert callback.measured["low_rank/loss_after"] == pytest.approx(
        callback.measured["low_rank/loss_before"], rel=1e-5
    )


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_layers_with_constants(optimizer):
    module = Regression(asymmetrize(network(), n_fix=2, kappa=1.0), optimizer)
    callback = SpectralFactorization(at_step=4, rank=1.0, min_saving=-1)
    run = fit(module, callback, steps=8)
    assert_in_order(run, module)
    loss = callback.measured["low_rank/loss_before"]
    assert callback.measured["low_rank/loss_after"] == pytest.approx(loss, rel=1e-5)


def test_a_compiled_network():
    module, plain = Regression(torch.compile(network(), backend="eager")), Regression()
    for one in (module, plain):
        run = fit(one, SpectralFactorization(at_step=5), steps=10)
        assert_in_order(run, one)
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)


class Language(nn.Module):
    """A table of words, and a head that is tied to it by a function alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(20, 12), nn.Linear(12, 12)
        self.head = nn.Linear(20, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.table((x.abs() * 7).long() % 20)).tanh()
        return self.head(F.linear(hidden, self.table.weight).mean(1))


class SharedLayer(nn.Module):
    """Has one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)
        self.again = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.first(x).tanh()))


class Encoder(nn.Module):
    """In evaluation it takes a path of its own where it can, which reads weights."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.embed, self.encoder = nn.Linear(4, 8), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 3, 4))).mean(1))


NETS = {
    "functional tying": Language,
    "shared module": SharedLayer,
    "encoder": Encoder,
    "encoder, norm first": lambda: Encoder(norm_first=True),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("net", NETS)
def test_networks_that_use_weights_in_their_own_way(net, optimizer):
    """The function is the same on both sides of the switch, in training and in evaluation."""
    module, logger = Regression(NETS[net](), optimizer), Rows()
    callback = SpectralFactorization(at_step=4, rank=1.0, min_saving=-1)
    run = trainer(callback, max_epochs=3, logger=logger, num_sanity_val_steps=0)
    run.fit(module, loader(), loader())
    assert_in_order(run, module)
    loss = callback.measured["low_rank/loss_before"]
    assert callback.measured["low_rank/loss_after"] == pytest.approx(loss, rel=1e-5)
    (seen,) = (row["val"] for row in logger.rows if row.get("epoch") == 2 and "val" in row)
    with torch.no_grad():
        losses = [F.mse_loss(module.train()(x), y) for x, y in loader()]
    assert seen == pytest.approx(float(sum(losses)) / len(losses), rel=1e-5)
    assert len(run.optimizers[0].state) == len(list(module.parameters()))  # all of them had gradients
