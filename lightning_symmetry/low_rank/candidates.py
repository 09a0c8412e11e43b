"""Which layers of a network can be factorised, and why the others cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.conv import LowRankConv1d, LowRankConv2d
from lightning_symmetry.low_rank.embedding import LowRankEmbedding
from lightning_symmetry.low_rank.layer import LowRankLayer
from lightning_symmetry.low_rank.linear import LowRankLinear
from lightning_symmetry.low_rank.projections import projections_of
from lightning_symmetry.surgery import (
    OTHER_MAPS,
    HasConstants,
    ReparametrizedLayer,
    has_hooks,
    is_graph_linear,
    module_names,
    why_not_convertible,
    why_not_decomposable,
)

LAYERS: dict[type[nn.Module], type[LowRankLayer]] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv1d,
    nn.Conv2d: LowRankConv2d,
    nn.Embedding: LowRankEmbedding,
}
"""What each plain layer becomes."""


def find_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a network that hold matrices, by name; attention is one layer, with its projections.

    Raises:
        ValueError: If the network is factorised or whitened already, or is a layer itself.
    """
    names = module_names(net)
    for is_so, what, hint in ((is_factorized, "factorised", "recompose"), (_is_whitened, "whitened", "unwhiten")):
        if found := [all_[0] for module, all_ in names.items() if is_so(module)]:
            listed = f"{', '.join(found[:3])} ({len(found)} layers)"
            raise ValueError(f"The network is {what} already: {listed}. Call {hint}(net) first.")
    layers = {found[0]: module for module, found in names.items() if _is_map(module)}
    for name in [name for name, module in layers.items() if isinstance(module, nn.MultiheadAttention)]:
        layers.pop(f"{name}.out_proj".lstrip("."), None)
    if type(layers.get("")) in (*LAYERS, nn.MultiheadAttention):
        raise ValueError(
            f"The network is itself a {type(net).__name__}: use LowRank{type(net).__name__}.from_layer or wrap it in "
            "nn.Sequential first."
        )
    return layers


def is_factorized(module: nn.Module) -> bool:
    """Whether a module is a factorised layer."""
    return isinstance(module, LowRankLayer | LowRankMultiheadAttention)


def plain(layer: nn.Module) -> nn.Module:
    """Return the plain layer that one with constants stands for; others are returned as they are."""
    return layer.to_layer() if is_asymmetric(layer) else layer


def why_left_alone(net: nn.Module, layers: Mapping[str, nn.Module], ties: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the reason for each layer that cannot be factorised.

    Args:
        net: The network.
        layers: Its layers by name.
        ties: The names that share a weight, by name.
    """
    reasons = why_not_convertible(net, layers, LAYERS, _is_known, may_be_tied=ties)
    for name, module in layers.items():
        if is_graph_linear(type(module)):
            reasons[name] = "it is torch-geometric's Linear"
        elif name not in reasons and (reason := _own_reason(module)):
            reasons[name] = reason
    return reasons


def tied_weights(net: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return the names that share a weight which can be factorised for all of them at once, by name.

    The plain layers of a group see the same matrix: linear layers and embeddings, or convolutions with as many groups.
    A tied bias needs no care, since biases stay the same objects. A layer that shares no weight has its own name only.
    """
    holders: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, module in net.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders[id(parameter)].append((name, key))
    ties: dict[str, list[str]] = {}
    for name, module in layers.items():
        if type(module) not in LAYERS or module._parameters.get("weight") is None:
            continue
        shared = holders[id(module.weight)]
        names = [other for other, _ in shared]
        views = {_view(layers.get(other)) if key == "weight" else None for other, key in shared}
        biases = module._parameters.get("bias")
        if len(views) == 1 and None not in views and (biases is None or _all_biases(holders[id(biases)])):
            ties[name] = names
    return ties


def _all_biases(holders: list[tuple[str, str]]) -> bool:
    return all(key == "bias" for _, key in holders)


def _view(module: nn.Module | None) -> object:
    """Return what two layers with the same weight must agree in to have the same factors; None if it is unknown."""
    if type(module) in (nn.Linear, nn.Embedding):
        return "matrix"
    return (type(module), module.groups) if type(module) in LAYERS else None


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, (*LAYERS, *OTHER_MAPS, ReparametrizedLayer)) or is_graph_linear(type(module))


def _is_whitened(module: nn.Module) -> bool:
    return hasattr(module, "whitening_state")


def is_asymmetric(module: nn.Module) -> bool:
    """Whether a layer is plain but for constants, which its plain layer has not."""
    return isinstance(module, ReparametrizedLayer) and isinstance(module, HasConstants) and module.affine


def _is_known(module: nn.Module) -> bool:
    return type(module) in (*LAYERS, nn.MultiheadAttention) or isinstance(module, ReparametrizedLayer)


def _own_reason(module: nn.Module) -> str | None:
    """Return why a layer that could be replaced cannot be factorised."""
    if isinstance(module, nn.MultiheadAttention):
        out = module.out_proj
        if has_hooks(out) or "weight" not in out._parameters or not type(out).__module__.startswith("torch.nn.modules"):
            return "its out_proj is not the one that it was built with"
        weights = [weight for weight, _, _ in projections_of(module).values()]
    else:
        layer = plain(module)
        if type(layer) not in LAYERS:
            return f"{type(module).__name__} holds its weight in other coordinates"
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            return "its max_norm or scale_grad_by_freq acts on rows of the table, which factors do not have"
        weights = [layer.weight]
    return next(filter(None, map(why_not_decomposable, weights)), None)
