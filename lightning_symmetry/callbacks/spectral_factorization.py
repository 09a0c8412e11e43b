"""Dense training that goes on with low-rank factors, as a callback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_symmetry.callbacks.spectral_checks import (
    cannot,
    check_arguments,
    check_layers,
    check_optimizers,
    check_trainer,
    warn_if_never,
)
from lightning_symmetry.callbacks.spectral_loss import loss_of
from lightning_symmetry.callbacks.spectral_moments import replacements_between
from lightning_symmetry.low_rank import FactorizationReport, factorize, low_rank_maps
from lightning_symmetry.low_rank.conv import Scheme
from lightning_symmetry.low_rank.initialisation import Init
from lightning_symmetry.low_rank.layout import apply_layout, follow_state_dicts, layout_of
from lightning_symmetry.low_rank.rank import Rank
from lightning_symmetry.modules.low_rank_layout import LowRankLayoutMixin
from lightning_symmetry.surgery.handover import Moments, broadcast_, hand_over, rebuild_distributed
from lightning_symmetry.surgery.learning_rates import all_schedulers, scale_learning_rates
from lightning_symmetry.surgery.transaction import all_or_nothing


class SpectralFactorization(Callback):
    r"""Replace dense layers by low-rank factors :math:`W = U V^\top` in the middle of ``fit``, once.

    Training begins with the dense network. Before the first batch for which ``at_step`` optimizer steps have been
    taken (or of epoch ``at_epoch``) :func:`~lightning_symmetry.low_rank.factorize.factorize` replaces its layers; with
    ``init="spectral"`` by the nearest matrices of that rank, so that the loss goes on from where it was. The Trainer's
    optimizers and schedulers go on: factors take the place of their weight in its parameter group.

    With ``moments="project"`` so do the optimizer's moments. SGD's momentum is a direction in which W moves: the
    factors get the one that moves :math:`U V^\top` nearest to it
    (:func:`~lightning_symmetry.surgery.factor_moments.factor_direction`). Adam's moments are statistics of the
    gradient: the first follows the chain rule, the second takes the noise of different entries to be uncorrelated
    (:func:`~lightning_symmetry.surgery.factor_moments.factor_squares`). With ``"reset"`` factors start like new
    parameters. States of biases and of layers that stay are untouched either way. Adadelta and Rprop keep steps entry
    by entry, which have no form for factors: with them only ``"reset"`` will do, which is said before the first step.

    In distributed training the first rank factorises, and the others get its factors. A switch that fails raises and
    leaves network, optimizers, schedulers and strategy as they were. With manual optimization gradients that were
    accumulated over the end of a batch are lost, ``at_step`` counts the steps of all optimizers, as
    ``trainer.global_step`` does, and the loss is not measured.

    A run that is resumed from a checkpoint, from before the switch or after it, is the uninterrupted one. So that
    checkpoints load everywhere give the module :class:`~lightning_symmetry.modules.LowRankLayoutMixin`; without it
    this callback makes the Trainer's own ways to load work (``ckpt_path`` of ``fit``, ``validate``, ``test`` and
    ``predict``). A network that has factors when ``fit`` starts is left as it is.

    A share of the full rank leaves very little of a head with few outputs: ``skip`` it.

    Logs to every logger at the switch:

    - ``low_rank/parameters``: number of parameters of the module afterwards.
    - ``low_rank/compression``: number before over number after.
    - ``low_rank/relative_error``: :math:`\|W - U V^\top\|_F / \|W\|_F`, mean over the layers.
    - ``low_rank/loss_before``, ``low_rank/loss_after``: the training loss of the next batch, right before and right
      after, where the training step returns it.

    Args:
        at_step: Number of optimizer steps with dense layers. The paper takes 40,000 of 240,000 for a language model.
        at_epoch: Number of epochs with dense layers, instead.
        at_fraction: Share of all optimizer steps with dense layers, instead.
        rank: Rank of each layer, see :func:`~lightning_symmetry.low_rank.factorize.factorize`.
        init: How factors begin; only ``"spectral"`` keeps the function, as far as the rank allows.
        lr_factor: What to multiply the learning rates of all groups with, those of schedulers to come too.
        moments: Whether to ``"project"`` the optimizer's moments on the factors or to ``"reset"`` them.
        scheme: The two convolutions that become of an ``nn.Conv2d``.
        min_saving: Layers that would save a smaller share of their parameters, or nothing, are left alone.
        skip: Shell patterns of layers to leave alone; names begin with those of the LightningModule's attributes.
        overrides: Shell pattern -> settings (``rank``, ``init``, ``scheme``, ``min_saving``) of single layers.
        seed: Seed of random factors.
        measure_loss: Whether to run a copy of the module on the next batch, before and after.

    Attributes:
        report: What was factorised, what not and why, once it was.
        measured: What was logged.

    Raises:
        MisconfigurationException: If an argument is out of range, there is nothing to factorise, the strategy shards
            parameters, the optimizer cannot be handed over, or another callback keeps or changes parameters.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), sections 3.2 and 4.

    Example::

        >>> from lightning_symmetry.callbacks.spectral_factorization import SpectralFactorization
        >>> callback = SpectralFactorization(at_step=40_000, rank=0.25, skip=["net.head"])
    """

    def __init__(
        self,
        at_step: int | None = None,
        at_epoch: int | None = None,
        at_fraction: float | None = None,
        rank: Rank = 0.25,
        init: Init = "spectral",
        lr_factor: float = 1.0,
        moments: Moments = "project",
        scheme: Scheme = "kxk-1x1",
        min_saving: float = 0.0,
        skip: Sequence[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        measure_loss: bool = True,
    ) -> None:
        super().__init__()
        check_arguments(at_step, at_epoch, at_fraction, lr_factor, moments)
        self.at_step, self.at_epoch, self.at_fraction = at_step, at_epoch, at_fraction
        self.lr_factor, self.moments, self.measure_loss, self.seed = lr_factor, moments, measure_loss, seed
        self.settings = {"rank": rank, "init": init, "scheme": scheme, "min_saving": min_saving}
        self.skip, self.overrides = skip, overrides or {}
        self.report: FactorizationReport | None = None
        self.measured: dict[str, float] = {}
        self._due, self._training, self._following = False, False, None
        self._weights: list[nn.Parameter] = []  # those to become factors, until optimizers are known to be fit

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_trainer(trainer, SpectralFactorization)
        self._due = self._training = False
        if not isinstance(pl_module, LowRankLayoutMixin):
            self._unfollow()
            self._following = follow_state_dicts(pl_module, lambda: not self._training)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._training = True  # from here on the optimizers have its parameters
        self.report, self.measured = None, {}
        if maps := low_rank_maps(pl_module):
            say = rank_zero_info if trainer.ckpt_path else rank_zero_warn
            say(f"SpectralFactorization has nothing to do: {len(maps)} weights have factors already.")
            return
        self._weights = check_layers(pl_module, self.skip, self.overrides, self.settings)
        check_optimizers(trainer, type(self).__name__, self._weights, self.moments)
        self._due = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = self.at_step
        if self.at_fraction is not None:
            total = trainer.estimated_stepping_batches
            if total in (float("inf"), -1):
                raise MisconfigurationException(
                    "`at_fraction` needs a fit that ends: give `max_steps` or `max_epochs`."
                )
            self._step = round(self.at_fraction * total)
        if self._due:
            warn_if_never(trainer, self._step, self.at_epoch)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._due:
            return
        if self._weights and trainer.global_step > 0:  # now optimizers have states, and show what they keep
            check_optimizers(trainer, type(self).__name__, self._weights, self.moments)
            self._weights = []
        at = trainer.global_step >= self._step if self.at_epoch is None else trainer.current_epoch >= self.at_epoch
        if at:
            before = loss_of(trainer, pl_module, batch, batch_idx) if self.measure_loss else None
            self._switch(trainer, pl_module)
            self._due, self._weights = False, []
            after = loss_of(trainer, pl_module, batch, batch_idx) if self.measure_loss else None
            self._log(trainer, before, after)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._training = False

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._training = False
        self._unfollow()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._unfollow()

    def _unfollow(self) -> None:
        if self._following is not None:
            self._following.remove()
            self._following = None

    def _switch(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Factorise the module and hand everything over, or leave all as it was and raise."""
        schedulers = list(all_schedulers(config.scheduler for config in trainer.lr_scheduler_configs))
        before = dict(module.named_modules())
        try:
            with all_or_nothing(module, trainer.optimizers, schedulers):
                self.report = self._factorize(trainer, module)
                hand_over(trainer.optimizers, replacements_between(before, module), self.moments)
                scale_learning_rates(trainer.optimizers, schedulers, self.lr_factor)
                rebuild_distributed(trainer.strategy)
        except BaseException as error:
            self.report = None
            rebuild_distributed(trainer.strategy)
            if isinstance(error, ValueError):
                raise cannot(module, error) from error
            raise

    def _factorize(self, trainer: pl.Trainer, module: pl.LightningModule) -> FactorizationReport:
        """Factorise the module, on all ranks as on the first one."""
        result: tuple[Any, Any, str] = None, None, ""
        if trainer.is_global_zero:
            try:
                factorize(module, skip=self.skip, overrides=self.overrides, seed=self.seed, **self.settings)
                result = layout_of(module), module.factorization_report, ""
            except ValueError as error:
                result = None, None, str(error)
        layout, report, error = trainer.strategy.broadcast(result)
        if error:
            raise ValueError(error)
        apply_layout(module, layout)
        module.factorization_report = report
        if trainer.world_size > 1:
            broadcast_(p.detach() for part in low_rank_maps(module).values() for p in (part.left, part.right))
        return report

    def _log(self, trainer: pl.Trainer, before: float | None, after: float | None) -> None:
        old, new = self.report.parameters
        errors = torch.tensor([layer.error for layer in self.report.layers.values()], dtype=torch.float64)
        self.measured = {
            "low_rank/parameters": float(new),
            "low_rank/compression": old / new,
            "low_rank/relative_error": float(errors.mean()),
        }
        if before is not None and after is not None:
            self.measured |= {"low_rank/loss_before": before, "low_rank/loss_after": after}
        for logger in trainer.loggers:
            logger.log_metrics(self.measured, step=trainer.global_step)
