"""The waterfall schedule: divide the learning rate where the validation error stops to improve."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from typing_extensions import override

from lightning_symmetry.surgery.learning_rates import all_schedulers


class WaterfallLR(Callback):
    r"""Divide the learning rate by a factor where the validation error fails to improve.

    After each evaluation the monitored value :math:`e_t` is compared with the best :math:`e^*` so far. It has improved
    if

    .. math:: e_t < e^* - \rho\,|e^*|

    (for ``mode="max"``, if it is as much larger), and then becomes the best. After ``patience`` evaluations on end
    without improvement each learning rate is divided by ``factor`` and counting starts anew. Slow progress counts: the
    evaluations of a row are compared with the best before it, not with each other. A value that is not finite is no
    improvement.

    Every evaluation of ``fit`` counts, so that ``Trainer(val_check_interval=1000, check_val_every_n_epoch=None)``
    evaluates as often as the paper does on CIFAR-10. In a distributed run the mean over the ranks is compared. The
    learning rates of all groups of all optimizers are divided, and the base learning rates of schedulers with them: a
    ``LambdaLR``, ``StepLR`` or cosine goes on from the divided one.

    Logs ``waterfall/lr`` (of the first group) and ``waterfall/divisions`` after each evaluation to every logger.

    Args:
        monitor: Name of the value as it was logged, for example ``"val/loss"``.
        factor: What to divide by.
        improvement: Relative improvement :math:`\rho` that is asked for.
        patience: Evaluations without it until the learning rate is divided. The paper takes 4 of 1000 updates each on
            CIFAR-10, 1 of an epoch on ImageNet.
        mode: Whether ``"min"`` or ``"max"`` is better.
        min_lr: Learning rates are not divided below this.
        verbose: Whether to say when it is divided.

    Attributes:
        best: The best value.
        waited: Evaluations since the last improvement or division.
        divisions: Number of divisions.

    Raises:
        MisconfigurationException: If an argument is out of range, ``fit`` does not evaluate, nothing was logged under
            the name, or a scheduler (``OneCycleLR``, ``CyclicLR``) would overwrite the divided learning rate.

    Source: Natural Neural Networks (2015), section 4.3, footnote 4.

    Example::

        >>> from lightning_symmetry.callbacks.waterfall import WaterfallLR
        >>> callback = WaterfallLR(monitor="val/loss", factor=10, improvement=0.01, patience=4)
    """

    def __init__(
        self,
        monitor: str = "val/loss",
        factor: float = 10.0,
        improvement: float = 0.01,
        patience: int = 4,
        mode: Literal["min", "max"] = "min",
        min_lr: float = 0.0,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        if not (factor > 1 and math.isfinite(factor)):
            raise MisconfigurationException(f"Expected `factor` to be more than 1 but got {factor}.")
        if not 0 <= improvement < 1:
            raise MisconfigurationException(f"Expected `improvement` to be in [0, 1) but got {improvement}.")
        if patience < 1:
            raise MisconfigurationException(f"Expected `patience` to be at least 1 but got {patience}.")
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"Expected `mode` to be 'min' or 'max' but got {mode!r}.")
        if not min_lr >= 0:
            raise MisconfigurationException(f"Expected `min_lr` to be at least 0 but got {min_lr}.")
        self.monitor, self.factor, self.improvement, self.patience = monitor, factor, improvement, patience
        self.mode, self.min_lr, self.verbose = mode, min_lr, verbose
        self._reset()

    def _reset(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.waited, self.divisions = 0, 0

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset()  # what an earlier fit left; the state of a checkpoint is loaded after this

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if sum(isinstance(callback, WaterfallLR) for callback in trainer.callbacks) > 1:
            raise MisconfigurationException("Several WaterfallLR would divide the same learning rates; leave one.")
        if not trainer.enable_validation:
            raise MisconfigurationException(
                f"WaterfallLR monitors {self.monitor!r} after each evaluation, but this fit has none: give it a "
                "val_dataloader and the module a validation_step."
            )
        for scheduler in all_schedulers(config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(scheduler, OneCycleLR | CyclicLR):
                raise MisconfigurationException(
                    f"{type(scheduler).__name__} sets the learning rate anew at each step and would overwrite what "
                    "WaterfallLR divides; use one of the two."
                )

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = self._monitored(trainer)
        better = self.best - value if self.mode == "min" else value - self.best
        if math.isfinite(value) and (math.isinf(self.best) or better > self.improvement * abs(self.best)):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            self._divide(trainer)
            self.waited = 0
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        for logger in trainer.loggers:
            scalars = {"waterfall/lr": rate, "waterfall/divisions": self.divisions}
            logger.log_metrics(scalars, step=trainer.global_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "divisions": self.divisions}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited, self.divisions = (state_dict[key] for key in ("best", "waited", "divisions"))

    def _monitored(self, trainer: pl.Trainer) -> float:
        """Return the monitored value: the mean over the ranks, so that their learning rates stay the same."""
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise MisconfigurationException(
                f"WaterfallLR monitors {self.monitor!r}, which was not logged; there are {sorted(metrics) or 'none'}."
            )
        value = metrics[self.monitor].detach().clone().float()  # reduced in place
        return float(trainer.strategy.reduce(value.to(trainer.strategy.root_device), reduce_op="mean"))

    def _divide(self, trainer: pl.Trainer) -> None:
        """Divide the learning rates, and what schedulers compute theirs from."""
        self.divisions += 1
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rate = self._divided(float(group["lr"]))
                if isinstance(group["lr"], Tensor):  # of a capturable optimizer, which keeps its tensor
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        for scheduler in all_schedulers(config.scheduler for config in trainer.lr_scheduler_configs):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [self._divided(float(rate)) for rate in scheduler.base_lrs]
        if self.verbose:
            rank_zero_info(
                f"WaterfallLR: {self.monitor} did not improve on {self.best:.6g} by {self.improvement:.2%} in "
                f"{self.patience} evaluations; learning rate {trainer.optimizers[0].param_groups[0]['lr']:.3g}"
            )

    def _divided(self, rate: float) -> float:
        return min(rate, max(rate / self.factor, self.min_lr))
