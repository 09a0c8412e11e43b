"""What a module predicts in its validation and test steps, and the targets beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_symmetry.modules.predictor import predictor_of
from lightning_symmetry.modules.variational_settings import VariationalSettings

TARGETS = ("target", "targets", "label", "labels", "y")
"""Keys of the targets of batches that are mappings."""


def predictor_module(module: pl.LightningModule, name: str | None = None) -> nn.Module:
    """Return the submodule whose output is the prediction.

    Args:
        module: The module.
        name: See :func:`~lightning_symmetry.modules.predictor.predictor_of`; None: what the module's
            ``predictor_module()`` returns, where there is such a method.

    Raises:
        MisconfigurationException: If there is none of this name.
    """
    if name is None and callable(method := getattr(module, "predictor_module", None)):
        return method()
    return predictor_of(module, name)


def check_kind(module: pl.LightningModule, outputs: str) -> None:
    """Check that a Bayesian module says the same of what its predictor returns.

    Args:
        module: The module.
        outputs: What it is taken to return.

    Raises:
        MisconfigurationException: If it says something else.
    """
    settings = getattr(module, "variational", None)
    if isinstance(settings, VariationalSettings) and settings.outputs != outputs:
        raise MisconfigurationException(
            f"Calibration has outputs={outputs!r}, but {type(module).__name__} has outputs={settings.outputs!r}. Give "
            "both the same; regressions ('values') have no calibration of this kind."
        )


class OutputRecorder:
    """Keeps what each call of a module returns, from outside: calls within a call do not count.

    A forward hook does it, after those that were registered before or prepended. It would be compiled into a module
    that was compiled in place (``net.compile()``), and stay there: of such a module the compiled call is wrapped.

    Args:
        module: The module.
        within: Whether the calls are themselves made within one call of the module, as those of a LightningModule are
            that a strategy has wrapped.
    """

    def __init__(self, module: nn.Module, within: bool = False) -> None:
        self._depth = int(within)
        self._handles: list[Any] = []
        self._compiled: tuple[nn.Module, Any] | None = None
        self.clear()
        if module._compiled_call_impl is None:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))
        else:
            call = module._compiled_call_impl

            def recorded(*args: Any, **kwargs: Any) -> Any:
                self._enter()
                output = call(*args, **kwargs)
                self._leave(None, None, output)
                return output

            self._compiled, module._compiled_call_impl = (module, call), recorded

    def clear(self) -> None:
        """Forget the calls so far."""
        self.outputs: list[Any] = []
        self._level = 0

    def remove(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._compiled is not None:
            module, module._compiled_call_impl = self._compiled
            self._compiled = None

    def _enter(self, *args: Any) -> None:
        self._level += 1

    def _leave(self, module: nn.Module | None, args: Any, output: Any) -> None:
        self._level -= 1
        if self._level == self._depth:
            self.outputs.append(output)


def output_and_target(output: Any, batch: Any, split: Literal["val", "test"]) -> tuple[Tensor, Tensor]:
    """Return the predictions and targets of a batch, those of a graph at the nodes of the split.

    Args:
        output: What the predictor returned.
        batch: ``(input, target, ...)``, a graph with ``y`` and perhaps ``{split}_mask``, or a mapping with a key that
            is one of :data:`TARGETS`.
        split: The split.

    Returns:
        Both.

    Raises:
        MisconfigurationException: If one of them is no tensor.
    """
    mask = None
    if isinstance(batch, Mapping):
        target = next((batch[key] for key in TARGETS if key in batch), None)
    elif isinstance(batch, tuple | list):
        target = batch[1] if len(batch) > 1 else None
    else:
        target = getattr(batch, "y", None)
        mask = getattr(batch, f"{split}_mask", None)
    if not isinstance(target, Tensor):
        raise MisconfigurationException(
            "Calibration takes targets from batches `(input, target)`, graphs with `y` and mappings with one of "
            f"{', '.join(TARGETS)}, but found none in a batch of type {type(batch).__name__}."
        )
    if not isinstance(output, Tensor):
        raise MisconfigurationException(
            f"Expected the output of the predictor to be a tensor but got {type(output).__name__}. Name the submodule "
            "that gives the logits with `predictor=`."
        )
    return (output, target) if mask is None else (output[mask], target[mask])


def repeated_rows(loader: Any, batch: Any, batch_idx: int, rows: int) -> int:
    """Return how many rows at the end of a batch repeat samples so that all processes have as many.

    ``DistributedSampler`` fills its list up from its start, and gives each process every n-th: at most the last sample
    of a process is a repeat.

    Args:
        loader: The loader of the batch.
        batch: The batch.
        batch_idx: Number of the batch.
        rows: First dimension of the batch's outputs.
    """
    sampler = getattr(loader, "sampler", None)
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler) or not size:
        return 0
    last = sampler.num_samples - 1
    repeats = last * sampler.num_replicas + sampler.rank >= len(sampler.dataset)
    samples = min(size, sampler.num_samples - batch_idx * size)
    if not repeats or batch_idx * size + samples <= last or samples < 1:
        return 0
    if rows % samples or (rows != samples and hasattr(batch, "edge_index")):
        return 0  # nodes of several graphs, which may be of different size
    return rows // samples
