"""What Calibration refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calibrated import Validated, fit
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny_modules import CLASSES, FEATURES, Plain, loader, samples, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_symmetry.callbacks import Calibration
from lightning_symmetry.modules import VariationalModule


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_bins": 0}, "`num_bins` to be at least 1 but got 0"),
        ({"epochs": (0,)}, r"`epochs` to be at least 1 but got \(0,\)"),
        ({"outputs": "values"}, "`outputs` to be 'logits' or 'probabilities' but got 'values'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        Calibration(**arguments)


class CallsTwice(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.net(batch[0])


class ReturnsTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


class CallsReturnsTwo(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


REFUSED = {
    "two calls": (CallsTwice, {}, "CallsTwice to call its MLP once but got 2 calls.*`predictor=`"),
    "no call": (Validated, {"predictor": ""}, "Validated to call itself once but got 0 calls.*`predictor=`"),
    "no submodule": (Validated, {"predictor": "head"}, r"one of \['net'\], but got 'head'"),
    "no tensor": (lambda: CallsReturnsTwo(ReturnsTwo()), {}, "to be a tensor but got tuple.*`predictor=`"),
    "compiled": (lambda: torch.compile(Validated()), {}, "compiled steps of Validated"),
}


@pytest.mark.parametrize(("build", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused(build, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        trainer(Calibration(**arguments)).validate(build(), loader("val"), verbose=False)


def test_batches_without_targets_are_refused():
    class Inputs(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch)

    with pytest.raises(MisconfigurationException, match="found none in a batch of type Tensor"):
        trainer(Calibration()).validate(Inputs(), DataLoader(samples("val").tensors[0], batch_size=4))


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        (Plain, {}, "this fit has none"),
        (Validated, {"limit_val_batches": 0}, "this fit has none"),
        (Validated, {"check_val_every_n_epoch": 2}, r"after epochs \[3\], but the Trainer validates every 2"),
    ],
)
def test_epochs_without_validation_are_refused_when_fit_starts(module, kwargs, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(module(), Calibration(epochs=(2, 3)), **kwargs)


@pytest.mark.parametrize("outputs", ["probabilities", "values"])
def test_a_bayesian_module_of_other_outputs_is_refused(outputs):
    """Its probabilities would be taken for logits, silently."""
    module = VariationalModule(nn.Sequential(nn.Linear(FEATURES, CLASSES)), outputs=outputs)
    message = f"outputs='logits', but VariationalModule has outputs='{outputs}'"
    with pytest.raises(MisconfigurationException, match=message):
        trainer(Calibration()).validate(module, loader("val"), verbose=False)


def test_loaders_side_by_side_are_refused():
    class Pairs(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0][0])

    loaders = CombinedLoader([loader("val"), loader("test")], "min_size")
    with pytest.raises(MisconfigurationException, match="combined by 'min_size'"):
        trainer(Calibration()).validate(Pairs(), loaders, verbose=False)
