"""The submodule of a LightningModule that gives its predictions."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.loss import _Loss
from torchmetrics import Metric, MetricCollection

MEASURES = (Metric, MetricCollection, _Loss)
"""What a module has beside its network."""


def predictor_of(module: pl.LightningModule, name: str | None = None) -> nn.Module:
    """Return the submodule whose output is the prediction.

    Args:
        module: The module.
        name: Its dotted name, ``""`` for the module itself. None: the only child with parameters, those of metrics and
            losses aside, if it can be called and the module has none of its own; or else the module itself.

    Raises:
        MisconfigurationException: If there is none of this name.
    """
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            names = [child for child, _ in module.named_children()]
            raise MisconfigurationException(
                f"Expected `predictor` to name a submodule of {type(module).__name__}, such as one of {names}, but got "
                f"{name!r}."
            ) from None
    others = {p for part in module.modules() if isinstance(part, MEASURES) for p in part.parameters()}
    children = [child for child in module.children() if any(p not in others for p in child.parameters())]
    own = any(True for _ in module.parameters(recurse=False))
    called = len(children) == 1 and not own and not isinstance(children[0], nn.ModuleList | nn.ModuleDict)
    return children[0] if called else module
