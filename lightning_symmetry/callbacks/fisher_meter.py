"""How FisherConditioning measures: the batch, the coordinates that layers are in, and eigenvalues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset, SequentialSampler
from tqdm.auto import tqdm

from lightning_symmetry.callbacks.evaluation import QuietTrainer, quiet_copy
from lightning_symmetry.landscape.steps import Step, supervised_step
from lightning_symmetry.whitening.applied import Applied
from lightning_symmetry.whitening.collect import whitened_layers
from lightning_symmetry.whitening.conditioning import extreme_eigenvalues
from lightning_symmetry.whitening.coordinates import transform_fisher
from lightning_symmetry.whitening.fisher import fisher_blocks
from lightning_symmetry.whitening.fisher_operator import Coefficients, fisher_model
from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.likelihoods import LikelihoodName

_LANCZOS_TOLERANCE = 1e-5  # of the largest eigenvalue

Coordinates = Mapping[str, Coefficients | None]  # U and c by layer name; None: canonical


class Spectrum(NamedTuple):
    """Extreme eigenvalues of a Fisher block, without damping.

    Attributes:
        smallest: The smallest; where eigenvalues near 0 do not count, of those that do.
        largest: The largest.
        rank: Number of eigenvalues that are not near 0; None where the block was not formed.
    """

    smallest: float
    largest: float
    rank: int | None

    def condition(self, damping: float) -> float:
        """Return the condition number at a damping."""
        return (self.largest + damping) / (self.smallest + damping)


def spectrum_of(matrix: Tensor, damped: bool, rank_tolerance: float | None = None) -> Spectrum:
    r"""Return the extreme eigenvalues that make up :func:`~lightning_symmetry.condition_number`.

    Args:
        matrix: A symmetric positive semi-definite matrix, of shape ``(D, D)``.
        damped: Whether the condition number is to be damped, so that all eigenvalues count.
        rank_tolerance: :math:`\tau`; eigenvalues up to :math:`\tau \lambda_{\max}` are near 0. Default: D times the
            machine epsilon of float64.

    Raises:
        ValueError: If the matrix is not finite, or is 0.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("The Fisher matrix is not finite.")
    values = torch.linalg.eigvalsh(matrix.detach().to("cpu", torch.float64))
    largest = values[-1].item()
    if largest <= 0:
        raise ValueError("The Fisher matrix is 0.")
    tolerance = len(values) * torch.finfo(torch.float64).eps if rank_tolerance is None else rank_tolerance
    counted = values[values > tolerance * largest]
    smallest = max(values[0].item(), 0.0) if damped else counted[0].item()
    return Spectrum(smallest, largest, len(counted))


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


class Looking:
    """Follows the coordinates of some layers.

    Args:
        names: Names of layers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._raw: dict[str, tuple[Tensor | None, ...] | None] = {}
        self._present: dict[str, Coefficients | None] = {}

    def look(self, module: nn.Module) -> Coordinates:
        """Return the coordinates in which an optimizer steps now: U and c of whitened layers, on the CPU."""
        layers = whitened_layers(module)
        for name in self._names:
            raw = _raw(layers.get(name))
            if name not in self._raw or not _same(raw, self._raw[name]):
                self._raw[name] = raw
                matrix = None if raw is None else layers[name].whitening_matrix()
                self._present[name] = None if matrix is None else tuple(t.detach().cpu() for t in matrix)
        return dict(self._present)


def coordinates_differ(a: Coordinates, b: Coordinates) -> bool:
    """Whether two systems of coordinates differ by more than rounding."""
    for name, old in a.items():
        new = b.get(name)
        if old is new:
            continue
        if old is None or new is None:
            return True
        if any(x.shape != y.shape or (x - y).abs().max() > 1e-9 * x.abs().max() for x, y in zip(old, new, strict=True)):
            return True
    return False


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
        size = _common_size(batch)
        if size is None:
            return parts[0] if parts else batch
        parts.append(tree_map(lambda leaf: leaf[:count], batch))  # noqa: B023 (used at once)
        count -= size
        if count <= 0:
            break
    if not parts:
        raise MisconfigurationException("FisherConditioning needs samples, but the training dataloader is empty.")
    return tree_map(lambda *leaves: torch.cat(leaves), *parts)


def _common_size(batch: Any) -> int | None:
    leaves = tree_leaves(batch)
    sizes = {len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


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


def _raw(layer: HasWhitening | None) -> tuple[Tensor | None, ...] | None:
    """Return what a layer's coefficients are made of; None where they change nothing."""
    if layer is None:
        return None
    state = layer.whitening_state()
    raw = tuple(state[name] for name in Applied._fields)
    return None if Applied(*raw).is_identity else raw


def _same(a: tuple[Tensor | None, ...] | None, b: tuple[Tensor | None, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True))
