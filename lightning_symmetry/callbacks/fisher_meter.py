"""How FisherConditioning measures: the batch and the eigenvalues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, SequentialSampler
from tqdm.auto import tqdm

from lightning_symmetry.callbacks.batches import common_size
from lightning_symmetry.callbacks.evaluation import QuietTrainer, quiet_copy
from lightning_symmetry.callbacks.fisher_coordinates import Coordinates
from lightning_symmetry.landscape.steps import Step, supervised_step
from lightning_symmetry.whitening.conditioning import Spectrum, extreme_eigenvalues
from lightning_symmetry.whitening.coordinates import transform_fisher
from lightning_symmetry.whitening.fisher import fisher_blocks
from lightning_symmetry.whitening.fisher_operator import Coefficients, fisher_model
from lightning_symmetry.whitening.likelihoods import LikelihoodName

_LANCZOS_TOLERANCE = 1e-5  # of the largest eigenvalue


def spectrum_of(block: Tensor, damped: bool, rank_tolerance: float | None = None) -> Spectrum:
    r"""Return the extreme eigenvalues of a Fisher block.

    Args:
        block: Shape ``(D, D)``.
        damped: Whether the condition number is to be damped, so that all eigenvalues count.
        rank_tolerance: :math:`\tau`; eigenvalues up to :math:`\tau \lambda_{\max}` are near 0. Default: D times the
            machine epsilon of float64.

    Raises:
        ValueError: If the block is not finite, or is 0.
    """
    if not bool(torch.isfinite(block).all()):
        raise ValueError("The Fisher matrix is not finite.")
    values = torch.linalg.eigvalsh(block.detach().to("cpu", torch.float64))
    if values[-1] <= 0:
        raise ValueError("The Fisher matrix is 0.")
    tolerance = len(values) * torch.finfo(torch.float64).eps if rank_tolerance is None else rank_tolerance
    return Spectrum.of(values, damped, tolerance)


class Meter:
    """Measures the Fisher blocks of chosen layers of a LightningModule, on a copy of it.

    Args:
        trainer: The trainer.
        module: The module.
        batch: The batch, on the module's device.
        layers: Names or shell patterns of layers; None: all with parameters.
        likelihood: What the outputs mean.
        damped: Whether condition numbers are to be damped.
        rank_tolerance: See :func:`spectrum_of`.
        max_size: Size up to which a block is formed.
        step: ``step(net, batch) -> (output, anything)``; None: ``output_and_target`` of the module, or its ``forward``.
        progress: Whether to show progress bars.

    Attributes:
        sizes: Number of parameters of each chosen layer, by name.

    Raises:
        MisconfigurationException: If no layer matches, outputs are not what the likelihood takes, or a block is too
            large to be measured without damping.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        batch: Any,
        layers: str | Iterable[str] | None,
        likelihood: LikelihoodName,
        damped: bool,
        rank_tolerance: float | None,
        max_size: int,
        step: Step | None,
        progress: bool,
    ) -> None:
        self._batch, self._likelihood, self._damped, self._tolerance = batch, likelihood, damped, rank_tolerance
        self._max_size, self._progress = max_size, progress
        self._step = _step_of(module, step, QuietTrainer(trainer))
        try:
            with fisher_model(
                quiet_copy(module), batch, layers, torch.float64, likelihood=likelihood, samples=None, generator=None,
                whitening=None, step=self._finite,
            ) as model:  # fmt: skip
                self.sizes = {name: sum(p.numel() for p in parameters) for name, parameters in model.parameters.items()}
        except ValueError as error:
            raise MisconfigurationException(
                f"FisherConditioning cannot measure {type(module).__name__}: {error}"
            ) from error
        large = [name for name, size in self.sizes.items() if size > max_size]
        if large and not damped:
            raise MisconfigurationException(
                f"The Fisher block of {large[0]} has {self.sizes[large[0]]:,} rows, more than max_size={max_size:,}: "
                "its eigenvalues would come from Lanczos iterations, which do not resolve small ones. Choose other "
                "`layers`, give a `damping`, or raise `max_size`."
            )

    def measure(
        self, module: pl.LightningModule, stages: Sequence[Coordinates]
    ) -> tuple[list[dict[str, Spectrum]], list[dict[str, Tensor]], dict[str, str]]:
        """Measure at the present weights, in one or more systems of coordinates.

        Returns:
            For each of them the spectra and, of the layers whose blocks were formed, these blocks on the CPU, by the
            layer's name; and the layers that could not be measured, with the reasons.
        """
        formed = [name for name, size in self.sizes.items() if size <= self._max_size]
        large = [name for name in self.sizes if name not in formed]
        clone, layers = quiet_copy(module), dict(module.named_modules())
        failed: dict[str, str] = {}
        spectra: list[dict[str, Spectrum]] = [{} for _ in stages]
        blocks: list[dict[str, Tensor]] = [{} for _ in stages]
        settings = {"likelihood": self._likelihood, "step": self._step}
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            try:
                canonical = {}
                if formed:
                    canonical = fisher_blocks(clone, self._batch, formed, progress=self._progress, **settings)
            except (ValueError, RuntimeError) as error:
                return spectra, blocks, dict.fromkeys(self.sizes, str(error))
            for name, block in canonical.items():
                for k, stage in enumerate(stages):
                    try:
                        moved = _in_coordinates(block.cpu(), stage.get(name), layers[name])
                        spectra[k][name] = spectrum_of(moved, self._damped, self._tolerance)
                        blocks[k][name] = moved
                    except (ValueError, RuntimeError) as error:
                        failed[name] = str(error)
            bar = tqdm(large, desc="Fisher eigenvalues", disable=not (large and self._progress), leave=False)
            for name in bar:
                for k, stage in enumerate(stages):
                    whitening = {name: stage[name]} if stage.get(name) else None
                    try:
                        smallest, largest = extreme_eigenvalues(
                            clone, self._batch, [name], whitening=whitening, tolerance=_LANCZOS_TOLERANCE, **settings
                        )
                        spectra[k][name] = Spectrum(smallest, largest, None)
                    except (ValueError, RuntimeError) as error:
                        failed[name] = str(error)
        return spectra, blocks, failed

    def _finite(self, net: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Hide values that are not finite: they are no reason to refuse a fit."""
        output, rest = self._step(net, batch)
        if isinstance(output, Tensor) and output.is_floating_point():
            output = output.nan_to_num(0.0, 0.0, 0.0)
        return output, rest


def first_samples(loader: CombinedLoader, count: int) -> Any:
    """Return the first samples of a split as one batch.

    Batches that are not made of tensors with a common first dimension alone (graphs) cannot be joined: the first one
    is returned whole.

    Args:
        loader: From :func:`~lightning_symmetry.callbacks.evaluation.split_loader`.
        count: Number of samples.

    Raises:
        MisconfigurationException: If there are none, or they cannot be had without changing the order of the data.
    """
    for part in loader.flattened:
        own_order = getattr(part, "batch_size", 1) is None and (
            part.batch_sampler is not None or not isinstance(part.sampler, SequentialSampler)
        )
        if own_order or isinstance(getattr(part, "dataset", None), IterableDataset):
            raise MisconfigurationException(
                "FisherConditioning cannot take samples from an iterable dataset, or from a batch sampler, without "
                "moving it on: give it a `batch`."
            )
    batches = (item[0] for item in loader)
    parts: list[Any] = []
    for batch in batches:
        size = common_size(batch)
        if size is None:
            return parts[0] if parts else batch
        parts.append(tree_map(lambda leaf: leaf[:count], batch))  # noqa: B023 (used at once)
        count -= size
        if count <= 0:
            break
    if not parts:
        raise MisconfigurationException("FisherConditioning needs samples, but the training dataloader is empty.")
    return tree_map(lambda *leaves: torch.cat(leaves), *parts)


def _step_of(module: nn.Module, step: Step | None, quiet: QuietTrainer) -> Step:
    """Return how the module is called; copies of it see a trainer to which they cannot log."""

    def call(net: pl.LightningModule, batch: Any) -> tuple[Any, Any]:
        net.trainer = quiet
        if step is not None:
            return step(net, batch)
        if hasattr(net, "output_and_target"):
            return net.output_and_target(batch, "train")
        return (net(batch), None) if isinstance(batch, Tensor) else supervised_step(net, batch)

    return call


def _in_coordinates(block: Tensor, coefficients: Coefficients | None, layer: nn.Module) -> Tensor:
    if coefficients is None:
        return block
    return transform_fisher(block, *coefficients, weight_shape=layer.weight.shape, bias=layer.bias is not None)
