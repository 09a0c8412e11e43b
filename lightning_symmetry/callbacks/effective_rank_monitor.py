"""Watch the effective ranks of layers, as a callback."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_symmetry.callbacks.loggers import experiments_with
from lightning_symmetry.low_rank import LowRankMap, LowRankMultiheadAttention, singular_values
from lightning_symmetry.low_rank.candidates import LAYERS
from lightning_symmetry.low_rank.conv import Scheme, check_scheme
from lightning_symmetry.low_rank.projections import DenseProjection, projections_of
from lightning_symmetry.surgery import ReparametrizedLayer, match_patterns, uncompiled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class EffectiveRankMonitor(Callback):
    r"""Log the effective rank of layers, :math:`\|W\|_* / \|W\|_{op}`, and their singular values.

    Of factorised layers W is the product, which is not formed; of others the weight. Attention has four,
    ``{layer}.q_proj``, ``.k_proj``, ``.v_proj`` and ``.out_proj``, also where it holds three of them in one tensor:
    names are the same before and after a switch. Decompositions are made on the first rank, before the first step and
    after every ``every_n_steps`` optimizer steps. A weight that is not finite is left out and warned of once.

    Logs:

    - ``effective_rank/{layer}`` for each layer, and ``effective_rank/mean`` over them, to every logger.
    - ``singular_values/{layer}``: a histogram, where the logger has them (TensorBoard).
    - ``singular_values``: one figure of all spectra when training ends, those of the start dashed, where the logger
      takes figures.

    Args:
        every_n_steps: Number of optimizer steps between two measurements.
        layers: Shell patterns of the names of layers.
        scheme: As which matrix to take the kernels of dense two-dimensional convolutions. Factorised ones have that of
            their own scheme: curves go on over a switch to the same one.

    Attributes:
        measured: The effective ranks that were logged last, by layer.

    Raises:
        MisconfigurationException: If ``every_n_steps`` is less than 1, or a pattern matches no layer.
        ValueError: If there is no such scheme.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3.

    Example::

        >>> from lightning_symmetry.callbacks.effective_rank_monitor import EffectiveRankMonitor
        >>> callback = EffectiveRankMonitor(every_n_steps=1000)
    """

    def __init__(self, every_n_steps: int = 1000, layers: Sequence[str] = ("*",), scheme: Scheme = "kxk-1x1") -> None:
        super().__init__()
        check_scheme(scheme)
        if every_n_steps < 1:
            raise MisconfigurationException(f"Expected `every_n_steps` to be at least 1 but got {every_n_steps}.")
        self.every_n_steps, self.layers, self.scheme = every_n_steps, layers, scheme
        self._reset()

    def _reset(self) -> None:
        self.measured: dict[str, float] = {}
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._step = -1
        self._warned = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset()  # what an earlier fit left; the state of a checkpoint is loaded after this

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            match_patterns(_layers(pl_module), self.layers, "layers")
        except ValueError as error:
            raise MisconfigurationException(f"EffectiveRankMonitor: {error}") from error
        self._step = trainer.global_step
        if not self._first:
            self._measure(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step and trainer.global_step % self.every_n_steps == 0:
            self._measure(trainer, pl_module)
        self._step = trainer.global_step

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not (drawing := experiments_with(trainer, "add_figure")):
            return
        self._measure(trainer, pl_module, log=False)
        if self._last:
            for experiment in drawing:
                experiment.add_figure("singular_values", self._figure(), global_step=trainer.global_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first = state_dict["first"]

    def _measure(self, trainer: pl.Trainer, module: pl.LightningModule, log: bool = True) -> None:
        if not trainer.is_global_zero:
            return
        self._last, failed = {}, []
        for name, layer in _layers(module).items():
            if not any(fnmatchcase(name, pattern) for pattern in self.layers):
                continue
            if (values := _spectrum(layer, self.scheme)) is None:
                failed.append(name)
            else:
                self._last[name] = values
                self._first.setdefault(name, values)
        if failed and not self._warned:
            self._warned = True
            rank_zero_warn(f"EffectiveRankMonitor leaves out {', '.join(failed)}: their weights are not finite.")
        ranks = {name: float(values.sum() / values[0]) if values[0] else 0.0 for name, values in self._last.items()}
        self.measured = ranks
        if not log or not ranks:
            return
        scalars = {f"effective_rank/{name}": rank for name, rank in ranks.items()}
        scalars["effective_rank/mean"] = sum(ranks.values()) / len(ranks)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        for experiment in experiments_with(trainer, "add_histogram"):
            for name, values in self._last.items():
                experiment.add_histogram(f"singular_values/{name}", values, trainer.global_step)

    def _figure(self) -> Figure:
        """Draw the spectra, each in units of its largest value, over the share of all values."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for index, (name, values) in enumerate(self._last.items()):
            colour = f"C{index % 10}"
            for spectrum, style, label in ((self._first.get(name), "--", None), (values, "-", name)):
                if spectrum is not None and spectrum[0] > 0:
                    shares = torch.arange(1, len(spectrum) + 1) / len(spectrum)
                    axes.plot(shares, spectrum / spectrum[0], style, color=colour, label=label)
        axes.set(xlabel="share of the singular values", ylabel="singular value over the largest", yscale="log")
        axes.set_title("Singular values, dashed: at the start")
        if self._last:
            axes.legend(fontsize="x-small")
        return figure


def _layers(module: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Return what has a weight matrix, by name, each once; of attention its projections, dense or factorised."""
    found: dict[str, nn.Module | Tensor] = {}
    for name, part in module.named_modules():
        name = uncompiled(name)
        if isinstance(part, LowRankMultiheadAttention):
            continue  # its projections come by themselves
        if type(part) is nn.MultiheadAttention:
            weights = projections_of(part).items()
            found.update({f"{name}.{key}".lstrip("."): weight for key, (weight, _, _) in weights})
        elif type(part) in LAYERS or isinstance(part, LowRankMap | DenseProjection | ReparametrizedLayer):
            found[name] = part
    return found


@torch.no_grad()
def _spectrum(layer: nn.Module | Tensor, scheme: Scheme) -> Tensor | None:
    """Return the singular values of a layer's weight on the CPU; None where it is not finite."""
    if isinstance(layer, ReparametrizedLayer) and not isinstance(layer, LowRankMap):
        layer = layer.to_layer()
    try:
        values = singular_values(layer, scheme).cpu()
    except torch.linalg.LinAlgError:
        return None
    return values if bool(values.isfinite().all()) else None
