"""The posterior of a whole network: its divergence, samples of it, and how outputs are sampled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_symmetry.surgery import module_names, replace_modules
from lightning_symmetry.variational.gaussian import divergence
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.settings import Mode, check_mode

NetT = TypeVar("NetT", bound=nn.Module)


def variational_layers(net: nn.Module) -> dict[str, VariationalLayer]:
    """Return the variational layers of a network by their first name.

    Args:
        net: The network.

    Raises:
        ValueError: If there are none.
    """
    found = {name: module for name, module in net.named_modules() if isinstance(module, VariationalLayer)}
    if not found:
        raise ValueError(f"{type(net).__name__} has no variational layer: call to_variational(net) first.")
    return found


def kl_divergence(net: nn.Module) -> Tensor:
    r"""Return :math:`\mathrm{KL}(q \,\|\, \text{prior})` of a network, summed over its layers and all their entries.

    A layer that is shared at several places counts once. See
    :func:`~lightning_symmetry.variational.gaussian.gaussian_kl` for the equation.

    Args:
        net: A network with variational layers.

    Returns:
        A scalar in nats, differentiable, in float64 whatever the network's type. It belongs to all N samples of the
        training set, see :func:`~lightning_symmetry.variational.elbo.negative_elbo`.

    Raises:
        ValueError: If there are no variational layers.
    """
    layers = variational_layers(net).values()
    return divergence([layer.gaussian() for layer in layers], [layer.prior_variance for layer in layers])


def optimal_prior_variances(net: nn.Module) -> dict[str, float]:
    r"""Return for each layer the variance of the prior with the least divergence.

    .. math:: p^* = \frac1P \Big( \sum d + \operatorname{tr} G + \|\mu\|^2 \Big)

    Args:
        net: A network with variational layers.

    Returns:
        p by the layer's name. ``prior="optimal"`` uses it at any time.

    Raises:
        ValueError: If there are no variational layers.
    """
    return {name: layer.optimal_prior_variance() for name, layer in variational_layers(net).items()}


def check_finite(net: nn.Module) -> None:
    """Check that all parameters of the posterior are finite; on an accelerator this waits for it.

    Args:
        net: A network with variational layers.

    Raises:
        ValueError: If one is not, with its name; or if there are no variational layers.
    """
    for name, layer in variational_layers(net).items():
        for key, parameter in layer.named_parameters(recurse=False):
            if not bool(parameter.isfinite().all()):
                raise ValueError(f"`{name}.{key}` is not finite: its divergence and all samples are NaN or infinite.")


@torch.no_grad()
def sample_network(net: NetT, generator: torch.Generator | None = None) -> NetT:
    """Return a deterministic copy of a network with weights that are drawn from the posterior.

    Layers are those that :func:`~lightning_symmetry.variational.convert.to_variational` replaced, so that fixed entries
    stay fixed. A layer that is shared at several places is drawn once.

    Args:
        net: A network with variational layers; it is left as it is.
        generator: What it is drawn from, on the network's device; None: the global random state.

    Raises:
        ValueError: If there are no variational layers.
    """
    variational_layers(net)
    net = copy.deepcopy(net)
    if isinstance(net, VariationalLayer):
        return net.collapse(generator)
    return put_back(net, lambda layer: layer.collapse(generator))


def put_back(net: NetT, layer_of: Callable[[VariationalLayer], nn.Module]) -> NetT:
    """Put deterministic layers in the places of variational ones, in place, and drop the report of their conversion.

    Args:
        net: The network.
        layer_of: Returns the layer for a variational one, once for all its places.

    Raises:
        ValueError: If the network is itself a variational layer.
    """
    layers = {module: names for module, names in module_names(net).items() if isinstance(module, VariationalLayer)}
    for module, names in layers.items():
        replace_modules(net, dict.fromkeys(names, layer_of(module)))
    if "variational_report" in net.__dict__:
        del net.variational_report
    return net


@contextmanager
def sampling_mode(net: nn.Module, mode: Mode) -> Iterator[None]:
    """Sample outputs in another way, or with ``"mean"`` not at all, as long as the context lasts.

    Args:
        net: A network with variational layers.
        mode: ``"local"``, ``"shared"``, ``"weight"`` or ``"mean"``.

    Raises:
        ValueError: If there is no such mode, or there are no variational layers.
    """
    check_mode(mode)
    layers = list(variational_layers(net).values())
    before = [layer.mode for layer in layers]
    try:
        for layer in layers:
            layer.mode = mode
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.mode = old
