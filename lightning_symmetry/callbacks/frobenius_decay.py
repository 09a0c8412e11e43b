"""Frobenius decay of factorised layers as a callback."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_symmetry.callbacks.spectral_factorization import SpectralFactorization
from lightning_symmetry.low_rank import LowRankMap, add_frobenius_decay_, decay_factors_, low_rank_maps


class FrobeniusDecay(Callback):
    r"""Decay the products of factorised layers, :math:`\frac{\lambda}{2} \|U V^\top\|_F^2`, and not each factor.

    Before each optimizer step, and before gradients are clipped, the gradients of the penalty are added,

    .. math:: G_U \mathrel{+}= \lambda U V^\top V, \qquad G_V \mathrel{+}= \lambda V U^\top U.

    That is decay as the ``weight_decay`` of ``torch.optim.SGD``: momentum, Adam's moments and clipping see it. With
    ``decoupled`` the factors themselves are decayed by as much times the learning rate of their group, as AdamW does.

    Layers without factors have no part in it: give the optimizer a group with ``weight_decay`` for them, and one with
    ``weight_decay=0`` for the factors. Beside :class:`SpectralFactorization` it begins with the switch; factors then
    are in the group of their weight, with its ``weight_decay``. Where the optimizer decays factors too this warns.

    Args:
        weight: :math:`\lambda`.
        decoupled: Whether to decay the factors in place of adding gradients.

    Raises:
        MisconfigurationException: If the weight is negative or not finite, or the network has no factors and is not
            going to have any.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3.

    Example::

        >>> from lightning_symmetry.callbacks.frobenius_decay import FrobeniusDecay
        >>> callback = FrobeniusDecay(1e-4)
    """

    def __init__(self, weight: float, decoupled: bool = False) -> None:
        super().__init__()
        if not (weight >= 0 and math.isfinite(weight)):
            raise MisconfigurationException(f"Expected `weight` to be at least 0 and finite but got {weight}.")
        self.weight, self.decoupled = weight, decoupled
        self._warned = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warned = False
        later = any(isinstance(callback, SpectralFactorization) for callback in trainer.callbacks)
        if not later and not low_rank_maps(pl_module):
            raise MisconfigurationException(
                f"FrobeniusDecay decays factors, but {type(pl_module).__name__} has none: call factorize() on its "
                "network or add SpectralFactorization."
            )

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        for name, layer, group in _stepped(pl_module, optimizer):
            if group.get("weight_decay") and self.weight and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"{type(optimizer).__name__} decays the factors of {name} with weight_decay="
                    f"{group['weight_decay']}, and FrobeniusDecay decays their product: give factors a group with "
                    "weight_decay=0."
                )
            if self.decoupled:
                decay_factors_(layer, float(group["lr"]) * self.weight)
            else:
                add_frobenius_decay_(layer, self.weight)


def _stepped(module: pl.LightningModule, optimizer: Optimizer) -> Iterator[tuple[str, LowRankMap, dict[str, Any]]]:
    """Yield the factorised maps that an optimizer is about to step on, each with the group of its factor U."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, layer in low_rank_maps(module).items():
        if (group := groups.get(id(layer.left))) is not None:
            yield name, layer, group
