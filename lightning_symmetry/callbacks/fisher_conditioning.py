"""The conditioning of layers' Fisher blocks during a fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_symmetry.callbacks.batches import on_device
from lightning_symmetry.callbacks.evaluation import evaluating, split_loader
from lightning_symmetry.callbacks.fisher_coordinates import Coordinates, Looking, coordinates_differ
from lightning_symmetry.callbacks.fisher_figures import history_figure, matrix_figure
from lightning_symmetry.callbacks.fisher_meter import Meter, first_samples
from lightning_symmetry.callbacks.loggers import experiments_with
from lightning_symmetry.landscape.steps import Step
from lightning_symmetry.modules.whole_parameters import check_whole_parameters
from lightning_symmetry.whitening.likelihoods import LikelihoodName

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FisherConditioning(Callback):
    r"""Measure the condition number of layers' Fisher blocks during ``fit``, in the optimizer's coordinates.

    .. math::
        \kappa = \frac{\lambda_{\max}(F) + \delta}{\lambda_{\min}(F) + \delta}, \qquad F_\Omega = J^\top F_\theta J

    F is the block of a layer's weight and bias (:func:`~lightning_symmetry.fisher_matrix`), on a fixed batch: of
    :math:`\theta = (W, b)`, and where :class:`~lightning_symmetry.callbacks.prong.PRONG` or
    :func:`~lightning_symmetry.whiten` has whitened the layer of :math:`\Omega = (V, d)`, which SGD then steps on. The
    scales that an optimizer such as RMSprop has for each entry do not count: its matrix is that of the parameters,
    along the way that it takes. (The paper, which plots RMSprop too, does not say more than that it is the FIM.)

    Measured at the first step, every ``every_n_steps`` optimizer steps and at the end. The value after k steps is taken
    just before step k + 1, when all other callbacks have done what they do after step k, so that their order does not
    matter. Where coefficients of a whitened layer have changed since, there are two values, in the old coordinates
    (``"before"``) and in the new ones (``"after"``), of the same matrix at the same weights.

    **What a condition number hangs on.** Without damping it is that on the matrix's range, and the smallest eigenvalue
    has to be one of the matrix and not of the batch: ``num_samples`` times the number of outputs (a softmax: less one)
    must be well above the block's number of parameters. It is then stable: for the middle layers of a tanh network on
    10x10 digits, blocks of 420 rows, 200, 500 and 1437 samples all see whitening by the statistics of all 1437 images,
    with an ``eps`` of 1e-3, take it down by 98.7 to 99.95 %. Where samples are too few, units are dead or logits are
    redundant, the matrix is singular, and what counts as 0 may change between two measurements (``rank`` says so, as
    does one warning); a damping then compares like with like. But what lies below a damping counts as well conditioned,
    and whitening hardly changes the largest eigenvalue: at :math:`\delta = 10^{-3} \lambda_{\max}` the same whitening
    takes off 27 to 67 % (1437 samples). The same damping is used in all coordinates and for the whole fit.

    Logs to every logger ``fisher/<layer>/condition``, ``/percent`` (of the first value), ``/largest``, ``/smallest``,
    ``/rank``; both values of a reparametrisation at the same step. Loggers whose ``experiment`` has ``add_figure``
    (TensorBoard) get pictures of the matrices' absolute entries, at the start, before and after the first
    reparametrisation and at the end, and the condition numbers as a figure. What cannot be measured, since values are
    not finite, say, is skipped with one warning. The module, its batch-norm statistics, gradients, metrics, logs and
    the random state stay as they are. In a distributed run the first rank measures and the others wait.

    Args:
        layers: Names or shell patterns of layers, as in ``named_modules()`` of the LightningModule. Default: all that
            hold parameters.
        every_n_steps: Optimizer steps between two measurements.
        likelihood: What the outputs mean: see :func:`~lightning_symmetry.fisher_matrix`.
        num_samples: Number of training samples, the first ones in the order of the data set (from the datamodule's
            ``eval_dataloader``, without augmentation, where it has one). Of batches that cannot be joined (graphs) the
            first one is taken whole.
        batch: A batch as the dataloader gives it, to take instead.
        damping: :math:`\delta`.
        relative: Whether ``damping`` is in units of each layer's first largest eigenvalue.
        rank_tolerance: Without damping, eigenvalues up to this part of the largest one count as 0. Default: the number
            of rows times the machine epsilon of float64.
        max_size: Blocks of more rows are not formed: they need a damping, and their extreme eigenvalues come from
            Lanczos iterations to :math:`10^{-5} \lambda_{\max}`.
        reparametrizations: Whether ``"all"`` reparametrisations are measured or the ``"first"`` only.
        step: ``step(module, batch) -> (output, anything)``. Default: ``output_and_target`` of the module, where it has
            one, otherwise its ``forward`` on the batch, or on the input of an ``(input, target)`` batch.
        name: Prefix of what is logged; several callbacks in one Trainer need different names.
        progress: Whether to show a progress bar.

    Attributes:
        history: One dict a layer and measurement: ``step``, ``layer``, ``reparametrization`` (``"before"``,
            ``"after"`` or None), ``condition``, ``percent``, ``largest``, ``smallest`` (without damping), ``rank``
            (None where the block was not formed). It goes into the checkpoint.
        matrices: Of each layer whose block was formed, the block at the ``"start"``, ``"before"`` and ``"after"`` the
            first reparametrisation and at the ``"end"``, float64 on the CPU of the first rank.
        failures: Number of times that a layer could not be measured.

    Raises:
        MisconfigurationException: If an argument is out of range, no layer matches, outputs are not what the likelihood
            takes, a block is larger than ``max_size`` and there is no damping, or the strategy shards parameters.

    Source: Natural Neural Networks (2015), section 4.1 and figure 2.

    Example::

        >>> from lightning_symmetry.callbacks.fisher_conditioning import FisherConditioning
        >>> callback = FisherConditioning(layers=["net.linears.1", "net.linears.2"], every_n_steps=100)
    """

    def __init__(
        self,
        layers: str | Sequence[str] | None = None,
        every_n_steps: int = 100,
        likelihood: LikelihoodName = "categorical",
        num_samples: int = 1000,
        batch: Any = None,
        damping: float = 0.0,
        relative: bool = False,
        rank_tolerance: float | None = None,
        max_size: int = 2000,
        reparametrizations: Literal["all", "first"] = "all",
        step: Step | None = None,
        name: str = "fisher",
        progress: bool = True,
    ) -> None:
        super().__init__()
        for argument, value in (("every_n_steps", every_n_steps), ("num_samples", num_samples), ("max_size", max_size)):
            if value < 1:
                raise MisconfigurationException(f"Expected `{argument}` to be at least 1 but got {value}.")
        if not (damping >= 0 and math.isfinite(damping)):
            raise MisconfigurationException(f"Expected `damping` to be finite and not negative but got {damping}.")
        if rank_tolerance is not None and not 0 <= rank_tolerance < 1:
            raise MisconfigurationException(f"Expected `rank_tolerance` to be in [0, 1) but got {rank_tolerance}.")
        if reparametrizations not in ("all", "first"):
            raise MisconfigurationException(
                f"Expected `reparametrizations` to be 'all' or 'first' but got {reparametrizations!r}."
            )
        self.layers, self.every_n_steps, self.likelihood = layers, every_n_steps, likelihood
        self.num_samples, self.batch, self.damping, self.relative = num_samples, batch, damping, relative
        self.rank_tolerance, self.max_size = rank_tolerance, max_size
        self.reparametrizations, self.step = reparametrizations, step
        self.name, self.progress = name, progress
        self._reset()

    def _reset(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.matrices: dict[str, dict[str, Tensor]] = {}
        self.failures = 0
        self._last: int | None = None  # the step at which it was measured last
        self._seen: Coordinates | None = None  # when the coordinates were looked at last; of a checkpoint at first
        self._warned: set[str] = set()

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_whole_parameters(trainer, "FisherConditioning")
        if stage == "fit":
            self._reset()  # what an earlier fit left; the state of a checkpoint is loaded after this

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with evaluating(trainer):
            batch = self.batch
            if batch is None:
                batch = first_samples(split_loader(trainer, pl_module, "train"), self.num_samples)
            self._meter = Meter(
                trainer, pl_module, on_device(trainer, batch), self.layers, self.likelihood, self.damping > 0,
                self.rank_tolerance, self.max_size, self.step, self.progress and trainer.is_global_zero,
            )  # fmt: skip
        self._looking = Looking(self._meter.sizes)
        self._present = self._looking.look(pl_module)
        if self._seen is None or self._seen.keys() != self._present.keys():
            self._seen = self._present

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._present = self._looking.look(pl_module)
        self._visit(trainer, pl_module, trainer.global_step % self.every_n_steps == 0 or self._last is None)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._present = self._looking.look(pl_module)  # before anyone puts whitened layers back

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._visit(trainer, pl_module, due=True, end=True)
        if self.history and trainer.is_global_zero:
            self._add_figure(trainer, "condition", self.plot)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "failures": self.failures, "last": self._last, "seen": self._seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.failures = list(state_dict["history"]), state_dict["failures"]
        self._last, self._seen = state_dict["last"], state_dict["seen"]

    def plot(self, quantity: str = "percent") -> Figure:
        """Draw a quantity of all layers against optimizer steps, as in figure 2c.

        Args:
            quantity: ``"condition"``, ``"percent"``, ``"largest"`` or ``"smallest"``.

        Raises:
            ValueError: If there is no such quantity.
        """
        return history_figure(self.history, quantity)

    def _visit(self, trainer: pl.Trainer, module: pl.LightningModule, due: bool, end: bool = False) -> None:
        """Measure if it is time or coordinates have changed; the same on every rank."""
        step, old, new = trainer.global_step, self._seen, self._present
        self._seen = new
        first = not any(row["reparametrization"] for row in self.history)
        changed = (first or self.reparametrizations == "all") and coordinates_differ(old, new)
        if step == self._last or not (due or changed):
            return
        stages = {"before": old, "after": new} if changed else {None: new}
        result, self._last = None, step
        if trainer.is_global_zero:
            with evaluating(trainer):
                spectra, blocks, failed = self._meter.measure(module, list(stages.values()))
            rows = []
            for label, found in zip(stages, spectra, strict=True):
                rows += [{"step": step, "layer": name, "reparametrization": label, **self._row(name, spectrum, rows)}
                         for name, spectrum in found.items()]  # fmt: skip
            self._keep(trainer, dict(zip(stages, blocks, strict=True)), first and changed, end)
            result = {"rows": rows, "failed": failed}
        result = trainer.strategy.broadcast(result) if trainer.world_size > 1 else result
        self._warn(result["failed"], result["rows"])
        self.history += result["rows"]
        if trainer.is_global_zero:
            self._log(trainer, result["rows"])

    def _row(self, name: str, spectrum: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the numbers of a row, relative to the first one of the layer."""
        first = next((row for row in [*self.history, *rows] if row["layer"] == name), None)
        unit = 1.0 if not self.relative else spectrum.largest if first is None else first["largest"]
        condition = spectrum.condition(self.damping * unit)
        percent = 100.0 if first is None else 100 * condition / first["condition"]
        return {"condition": condition, "percent": percent, **spectrum._asdict()}

    def _warn(self, failed: dict[str, str], rows: list[dict[str, Any]]) -> None:
        self.failures += len(failed)
        if failed and "failed" not in self._warned:
            self._warned.add("failed")
            listed = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
            rank_zero_warn(f"FisherConditioning could not measure {listed}. Such measurements are skipped.")
        ranks = {}
        for row in [*self.history, *rows]:
            ranks.setdefault(row["layer"], set()).add(row["rank"])
        changed = [f"{layer} ({min(found)} to {max(found)})" for layer, found in ranks.items() if len(found) > 1]
        if changed and self.damping == 0 and "rank" not in self._warned:
            self._warned.add("rank")
            rank_zero_warn(
                f"The numerical rank of the Fisher block of {', '.join(changed)} changes: condition numbers without "
                "damping do not compare. Take more samples, another `rank_tolerance`, or a `damping`."
            )

    def _keep(self, trainer: pl.Trainer, blocks: dict[str | None, dict[str, Tensor]], first: bool, end: bool) -> None:
        """Keep the blocks of which there are to be pictures, and draw these."""
        earliest, last = next(iter(blocks.values())), list(blocks.values())[-1]
        wanted = {} if self.history else {"start": earliest}
        wanted |= {"before": blocks["before"], "after": blocks["after"]} if first else {}
        wanted |= {"end": last} if end else {}
        for moment, found in wanted.items():
            for name, block in found.items():
                self.matrices.setdefault(name, {})[moment] = block
                title = f"|F| of {name}, {moment}" + (" the first reparametrisation" * (moment in ("before", "after")))
                self._add_figure(trainer, f"{name}/{moment}", partial(matrix_figure, block, title))

    def _add_figure(self, trainer: pl.Trainer, tag: str, make: Callable[[], Figure]) -> None:
        for experiment in experiments_with(trainer, "add_figure"):
            experiment.add_figure(f"{self.name}/{tag}", make(), trainer.global_step)

    def _log(self, trainer: pl.Trainer, rows: list[dict[str, Any]]) -> None:
        stages: dict[str | None, dict[str, float]] = {}
        for row in rows:
            for key in ("condition", "percent", "largest", "smallest", "rank"):
                if row[key] is not None:
                    scalars = stages.setdefault(row["reparametrization"], {})
                    scalars[f"{self.name}/{row['layer']}/{key}"] = row[key]
        for scalars in stages.values():
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=trainer.global_step)
