"""Every optimizer of PyTorch is handed over at the switch, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import INPUTS, OUTPUTS, Regression, assert_in_order, fit, step_by_hand
from torch import nn

from lightning_symmetry.callbacks import SpectralFactorization
from lightning_symmetry.low_rank import LowRankLinear, low_rank_maps

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.02, "momentum": 0.9},
    "ASGD": {"lr": 0.02, "t0": 2},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Adam": {"lr": 3e-3, "amsgrad": True},
}
REFUSED = {
    "LBFGS": "cannot hand LBFGS over",
    "SparseAdam": "SparseAdam takes sparse gradients only",
    "Adadelta": "cannot project the moments of Adadelta: it keeps 'acc_delta'.*Use moments='reset'",
    "Rprop": "cannot project the moments of Rprop: it keeps 'step_size'.*Use moments='reset'",
}
WITH_RESET = ("Adadelta", "Rprop")


class Trained(Regression):
    """A network of matrices, which every optimizer takes, with an optimizer of a kind."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
        torch.manual_seed(0)
        hidden = nn.Linear(INPUTS, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh()
        super().__init__(nn.Sequential(*hidden, nn.Linear(16, OUTPUTS, bias=False)))
        self.kind, self.settings = kind, settings

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), **self.settings)


@pytest.mark.parametrize("moments", ["project", "reset"])
@pytest.mark.parametrize("name", KINDS)
def test_it_goes_on_or_is_refused_before_the_first_step(name, moments):
    module = Trained(KINDS[name], **SETTINGS.get(name, {}))
    callback = SpectralFactorization(at_step=7, rank=3, moments=moments, skip=["net.4"])
    if name in REFUSED and not (moments == "reset" and name in WITH_RESET):
        with pytest.raises(MisconfigurationException, match=REFUSED[name]):
            fit(module, callback)
        assert module.losses == []
        return
    run = fit(module, callback, steps=14)
    assert [type(module.net[index]) for index in (0, 2, 4)] == [LowRankLinear, LowRankLinear, nn.Linear]
    assert_in_order(run, module)
    assert callback.measured["low_rank/loss_after"] == pytest.approx(module.losses[7], rel=1e-6)
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert len(module.losses) == 14


@pytest.mark.parametrize("name", [name for name in KINDS if name not in REFUSED])
def test_at_full_rank_the_loss_goes_on(name):
    """The steps after the switch are no longer than those before it: moments have the right size."""
    module, dense = (Trained(KINDS[name], **SETTINGS.get(name, {})) for _ in range(2))
    fit(module, callback := SpectralFactorization(at_step=20, rank=1.0, min_saving=-1), steps=26)
    fit(dense, steps=26)
    before, after = (callback.measured[f"low_rank/loss_{when}"] for when in ("before", "after"))
    assert after == pytest.approx(before, rel=1e-5)
    spread = max(dense.losses[20:]) - min(dense.losses[20:])
    assert max(module.losses[20:]) < max(dense.losses[20:]) + 0.5 * spread


class Signs(torch.optim.SGD):
    """Keeps something of each entry that nobody knows."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sign"] = parameter.grad.sign()
        return loss


class Sketches(torch.optim.SGD):
    """Keeps something of another shape."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sketch"] = parameter.grad @ parameter.grad.T
        return loss


@pytest.mark.parametrize(("kind", "key"), [(Signs, "sign"), (Sketches, "sketch")])
def test_an_unknown_state_is_refused_after_the_first_step(kind, key):
    module = Trained(kind, lr=0.01)
    with pytest.raises(MisconfigurationException, match=f"moments of {kind.__name__}: it keeps '{key}'"):
        fit(module, SpectralFactorization(at_step=10))
    assert len(module.losses) == 1
    assert not low_rank_maps(module)
    fit(module := Trained(kind, lr=0.01), SpectralFactorization(at_step=3, moments="reset"), steps=5)
    assert low_rank_maps(module)


class TwoOptimizers(Trained):
    """What is not factorised has an optimizer that could not be projected."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        step_by_hand(self, loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:4].parameters(), lr=0.02), torch.optim.Rprop(self.net[4:].parameters())]


def test_an_optimizer_of_layers_that_stay_may_be_any():
    module = TwoOptimizers()
    fit(module, SpectralFactorization(at_step=4, skip=["net.4"]), steps=10)
    assert len(low_rank_maps(module)) == 2
