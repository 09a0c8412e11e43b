"""The loss along the segment from a reference to the trained network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_symmetry.callbacks.alignment import AlignBy, align_reference, check_alignable, example_for
from lightning_symmetry.callbacks.evaluation import (
    Split,
    evaluating,
    evaluation_step,
    matching_state,
    quiet_copy,
    split_loader,
)
from lightning_symmetry.callbacks.loggers import experiments_with
from lightning_symmetry.landscape import PathResult, Segment, parameter_distance
from lightning_symmetry.landscape.path import BatchNorm, path_values
from lightning_symmetry.landscape.result import as_positions
from lightning_symmetry.modules import SupervisedModule
from lightning_symmetry.modules.whole_parameters import check_whole_parameters
from lightning_symmetry.permutation import Alignment
from lightning_symmetry.surgery import CONSTANT_BUFFERS, plain_copy


class LinearInterpolation(Callback):
    r"""Evaluate loss and metrics on the segment between a reference and the network at the end of ``fit``.

    .. math:: \theta(\alpha) = (1 - \alpha)\,\theta_\mathrm{reference} + \alpha\,\theta_\mathrm{trained}

    A reference that is another trained network shows linear mode connectivity; ``"init"`` shows monotonic linear
    interpolation from the initialisation, which is kept in the checkpoint so that a resumed run starts its segment
    where the first one did.

    Logs ``interpolation/midpoint_barrier``, ``/max_barrier``, ``/max_increase``, ``/is_monotonic``,
    ``/local_convexity``, ``/global_convexity`` and ``/distance_per_parameter`` to every logger, and a figure and the
    curves (at step :math:`100 \alpha`) where the logger takes figures (TensorBoard). In a distributed run each rank
    evaluates a part of the positions. With ``fast_dev_run`` only its number of batches is evaluated. The trainer, the
    module, its batch-norm statistics and the random state stay as they were.

    Any LightningModule will do: see :func:`~lightning_symmetry.callbacks.evaluation.evaluation_step`. A callback that
    changes the weights when training ends, such as weight averaging, must stand before this one. Factorised layers, of
    either end, enter by their products.

    Args:
        reference: ``"init"``, a module (the LightningModule or the network within it), or the path of a checkpoint.
        num_points: Number of positions, uniform from 0 to 1. An odd number has a midpoint.
        split: Data on which the path is evaluated: ``"train"`` (without augmentation where the datamodule has
            ``eval_dataloader``), ``"val"`` or ``"test"``.
        batch_norm: ``"keep"`` interpolates running statistics, ``"recompute"`` takes them anew over the training split,
            ``"repair"`` also renormalises the units of hidden layers:
            :func:`~lightning_symmetry.landscape.repair`. Each rank takes the statistics that its positions need.
        align: ``"weights"`` or ``"activations"`` permutes the hidden units of the reference first, without changing its
            function, so that it comes close to the trained network: :func:`~lightning_symmetry.align`. Activations are
            matched on the first 100 batches of the training split, of which ``forward`` must take the first part; to
            match weights it is called once, with the module's ``example_input_array`` if there is one. Also logs
            ``/similarity_before`` and ``/similarity_after``. A run that has diverged is not aligned, with a warning.
        metrics: torchmetrics by name; default: those of a ``SupervisedModule``.
        name: Prefix of what is logged; several callbacks in one Trainer need different names.
        progress: Whether to show a progress bar.

    Attributes:
        result: The :class:`~lightning_symmetry.landscape.PathResult`, after ``fit``.
        distance: Distance per parameter between the two ends, after ``fit``.
        alignment: The :class:`~lightning_symmetry.Alignment` of the reference, after ``fit`` with ``align``.

    Raises:
        MisconfigurationException: For strategies that shard parameters, a reference of another architecture, a
            split without data, ``metrics`` of a module that has no ``output_and_target``, or ``align`` where nothing
            can be permuted (layers with fixed entries never are). All when ``fit`` starts.
        ValueError: If masks or constants of the reference differ from the trained network's.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), sections 5.1 and 5.4.

    Example::

        >>> from lightning_symmetry import LinearInterpolation
        >>> callback = LinearInterpolation(reference="init", split="train")
    """

    def __init__(
        self,
        reference: Literal["init"] | nn.Module | str | Path = "init",
        num_points: int = 25,
        split: Split = "test",
        batch_norm: BatchNorm = "keep",
        align: AlignBy | None = None,
        metrics: Mapping[str, Metric] | None = None,
        name: str = "interpolation",
        progress: bool = True,
    ) -> None:
        super().__init__()
        if split not in ("train", "val", "test"):
            raise MisconfigurationException(f"Expected `split` to be 'train', 'val' or 'test' but got {split!r}.")
        if batch_norm not in ("keep", "recompute", "repair"):
            raise MisconfigurationException(
                f"Expected `batch_norm` to be 'keep', 'recompute' or 'repair' but got {batch_norm!r}."
            )
        if align not in (None, "weights", "activations"):
            raise MisconfigurationException(
                f"Expected `align` to be 'weights', 'activations' or None but got {align!r}."
            )
        self.positions = as_positions(num_points)
        self.reference, self.split, self.batch_norm = reference, split, batch_norm
        self.align, self.metrics, self.name, self.progress = align, metrics, name, progress
        self.result: PathResult | None = None
        self.distance: float | None = None
        self.alignment: Alignment | None = None
        self._start: dict[str, Tensor] | None = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        instead = "Use 'auto' or 'ddp', or evaluate a consolidated checkpoint with lightning_symmetry.evaluate_path."
        check_whole_parameters(trainer, "LinearInterpolation", instead)
        if stage == "fit":
            self._start = None  # of an earlier fit; that of a checkpoint is loaded after this

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(self.reference, str | Path) and self.reference != "init" and not Path(self.reference).is_file():
            raise MisconfigurationException(f"The reference checkpoint {str(self.reference)!r} does not exist.")
        if self.metrics and evaluation_step(pl_module, self.split, trainer)[1] is None:
            raise MisconfigurationException(
                f"LinearInterpolation has `metrics`, but {type(pl_module).__name__} does not say what to update them "
                "with: give it `output_and_target(batch, split)` and `loss`."
            )
        if self.reference != "init":
            Segment(self._reference_like(pl_module), pl_module)  # what cannot be interpolated is refused now
            return
        if self._start is not None:
            return
        if trainer.ckpt_path is not None:
            rank_zero_warn(
                f"The checkpoint {trainer.ckpt_path} does not know the initialisation (it has no state of this "
                "callback): the segment starts at the checkpoint's parameters."
            )
        state = plain_copy(pl_module, keep_affine=True).state_dict()
        self._start = {key: value.detach().cpu().clone() for key, value in state.items()}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with evaluating(trainer):
            split_loader(trainer, pl_module, self.split)  # a split without data is refused now
            if self.align is not None:  # and a module in which nothing can be permuted
                loader = split_loader(trainer, pl_module, "train")
                example = example_for(pl_module, trainer, self.align, loader, self._transfer(trainer))
                check_alignable(quiet_copy(pl_module), self.align, example)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with evaluating(trainer):
            self._evaluate(trainer, pl_module)
        if trainer.is_global_zero:
            self._log(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start = state_dict["start"]

    def _evaluate(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trained = quiet_copy(pl_module)
        reference = self._reference_like(trained)
        step, loss = evaluation_step(trained, self.split, trainer)
        metrics = self.metrics
        if metrics is None and isinstance(trained, SupervisedModule):
            metrics = dict(trained.metrics[f"{self.split}_metrics"].items(keep_base=True, copy_state=False))
        loader = split_loader(trainer, pl_module, self.split)
        train_loader = None
        if self.batch_norm != "keep" or self.align is not None:
            train_loader = split_loader(trainer, pl_module, "train")
        transfer = self._transfer(trainer)
        progress = self.progress and trainer.is_global_zero
        self.alignment = None
        if self.align is not None:
            self.alignment = align_reference(reference, trained, trainer, self.align, train_loader, transfer, progress)
        if self.alignment is not None:
            reference = self.alignment.network
        mine = slice(trainer.global_rank, None, trainer.world_size)
        values, curves, count = path_values(
            reference,
            trained,
            islice(loader, trainer.fast_dev_run or None),
            self.positions[mine],
            loss=loss,
            metrics=metrics,
            batch_norm=self.batch_norm,
            train_loader=train_loader,
            step=step,
            transfer=transfer,
            progress=progress,
        )
        rows = torch.zeros(2 + len(curves), len(self.positions), dtype=torch.float64)
        rows[:, mine] = torch.stack([torch.full_like(values, count), values, *curves.values()])
        if trainer.world_size > 1:
            rows = trainer.strategy.reduce(rows.to(trainer.strategy.root_device), reduce_op="sum").cpu()
        samples, values, *others = rows
        self.result = PathResult(self.positions, values, dict(zip(curves, others, strict=True)), int(samples[0]))
        self.distance = parameter_distance(reference, trained)

    @staticmethod
    def _transfer(trainer: pl.Trainer) -> Callable[[tuple[Any, int, int]], tuple[Any, int, int]]:
        """Return what brings an item of a loader to the device, in the type that the module takes."""

        def transfer(item: tuple[Any, int, int]) -> tuple[Any, int, int]:
            batch, batch_idx, dataloader_idx = item
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
            return trainer.precision_plugin.convert_input(batch), batch_idx, dataloader_idx

        return transfer

    def _reference_like(self, trained: pl.LightningModule) -> nn.Module:
        """Return a copy of the trained module with the reference's parameters."""
        if self.reference == "init":
            source, state = "init", self._start
        elif isinstance(self.reference, nn.Module):
            source = type(self.reference).__name__
            state = plain_copy(self.reference, keep_affine=True).state_dict()
        else:
            source = str(self.reference)
            checkpoint = torch.load(self.reference, map_location="cpu", weights_only=True)
            state = checkpoint.get("state_dict", checkpoint)
        reference = plain_copy(trained, keep_affine=True)
        if self.reference == "init":  # constants that were given up with the layers that had them: the weight has them
            kept = reference.state_dict()
            state = {k: v for k, v in state.items() if k in kept or k.rpartition(".")[2] not in CONSTANT_BUFFERS}
        part, state = matching_state(state, reference, source)
        part.load_state_dict(state)
        return reference

    def _log(self, trainer: pl.Trainer) -> None:
        scalars = {f"{self.name}/{key}": value for key, value in self.result.summary().items()}
        scalars[f"{self.name}/distance_per_parameter"] = self.distance
        if self.alignment is not None:
            scalars[f"{self.name}/similarity_before"] = self.alignment.before
            scalars[f"{self.name}/similarity_after"] = self.alignment.after
        curves = {"loss": self.result.loss, **self.result.metrics}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        for experiment in experiments_with(trainer, "add_figure"):
            for quantity, values in curves.items():
                figure = self.result.plot(quantity)
                figure.axes[0].set_title(f"{self.split} {quantity}, reference to trained")
                experiment.add_figure(f"{self.name}/{quantity}_path", figure, trainer.global_step)
                for alpha, value in zip(self.positions.tolist(), values.tolist(), strict=True):
                    experiment.add_scalar(f"{self.name}/{quantity}_curve", value, round(100 * alpha))
            experiment.flush()
        if self.progress:
            rank_zero_info(
                f"{self.name}: midpoint barrier {self.result.midpoint_barrier:.4f}, max barrier "
                f"{self.result.max_barrier:.4f}, max increase {self.result.max_increase:.4f} on {self.split}"
            )
