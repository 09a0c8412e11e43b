"""Calibration of a classifier, as a callback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_symmetry.callbacks.calibration_bins import CalibrationBins, CalibrationResult, Outputs, score
from lightning_symmetry.callbacks.calibration_outputs import (
    OutputRecorder,
    check_kind,
    output_and_target,
    predictor_module,
    repeated_rows,
)
from lightning_symmetry.callbacks.loggers import experiments_with


class Calibration(Callback):
    r"""Measure how well the probabilities of a classifier are calibrated, whenever it is validated or tested.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{N} |\mathrm{accuracy}_b - \mathrm{confidence}_b|

    over bins b of the largest probability, of equal width. Any LightningModule will do: outputs are taken from the
    module that predicts while the step runs, of a Bayesian one the averaged probabilities; targets from the batch. The
    number of classes is that of the outputs. A single logit is binary: bins are then of the probability of class 1,
    and compared with the share of class 1, as in torchmetrics' ``BinaryCalibrationError``. Negative targets are
    ignored. In a distributed run all processes are put together, and samples that the sampler repeats count once.

    Logs, for split ``val`` and ``test`` (``/dataloader_idx_{i}`` follows if there are several loaders):

    - ``calibration/{split}_ece``, ``_mce`` (the largest gap of a bin), ``_nll`` (negative log likelihood), ``_brier``
      and ``_accuracy``; callbacks can monitor them.
    - ``calibration/accuracy_epoch{E}``: the accuracy of the validation that ends epoch E, for each E of ``epochs``.
    - ``calibration/{split}``: a reliability diagram above a histogram of confidences, where the logger takes figures
      (TensorBoard): when the module is tested or validated by itself, at ``epochs``, and of the last validation of
      a fit when training ends.

    Args:
        num_bins: Number of bins.
        epochs: Numbers of finished epochs at whose validation the accuracy is kept.
        outputs: Whether the predictor returns ``"logits"`` or ``"probabilities"``.
        predictor: Name of the submodule that predicts, which each step must call once; ``""`` is the module itself.
            Default: see :func:`~lightning_symmetry.callbacks.calibration_outputs.predictor_module`.
        class_dim: Dimension of the classes in the outputs.
        name: Prefix of what is logged; several callbacks in one Trainer need different names.

    Attributes:
        result: The last :class:`~lightning_symmetry.callbacks.calibration_bins.CalibrationResult` of each split; with
            several loaders the keys are as ``val/dataloader_idx_0``.
        history: Those of the validations of a fit, as dictionaries, with their ``split``.
        accuracy_at: The accuracy at ``epochs``, of the first loader.

    Raises:
        MisconfigurationException: For arguments out of range, or ``outputs`` other than a Bayesian module's; when a fit
            starts that has no validation at ``epochs``; for a compiled LightningModule; in a step, if the predictor is
            not called once, or its outputs do not fit the targets.

    Source: On Calibration of Modern Neural Networks (Guo et al., 2017); The Empirical Impact of Neural Parameter
    Symmetries, or Lack Thereof (2024), table 2.

    Example::

        >>> from lightning_symmetry.callbacks.calibration import Calibration
        >>> callback = Calibration(num_bins=15, epochs=(25,))
    """

    def __init__(
        self,
        num_bins: int = 15,
        epochs: Sequence[int] = (),
        outputs: Outputs = "logits",
        predictor: str | None = None,
        class_dim: int = -1,
        name: str = "calibration",
    ) -> None:
        super().__init__()
        if num_bins < 1:
            raise MisconfigurationException(f"Expected `num_bins` to be at least 1 but got {num_bins}.")
        if any(epoch < 1 for epoch in epochs):
            raise MisconfigurationException(f"Expected `epochs` to be at least 1 but got {tuple(epochs)}.")
        if outputs not in ("logits", "probabilities"):
            raise MisconfigurationException(
                f"Expected `outputs` to be 'logits' or 'probabilities' but got {outputs!r}."
            )
        self.num_bins, self.epochs, self.outputs = num_bins, tuple(epochs), outputs
        self.predictor, self.class_dim, self.name = predictor, class_dim, name
        self.result: dict[str, CalibrationResult] = {}
        self.history: list[dict[str, Any]] = []
        self.accuracy_at: dict[int, float] = {}
        self._recorder: OutputRecorder | None = None
        self._bins: list[CalibrationBins] = []
        self._loaders: list[Any] = []
        self._drawn: dict[str, int] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history), "accuracy_at": dict(self.accuracy_at)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.accuracy_at = list(state_dict["history"]), dict(state_dict["accuracy_at"])

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if pl_module._compiler_ctx is not None:
            raise MisconfigurationException(
                f"Calibration sees no outputs within the compiled steps of {type(pl_module).__name__}. Compile the "
                "network within, as in `net.compile()`, instead of the LightningModule."
            )
        self._drawn = {}
        if stage == "fit":  # what an earlier fit left; the state of a checkpoint is loaded after this
            self.history, self.accuracy_at, self.result = [], {}, {}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.epochs:
            return
        if not trainer.enable_validation:
            raise MisconfigurationException(
                f"Calibration(epochs={self.epochs}) needs a validation after these epochs, but this fit has none. Give "
                "it a `val_dataloader` and a `validation_step`."
            )
        every = trainer.check_val_every_n_epoch or 1
        if missed := [epoch for epoch in self.epochs if epoch % every]:
            raise MisconfigurationException(
                f"Calibration needs a validation after epochs {missed}, but the Trainer validates every {every}. "
                "Change `epochs` or `check_val_every_n_epoch`."
            )

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            fitting = trainer.state.fn == "fit"
            self._start(trainer, pl_module, trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer, pl_module, trainer.test_loop)

    @override
    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.clear()

    @override
    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.on_validation_batch_start()

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._update(pl_module, "val", batch, batch_idx, dataloader_idx)

    @override
    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._update(pl_module, "test", batch, batch_idx, dataloader_idx)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, pl_module, "val")

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, pl_module, "test")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch in self.epochs and epoch not in self.accuracy_at:
            rank_zero_warn(f"Calibration has no accuracy at epoch {epoch}: no validation ended with this epoch.")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer)
        if missed := [epoch for epoch in self.epochs if epoch > trainer.current_epoch]:
            rank_zero_warn(f"Calibration has no accuracy at epochs {missed}: training ended before.")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _start(self, trainer: pl.Trainer, module: pl.LightningModule, loop: Any) -> None:
        self._stop()
        combined = loop._combined_loader
        self._loaders = combined.flattened
        if len(self._loaders) > 1 and combined._mode != "sequential":
            raise MisconfigurationException(
                f"Calibration measures several loaders one after the other, but they are combined by {combined._mode!r}"
                ". Use CombinedLoader(loaders, 'sequential')."
            )
        if self.predictor is None:
            check_kind(module, self.outputs)
        device = trainer.strategy.root_device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._bins = [CalibrationBins(self.num_bins, dtype).to(device) for _ in self._loaders]
        predictor = predictor_module(module, self.predictor)
        wrapped = trainer.strategy.model is not module  # its own call then runs the whole step
        self._recorder = OutputRecorder(predictor, within=predictor is module and wrapped)

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
        self._recorder, self._bins, self._loaders = None, [], []

    def _update(
        self, module: pl.LightningModule, split: Literal["val", "test"], batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if self._recorder is None:
            return
        calls = self._recorder.outputs
        if len(calls) != 1:
            predictor = predictor_module(module, self.predictor)
            what = "itself" if predictor is module else f"its {type(predictor).__name__}"
            raise MisconfigurationException(
                f"Expected the step of {type(module).__name__} to call {what} once but got {len(calls)} calls. Name "
                "the submodule that gives the logits with `predictor=`."
            )
        output, target = output_and_target(calls[0], batch, split)
        self._recorder.clear()
        repeats = repeated_rows(self._loaders[dataloader_idx], batch, batch_idx, len(output) if output.ndim else 0)
        scores = score(output, target, self.outputs, self.class_dim, repeats)
        self._bins[dataloader_idx].update(scores)

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule, split: str) -> None:
        if self._recorder is None:
            return
        fitting = trainer.state.fn == "fit"
        whole = fitting and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        epoch = trainer.current_epoch + int(whole)
        bins = self._bins
        self._stop()
        several = len(bins) > 1
        for index, part in enumerate(bins):
            suffix = f"/dataloader_idx_{index}" if several else ""
            result = part.result(epoch, trainer.global_step)
            if not result.num_samples:
                rank_zero_warn(f"Calibration has no samples of {split}{suffix}: all targets are ignored.")
            self.result[split + suffix] = result
            values = {key: getattr(result, key) for key in ("ece", "mce", "nll", "brier", "accuracy")}
            logged = {f"{self.name}/{split}_{key}{suffix}": value for key, value in values.items()}
            if fitting:
                self.history.append({"split": split + suffix, **asdict(result)})
            if whole and epoch in self.epochs:
                logged[f"{self.name}/accuracy_epoch{epoch}{suffix}"] = result.accuracy
                if index == 0:
                    self.accuracy_at[epoch] = result.accuracy
            if not trainer.barebones:
                module.log_dict(
                    logged, on_step=False, on_epoch=True, sync_dist=True, batch_size=1, add_dataloader_idx=False
                )
        if not fitting or (whole and epoch in self.epochs):
            self._draw(trainer, split)

    def _draw(self, trainer: pl.Trainer, split: str = "val") -> None:
        """Draw the last results of a split, of which there is no figure yet."""
        if not trainer.is_global_zero:
            return
        for key, result in self.result.items():
            if key.partition("/")[0] != split or self._drawn.get(key) == result.step:
                continue
            self._drawn[key] = result.step
            for experiment in experiments_with(trainer, "add_figure"):
                experiment.add_figure(f"{self.name}/{key}", result.figure(key), global_step=result.step)
                experiment.flush()
