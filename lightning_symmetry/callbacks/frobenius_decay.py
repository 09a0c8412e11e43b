"""Frobenius decay of factorised layers, and of dense ones by the same norm, as a callback."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_symmetry.callbacks.spectral_factorization import SpectralFactorization
from lightning_symmetry.low_rank.decay import add_to_gradient_, decay_, decayed_parts, directions
from lightning_symmetry.low_rank.layer import LowRankMap


class FrobeniusDecay(Callback):
    r"""Decay the products of factorised layers, :math:`\frac{\lambda}{2} \|U V^\top\|_F^2`, and not each factor.

    Before each optimizer step, and before gradients are clipped, the gradients of the penalty are added,

    .. math:: G_U \mathrel{+}= \lambda U V^\top V, \qquad G_V \mathrel{+}= \lambda V U^\top U.

    That is decay as the ``weight_decay`` of ``torch.optim.SGD``: momentum, Adam's moments and clipping see it. With
    ``decoupled`` the factors themselves are decayed by as much times the learning rate of their group, as AdamW does.
    As with either, parameters without a gradient are left alone.

    With ``dense`` layers without factors have the same penalty, :math:`\frac{\lambda}{2} \|W\|_F^2`: those that stay
    dense, and beside :class:`SpectralFactorization` all of them from the first step, so that at the switch only what
    truncation takes away is missing from it. These are linear layers, convolutions, embeddings and attention; of layers
    in other coordinates, such as those with fixed entries, it is the canonical weight that is penalised, and constants
    stay what they are (:func:`~lightning_symmetry.low_rank.decay.decayed_parts`). The optimizer then has
    ``weight_decay=0`` for all matrices, and decays what else it is to decay.

    Without ``dense`` such layers have no part in it: give the optimizer a group with ``weight_decay`` for them, and one
    with ``weight_decay=0`` for the factors. Beside :class:`SpectralFactorization` it then begins with the switch;
    factors are in the group of their weight, with its ``weight_decay``. Where the optimizer decays what this decays it
    warns.

    Args:
        weight: :math:`\lambda`.
        decoupled: Whether to decay the parameters in place of adding gradients.
        dense: Whether weights without factors are decayed too.

    Raises:
        MisconfigurationException: If the weight is negative or not finite, or the network has nothing to decay and is
            not going to have factors.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3.

    Example::

        >>> from lightning_symmetry.callbacks.frobenius_decay import FrobeniusDecay
        >>> callback = FrobeniusDecay(1e-4)
    """

    def __init__(self, weight: float, decoupled: bool = False, dense: bool = False) -> None:
        super().__init__()
        if not (weight >= 0 and math.isfinite(weight)):
            raise MisconfigurationException(f"Expected `weight` to be at least 0 and finite but got {weight}.")
        self.weight, self.decoupled, self.dense = weight, decoupled, dense
        self._warned = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warned = False
        later = any(isinstance(callback, SpectralFactorization) for callback in trainer.callbacks)
        if not later and not decayed_parts(pl_module, self.dense):
            what = "weights, but {} has none that are matrices"
            if not self.dense:
                what = (
                    "factors, but {} has none: call factorize() on its network, add SpectralFactorization, or give "
                    "`dense=True` for weights without factors"
                )
            raise MisconfigurationException(f"FrobeniusDecay decays {what.format(type(pl_module).__name__)}.")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.decoupled and _is_skipped(trainer, optimizer):
            return
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        scaled = self.weight * _gradient_scale(trainer, optimizer)
        for name, part in decayed_parts(pl_module, self.dense).items():
            for parameter, direction in directions(part):
                if (group := groups.get(id(parameter))) is None:
                    continue  # another optimizer's
                if parameter.grad is None:
                    continue  # the optimizer leaves it alone, too
                if group.get("weight_decay") and self.weight:
                    self._warn(optimizer, name, isinstance(part, LowRankMap), group["weight_decay"])
                if self.decoupled:
                    decay_(parameter, direction, float(group["lr"]) * self.weight)
                else:
                    add_to_gradient_(parameter, direction, scaled)

    def _warn(self, optimizer: Optimizer, name: str, factorised: bool, weight_decay: float) -> None:
        """Warn, once a fit, that the optimizer decays what this decays."""
        if self._warned:
            return
        self._warned = True
        theirs, ours = (f"the factors of {name}", "their product") if factorised else (name, "it")
        rank_zero_warn(
            f"{type(optimizer).__name__} decays {theirs} with weight_decay={weight_decay}, and FrobeniusDecay decays "
            f"{ours} too: give {'matrices' if self.dense else 'factors'} a group with weight_decay=0."
        )


def _is_skipped(trainer: pl.Trainer, optimizer: Optimizer) -> bool:
    """Whether the scaler of fp16 is not going to take the step, because a gradient has overflowed."""
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        return False
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def _gradient_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Return what gradients are multiplied by: a fused optimizer itself takes out the scale of fp16, in its step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    within = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    return float(scaler.get_scale()) if within else 1.0
