"""Input statistics of all whitened layers from one run of the network."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.statistics import InputStatistics


def whitened_layers(net: nn.Module) -> dict[str, HasWhitening]:
    """Return the whitened layers of a network by name; a shared one once, under its first name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, HasWhitening)}


def collect_statistics(
    net: nn.Module, run: Callable[[], Any], layers: Iterable[str] | None = None
) -> dict[str, InputStatistics]:
    r"""Run a network once and return the statistics of its whitened layers' inputs.

    .. math:: \mu = E[h], \qquad \Sigma = E[(h - \mu)(h - \mu)^\top]

    ``run`` is called without gradients, and eagerly where the network is compiled. Nothing else is done for it: whether
    the network is in training mode, and whether batch norms move their buffers, is up to the caller.

    Statistics of a layer without bias are taken about zero, unless its output is seen to go straight into a batch or
    instance normalisation, see :class:`InputStatistics`. (One whose statistics are frozen is not told apart.)

    Args:
        net: A network with whitened layers.
        run: What calls the network, with one or more batches.
        layers: Names of layers to look at. Default: all.

    Returns:
        Statistics by the layer's name. A layer that is called several times pools its calls; one that is never called
        is absent.

    Raises:
        ValueError: If there is no whitened layer, or none of a name.

    Source: Natural Neural Networks (2015), Algorithm 1: one forward pass serves all layers, since a change of their
    coefficients does not change the function.
    """
    found = whitened_layers(net)
    names = list(found) if layers is None else list(layers)
    if not found or (unknown := [name for name in names if name not in found]):
        what = f"called {unknown[0]!r}" if found else "at all"
        raise ValueError(f"{type(net).__name__} has no whitened layer {what}: convert it with whiten(net) first.")
    watch = _Watch()
    handles = []
    try:
        for name in names:
            handles.append(found[name].register_forward_pre_hook(watch.input_of(name, found[name]), with_kwargs=True))
            if found[name].bias is None:
                handles.append(found[name].register_forward_hook(watch.output_of(name)))
        for module in net.modules():
            if isinstance(module, _BatchNorm | _InstanceNorm):
                handles.append(module.register_forward_pre_hook(watch.normalised))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return watch.statistics


class _Watch:
    """The hooks: what goes into layers, and which outputs are normalised at once."""

    def __init__(self) -> None:
        self.statistics: dict[str, InputStatistics] = {}
        self._outputs: dict[str, weakref.ref[Tensor]] = {}

    def input_of(self, name: str, layer: HasWhitening) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in self.statistics:
                self.statistics[name] = layer.statistics()
            self.statistics[name].add(args[0] if args else next(iter(kwargs.values())))

        return hook

    def output_of(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self._outputs[name] = weakref.ref(output)

        return hook

    def normalised(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, output in self._outputs.items():
            if args and output() is args[0]:
                self.statistics[name].centred = True
