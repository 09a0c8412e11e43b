"""Which layers of a network can have a posterior, and why others are left alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_symmetry.surgery import (
    OTHER_MAPS,
    ReparametrizedLayer,
    is_graph_linear,
    is_plain_but_for_constants,
    module_names,
    why_not_convertible,
    why_not_decomposable,
)
from lightning_symmetry.variational.conv import VariationalConv1d, VariationalConv2d
from lightning_symmetry.variational.embedding import VariationalEmbedding
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.linear import VariationalLinear

LAYERS: dict[type[nn.Module], type[VariationalLayer]] = {
    nn.Linear: VariationalLinear,
    nn.Conv1d: VariationalConv1d,
    nn.Conv2d: VariationalConv2d,
    nn.Embedding: VariationalEmbedding,
}


def find_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a network that hold linear maps by their first name.

    Raises:
        ValueError: If the network has variational layers already, or is a layer itself.
    """
    names = module_names(net)
    if found := [all_[0] for module, all_ in names.items() if isinstance(module, VariationalLayer)]:
        listed = f"{', '.join(found[:3])} ({len(found)} layers)"
        raise ValueError(f"The network is variational already: {listed}. Call to_mean(net) first.")
    layers = {all_[0]: module for module, all_ in names.items() if _is_map(module)}
    if plain_kind(net) in LAYERS:
        raise ValueError(
            f"The network is itself a {type(net).__name__}: use the from_layer of a variational layer or wrap it in "
            "nn.Sequential first."
        )
    return layers


def why_left_alone(net: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the reason for each layer that can have no posterior.

    Args:
        net: The network.
        layers: Its layers by name.
    """
    reasons = why_not_convertible(net, layers, LAYERS, _is_known)
    for name, module in layers.items():
        if is_graph_linear(type(module)):
            reasons[name] = "it is torch-geometric's Linear"
        elif name not in reasons and (reason := _own_reason(module)):
            reasons[name] = reason
    return reasons


def base_of(layer: nn.Module) -> nn.Module:
    """Return the layer that a posterior is built from.

    That is the layer itself if it is plain or plain but for constants, and else the plain layer that it stands for.
    """
    return layer.to_layer() if loses_coordinates(layer) else layer


def plain_kind(layer: nn.Module) -> type[nn.Module]:
    """Return the type of the plain layer that a layer stands for."""
    return type(layer.to_layer()) if isinstance(layer, ReparametrizedLayer) else type(layer)


def loses_coordinates(layer: nn.Module) -> bool:
    """Whether a layer has other coordinates than a canonical weight with constants, which its posterior has not."""
    return isinstance(layer, ReparametrizedLayer) and not is_plain_but_for_constants(layer)


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, (*LAYERS, *OTHER_MAPS, ReparametrizedLayer)) or is_graph_linear(type(module))


def _is_known(module: nn.Module) -> bool:
    return type(module) in LAYERS or isinstance(module, ReparametrizedLayer)


def _own_reason(module: nn.Module) -> str | None:
    """Return why a layer that could be replaced can have no posterior."""
    if hasattr(module, "whitening_state"):
        return "it is whitened: call unwhiten(net) first"
    if (kind := plain_kind(module)) not in LAYERS:
        which = "torch-geometric's Linear" if is_graph_linear(kind) else f"a {kind.__name__}"
        return f"{type(module).__name__} stands for {which}"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "its max_norm, scale_grad_by_freq or sparse acts on rows of the table, which are drawn together"
    return why_not_decomposable(base_of(module).weight)
