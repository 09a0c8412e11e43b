"""REPAIR: the statistics of a merged network's units brought back to those of the networks it is made of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.landscape.batch_norm import BatchNormStatistics
from lightning_symmetry.landscape.batches import BatchGroups, to_device
from lightning_symmetry.landscape.hidden_layers import hidden_layers
from lightning_symmetry.landscape.steps import Step, supervised_step
from lightning_symmetry.landscape.unit_moments import UnitMoments, measure
from lightning_symmetry.surgery import device_of, evaluating, plain_copy

Moments = dict[str, UnitMoments]


class NothingToRepairError(ValueError):
    """A network has neither batch-norm statistics nor hidden layers that could be corrected."""


def repair(
    net: nn.Module,
    dataloader: Iterable[Any],
    ends: tuple[nn.Module, nn.Module] | None = None,
    alpha: float = 0.5,
    *,
    step: Step = supervised_step,
    transfer: Callable[[Any], Any] | None = None,
    progress: bool = True,
) -> nn.Module:
    r"""Renormalise the units of a merged network (REPAIR), in place.

    Each unit (a row of the weight) of each hidden linear or convolutional layer gets the scale and the shift with which
    its preactivation :math:`x` over the data has

    .. math::
        \mathbb{E}[x] &= (1 - \alpha)\, \mathbb{E}[x_a] + \alpha\, \mathbb{E}[x_b] \\
        \operatorname{std}(x) &= (1 - \alpha) \operatorname{std}(x_a) + \alpha \operatorname{std}(x_b)

    and batch-norm statistics are then taken anew. The paper normalises all layers in one pass by the statistics of each
    batch. Here one layer is corrected after another, in the order of the calls, each measured over all data with
    those before it corrected, so that the equations hold to rounding however the data is batched: a pass, as far as
    that layer, for each of them.

    These are left alone:

    - output layers, from which a path leads to what ``step`` returns through no other layer with parameters;
    - layers that feed batch normalisation, which undoes any rescaling (so that REPAIR of a network with batch
      normalisation behind each hidden layer is the reset of its statistics);
    - layers with constants or in other coordinates, with tied weights, or a subclass with a ``forward`` of its own: a
      warning names them;
    - layers that are not called, such as ``out_proj`` of ``nn.MultiheadAttention``, and layers of other kinds.

    A layer without bias is rescaled but not shifted. A unit that is constant over the data is shifted but not rescaled.
    A layer that is called several times has the pooled statistics of its calls; the equations hold for it if no call
    depends on another. With batch normalisation elsewhere in the network they hold under statistics of the batch.

    Args:
        net: The merged network, on its device. A network that is an end, at its ``alpha``, stays as it is, exactly.
        dataloader: Training batches, without augmentation best. What exceeds 256 MiB is loaded anew in each pass.
        ends: The networks ``a`` and ``b``, the latter as it was merged: permuted to match ``a``. Without them only
            batch-norm statistics are taken anew (the paper's reset).
        alpha: Position of ``net`` between them.
        step: ``step(net, batch) -> (output, target)``, as in :func:`~lightning_symmetry.landscape.evaluate_path`; its
            first result may be a loss.
        transfer: Applied to each batch once it is loaded; default: to the device of ``net``.
        progress: Whether to show a progress bar.

    Returns:
        ``net``. But for the corrected weights, biases and statistics nothing has changed: modes, hooks, gradients and
        torch's global random state. After an error nothing has.

    Raises:
        NothingToRepairError: If there is nothing to correct.
        ValueError: If there is no data, or the ends have another architecture.

    Source: Jordan et al., REPAIR: REnormalizing Permuted Activations for Interpolation Repair (ICLR 2023).
    """
    if not math.isfinite(alpha):
        raise ValueError(f"Expected `alpha` to be finite but got {alpha}.")
    if ends is not None and alpha in (0, 1) and _same(net, ends[int(alpha)]):
        return net
    device = device_of(net)
    groups = BatchGroups(dataloader, transfer or (lambda batch: to_device(batch, device)), "dataloader")
    tensors = list(chain(net.parameters(), net.buffers()))
    before = [tensor.detach().clone() for tensor in tensors]

    def move_to(index: int = 0) -> None:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)

    def end(index: int) -> nn.Module:
        return plain_copy(ends[index], keep_affine=True).to(device).eval()

    with evaluating(net):
        repairs = Repairs(net, [float(alpha)], move_to)
        try:
            repairs.find(groups, step, end if ends is not None else None, progress)
        finally:
            move_to()
        repairs.apply(0)
    return net


class Repairs:
    """Corrections of one network at several of its parameter settings: a scale and a shift for each unit.

    Args:
        net: The network, in evaluation mode.
        alphas: Position of each setting between the two ends.
        move_to: Sets the network to the setting of an index.
    """

    def __init__(self, net: nn.Module, alphas: Sequence[float], move_to: Callable[[int], Any]) -> None:
        self.net, self.alphas, self.move_to = net, alphas, move_to
        self._rows: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in alphas]
        self._statistics = BatchNormStatistics(net)
        self._batch_norm: list[list[Tensor]] | None = None

    def apply(self, index: int) -> None:
        """Correct the network, which stands at the setting of an index."""
        for name, correction in self._rows[index].items():
            rescale(self.net.get_submodule(name), *correction)
        if self._batch_norm is not None:
            self._statistics.load(self._batch_norm[index])

    def find(
        self, groups: BatchGroups, step: Step, end: Callable[[int], nn.Module] | None, progress: bool = False
    ) -> None:
        """Find the corrections.

        Args:
            groups: Training batches.
            step: Calls the network.
            end: Returns the network at the first or the second end, which may be ``net`` itself. None: only
                batch-norm statistics are taken.
            progress: Whether to show a progress bar.

        Raises:
            NothingToRepairError: If there is nothing to correct.
            ValueError: If there is no data, or the ends have another architecture.
        """
        with _eager(self.net):
            self._find(groups, step, end, progress)

    def _find(self, groups: BatchGroups, step: Step, end: Callable[[int], nn.Module] | None, progress: bool) -> None:
        axes, at_ends = ({}, []) if end is None else _at_ends(self.net, groups, step, end)
        if not axes and not self._statistics.layers:
            what = "hidden linear or convolutional layer to rescale and no " if end is not None else ""
            hint = "" if end is not None else "; give `ends` to rescale its hidden layers"
            raise NothingToRepairError(
                f"There is nothing to repair: {type(self.net).__name__} has no {what}batch normalisation with running "
                f"statistics{hint}."
            )

        run = partial(step, self.net)
        passes = [*axes.items(), None] if self._statistics.layers else list(axes.items())
        for layer in tqdm(passes, desc="repair", disable=not progress, leave=False):
            if layer is None:
                self._batch_norm = self._statistics.recompute(len(self.alphas), self._place, groups, run)
            else:
                self._correct(*layer, at_ends, groups, run)

    def _place(self, index: int) -> None:
        self.move_to(index)
        self.apply(index)

    def _correct(
        self, name: str, axis: int, at_ends: list[Moments], groups: BatchGroups, run: Callable[[Any], Any]
    ) -> None:
        """Measure a layer behind the corrections found so far, at each setting, and find its own."""
        first, second = (moments[name] for moments in at_ends)
        here = [UnitMoments() for _ in self.alphas]
        once = first.batches == first.calls and second.batches == second.calls
        for batches in groups:
            for index, moments in enumerate(here):
                self._place(index)
                with self._statistics.of_the_batch():
                    measure(self.net, {name: axis}, {name: moments}, batches, run, stop=once)
        for moments, alpha, rows in zip(here, self.alphas, self._rows, strict=True):
            if moments.count:
                mean = (1 - alpha) * first.mean + alpha * second.mean
                std = (1 - alpha) * first.std + alpha * second.std
                rows[name] = moments.correction(mean, std.clamp(min=0))  # negative where it is extrapolated


@torch.no_grad()
def rescale(layer: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Give each unit of a linear or convolutional layer a scale and, if it has a bias, a shift."""
    wide = torch.promote_types(layer.weight.dtype, torch.float32)
    scale, shift = (factor.to(layer.weight.device, wide) for factor in (scale, shift))
    layer.weight.copy_(layer.weight * scale.view(-1, *[1] * (layer.weight.ndim - 1)))
    if layer.bias is not None:
        layer.bias.copy_(layer.bias * scale + shift)


def _at_ends(
    net: nn.Module, groups: BatchGroups, step: Step, end: Callable[[int], nn.Module]
) -> tuple[dict[str, int], list[Moments]]:
    """Return the layers to rescale, with the axes of their units, and the moments of their units at each end."""
    batch = next(iter(groups))[0]
    axes, others = hidden_layers(net, lambda: step(net, batch)[0])
    if others:
        warnings.warn(
            f"REPAIR leaves {', '.join(others[:5])}{f' and {len(others) - 5} more' * (len(others) > 5)} alone: "
            "constants, other coordinates, tied weights or a `forward` of its own.",
            stacklevel=2,
        )
    if not axes:
        return {}, []
    at_ends: list[Moments] = []
    for index in range(2):
        other = end(index)
        _check_layers(net, other, axes, index)
        moments = {name: UnitMoments() for name in axes}
        for batches in groups:
            measure(other, axes, moments, batches, partial(step, other))
        if missing := [name for name, units in moments.items() if not units.count]:
            raise ValueError(f"Over all data ends[{index}] gave no samples at {missing[0]} to take statistics from.")
        at_ends.append(moments)
    return axes, at_ends


def _check_layers(net: nn.Module, end: nn.Module, names: Iterable[str], index: int) -> None:
    theirs = dict(end.named_modules())
    for name in names:
        shape = net.get_submodule(name).weight.shape
        weight = getattr(theirs.get(name), "weight", None)
        if weight is None or weight.shape != shape:
            found = "is missing" if weight is None else f"has a weight of shape {tuple(weight.shape)}"
            raise ValueError(
                f"The networks differ in architecture: {name} has a weight of shape {tuple(shape)} in `net` and "
                f"{found} in ends[{index}]."
            )


def _same(net: nn.Module, end: nn.Module) -> bool:
    ours, theirs = net.state_dict(), end.state_dict()
    return ours.keys() == theirs.keys() and all(
        value.shape == theirs[name].shape and torch.equal(value, theirs[name].to(value.device))
        for name, value in ours.items()
        if isinstance(value, Tensor)
    )


def _eager(net: nn.Module) -> AbstractContextManager[Any]:
    """Do without compiled code, which does not know of hooks."""
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in net.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
