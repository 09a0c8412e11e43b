"""Projected natural gradient descent (PRONG) as a callback."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_symmetry.callbacks.prong_checks import (
    check_arguments,
    check_coefficients,
    check_explicit,
    check_module,
    takes_explicit,
    warn_once,
)
from lightning_symmetry.callbacks.prong_estimator import Estimator, on_cpu
from lightning_symmetry.callbacks.prong_layers import WhitenedFor
from lightning_symmetry.callbacks.prong_measures import relative_deviation
from lightning_symmetry.callbacks.prong_plus import UnitScaling, plus_spread, without_scaling
from lightning_symmetry.callbacks.prong_samples import LastSamples, gather_on_first, observe, outputs_of
from lightning_symmetry.modules.whole_parameters import check_whole_parameters
from lightning_symmetry.surgery import ConversionReport
from lightning_symmetry.surgery.momentum import MomentumTransport
from lightning_symmetry.whitening.coefficients import Mode
from lightning_symmetry.whitening.explicit import ExplicitWhitenedLayer
from lightning_symmetry.whitening.reparametrize import load_whitening_state, whitening_state


class PRONG(Callback):
    r"""Make the Trainer's optimizer follow the natural gradient in whitened coordinates.

    Each linear layer and convolution computes :math:`V U (h - c) + d` (eq. 7) with coefficients that whiten its input,

    .. math:: c = E[h], \qquad U = (\mathrm{Cov}[h] + \epsilon I)^{-1/2},

    and (V, d) is what the optimizer steps on. Every ``every_n_steps`` optimizer steps the coefficients are estimated
    anew, and V and d changed such that the function stays what it is (Algorithm 1). For SGD with momentum, Nesterov's
    or none, this is SGD on the module's own weights and biases with other gradients, and that is how it is done: no new
    parameters, and momentum needs no transport. Gradients come out of ``backward`` preconditioned, so that clipping and
    gradient norms see them so; weight decay acts on the weights themselves.

    Other optimizers act on each entry by itself and get V and d themselves. Of theirs, momentum and first moments are
    carried through a change of coordinates (:class:`~lightning_symmetry.surgery.momentum.MomentumTransport`), second
    moments, which have no exact transform, are kept. Their weight decay acts on V and d. A checkpoint always has the
    plain weights and biases under the plain names, and loads without the callback.

    The module's layers are replaced when ``fit`` starts and put back when it ends, also by an exception. Statistics
    come from batches that pass by: at a reparametrisation the last ones, as few as hold ``num_samples`` samples
    (all ranks together), run once more through the training step of a copy of the module. The first time there is the
    first batch alone (of one accumulation step); if that has fewer samples, coefficients are estimated a second time
    once there were enough. The random state, the order of the data, batch-norm statistics, metrics and what the module
    logs stay as they are. A run that is resumed from a checkpoint is the uninterrupted one; only where the checkpoint
    was written within the last ``num_samples`` samples before a reparametrisation does that one have fewer samples.

    Logs to every logger, at each reparametrisation:

    - ``prong/condition``: condition number of :math:`\mathrm{Cov}[h] + \epsilon I` on the fresh samples, mean over
      layers. In the new coordinates it is 1.
    - ``prong/largest_eigenvalue``: of :math:`U\, \mathrm{Cov}[h]\, U` on the fresh samples, with the coefficients that
      have been used until now, largest over layers. At 1 they are as good as new.
    - ``prong/failures``: number of times that a layer kept its coefficients, since there were too few samples, values
      that are not finite, or a decomposition failed.
    - ``prong/function_deviation``: largest relative change of a layer's output on the samples, where V and d are the
      parameters (otherwise weights do not change at all).
    - ``prong/plus_spread``: with ``plus``, the largest :math:`|\log v|` that the interval ended with.
    - ``prong/time_share``: share of the time since the start of training that all this took.

    PRONG+ of the paper (``plus``, for SGD) also rescales the whitened units :math:`z = U (h - c)` by their running
    standard deviations after each step, and V to match: :math:`U' = D U, V' = V D^{-1}`. Gradients are then those of
    :math:`P' = U D^2 U`; the function, the weights and the momentum stay what they are. With v the running variances of
    z, damped as U is, :math:`D_{jj} = v_j^{-1/2}`: 1 right after a reparametrisation, for which c waits
    (:class:`~lightning_symmetry.whitening.units.Units`). The paper's own way to it is PRONG on a network with batch
    normalisation before its activations.

    Args:
        every_n_steps: T, the number of optimizer steps between two reparametrisations.
        num_samples: :math:`N_s`, the number of samples. With fewer than a layer has inputs its whitening has their
            rank, which is cheap; the directions that they do not show then get the multiplier 1 / eps.
        eps: Damping, which bounds the multiplier of the learning rate at 1 / eps. On the paper's autoencoder 0.1 with
            a third of SGD's learning rate is a good start.
        relative: Whether ``eps`` is in units of each layer's mean variance, which gives layers very different bounds.
        mode: ``"full"`` whitens, ``"diagonal"`` divides by standard deviations, ``"center"`` subtracts the mean only.
        whiten_at_init: Whether to reparametrise before the first step, or after ``every_n_steps`` steps only.
        ema: Weight of the past in a moving average of the statistics. None: each estimate stands alone.
        skip: Shell patterns of names of layers to leave alone.
        overrides: Shell pattern -> settings (``mode``, ``explicit``) of single layers.
        samples: Batches to take the statistics from, as the dataloader gives them (a list of batches, or a loader),
            instead of those that pass by.
        coordinates: ``"canonical"`` keeps weights and biases as parameters whatever the optimizer, ``"explicit"`` makes
            V and d the parameters. ``"auto"``: canonical for ``torch.optim.SGD``, explicit for others.
        plus: Whether units are rescaled after each step, from ``num_samples`` rows of each batch at most. May change
            with a checkpoint: switched on, it begins at the next reparametrisation; switched off, v is 1 at once.

    Attributes:
        report: What was whitened, what not and why, once ``fit`` has started.
        measured: What was logged last.
        failures: Number of times that a layer kept its coefficients.
        num_reparametrizations: Number of reparametrisations in this ``fit``.

    Raises:
        MisconfigurationException: If an argument is out of range, there is nothing to whiten, optimization is manual,
            the strategy shards parameters, or another callback needs the parameters to stay canonical.

    Source: Natural Neural Networks (2015), Algorithm 1 and section 3.

    Example::

        >>> from lightning_symmetry.callbacks.prong import PRONG
        >>> callback = PRONG(every_n_steps=1000, num_samples=100, eps=0.1)
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        num_samples: int = 100,
        eps: float = 0.1,
        relative: bool = False,
        mode: Mode = "full",
        whiten_at_init: bool = True,
        ema: float | None = None,
        skip: Sequence[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        samples: Iterable[Any] | None = None,
        coordinates: Literal["auto", "canonical", "explicit"] = "auto",
        plus: bool = False,
    ) -> None:
        super().__init__()
        check_arguments(every_n_steps, num_samples, eps, mode, ema, coordinates, plus)
        self.every_n_steps, self.num_samples, self.eps, self.relative = every_n_steps, num_samples, eps, relative
        self.mode, self.whiten_at_init, self.ema, self.coordinates = mode, whiten_at_init, ema, coordinates
        self.skip, self.overrides, self.samples, self.plus = skip, overrides, samples, plus
        self.report: ConversionReport | None = None
        self._whitened: WhitenedFor | None = None
        self._reset()

    def _reset(self) -> None:
        self.measured: dict[str, float] = {}
        self.failures = self.num_reparametrizations = 0
        self._due: int | None = None  # the step after which to reparametrise; None: now, at the first batch
        self._coefficients: dict[str, Any] | None = None  # those of a checkpoint, or of a fit that has ended
        unit_rows = self.num_samples if self.plus else None
        self._estimator = Estimator(self.eps, self.relative, self.ema, unit_rows)
        self._average: dict[str, Any] = {}  # of a checkpoint
        self._warned: set[str] = set()
        self._seconds = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_whole_parameters(trainer, "PRONG")
            self._reset()  # what an earlier fit left; the state of a checkpoint is loaded after this

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_module(pl_module)
        self._last = LastSamples(-(-self.num_samples // trainer.world_size))
        explicit = takes_explicit(trainer.optimizers, self.coordinates)
        try:
            self._whitened = WhitenedFor(pl_module, self.mode, explicit, self.skip, self.overrides)
        except ValueError as error:
            raise MisconfigurationException(f"PRONG cannot whiten {type(pl_module).__name__}: {error}") from error
        self.report = self._whitened.report
        check_explicit(trainer, self._explicit_layers())
        self._scaling = UnitScaling(trainer, self._whitened.layers) if self.plus else None
        self._restore()
        with isolate_rng():  # a loader would move it
            self._fixed = [(batch, index) for index, batch in enumerate(self.samples or ())]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()
        if self._due is None and not self.whiten_at_init:
            self._due = self._next(trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        steps = math.ceil(self._last.batches_needed(batch) / trainer.accumulate_grad_batches)
        if self._due is None:
            self._last.add(batch, batch_idx)
            self._update(trainer, pl_module)
            self._due = self._next(trainer.global_step)
            enough = self.samples is not None or len(self._last) >= self._last.num_samples
            if again := trainer.strategy.broadcast(0 if enough else steps):
                self._due = min(self._due, trainer.global_step + again)
            self._last.clear()
        if self.samples is None and self._due - trainer.global_step <= steps + 1:  # the last batch may be a short one
            self._last.add(batch, batch_idx)
        else:
            self._last.clear()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._scaling is not None:
            self._scaling.after_batch(trainer, pl_module)
        if self._due is not None and trainer.global_step >= self._due:
            self._update(trainer, pl_module)
            self._due = self._next(trainer.global_step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "due": self._due,
            "failures": self.failures,
            "coefficients": self._present_coefficients(),
            "average": self._estimator.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due, self.failures = state_dict["due"], state_dict["failures"]
        self._coefficients, self._average = state_dict["coefficients"], state_dict["average"]
        if self._whitened is not None:
            self._restore()

    def _next(self, step: int) -> int:
        """Return the next multiple of the interval."""
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def _explicit_layers(self) -> list[ExplicitWhitenedLayer]:
        return [layer for layer in self._whitened.layers.values() if isinstance(layer, ExplicitWhitenedLayer)]

    def _present_coefficients(self) -> dict[str, Any] | None:
        if self._whitened is None:
            return self._coefficients
        return {name: tree_map(on_cpu, state) for name, state in whitening_state(self._whitened.module).items()}

    def _restore(self) -> None:
        """Take the coefficients of a checkpoint."""
        if self._coefficients is None:
            return
        check_coefficients(self._coefficients, self._whitened.layers)
        states = self._coefficients if self.plus else without_scaling(self._coefficients)
        load_whitening_state(self._whitened.module, states)
        self._estimator.load_state_dict(self._average, self._whitened.layers)

    def _put_back(self) -> None:
        if self._whitened is not None:
            self._coefficients = self._present_coefficients()  # a checkpoint that is written later has them too
            self._whitened.put_back()
            self._whitened = None
            self._last.clear()

    def _update(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reparametrise, the same on every rank."""
        started = time.perf_counter()
        fixed = self.samples is not None
        batches = self._fixed if fixed else list(self._last.batches)
        statistics = observe(trainer, pl_module, batches, transfer=fixed)
        if not fixed:
            statistics = gather_on_first(trainer, statistics)
        explicit = self._explicit_layers()
        before = outputs_of(trainer, pl_module, batches[-1:], fixed) if explicit else {}
        transport = MomentumTransport(trainer.optimizers, explicit)
        result: dict[str, Any] = {}
        spread = {"plus_spread": plus_spread(self._whitened.layers.values())} if self.plus else {}
        if trainer.is_global_zero:
            failed, measured = self._estimator.update(self._whitened.layers, statistics, not trainer.barebones)
            result = {"failed": failed, "measured": measured}
            if trainer.world_size > 1:
                result["coefficients"] = self._present_coefficients()
        if trainer.world_size > 1:
            result = trainer.strategy.broadcast(result)
            if not trainer.is_global_zero:
                load_whitening_state(pl_module, result["coefficients"])
        transport.finish()
        if explicit:
            after = outputs_of(trainer, pl_module, batches[-1:], fixed)
            result["measured"]["function_deviation"] = relative_deviation(before, after)
        self.failures += len(result["failed"])
        warn_once(result["failed"], self._warned)
        self.num_reparametrizations += 1
        self._seconds += time.perf_counter() - started
        result["measured"].update(spread, failures=self.failures)
        result["measured"]["time_share"] = self._seconds / (time.perf_counter() - self._started)
        self.measured = {f"prong/{name}": float(value) for name, value in result["measured"].items()}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self.measured, step=trainer.global_step)
