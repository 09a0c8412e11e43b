"""Which layers of a network a conversion can replace, and why it leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from lightning_symmetry.surgery.contract import HasConstants, ReparametrizedLayer
from lightning_symmetry.surgery.replace import tied_parameters, why_not_callable

# Weights of other kinds, which reports name so that nobody takes them for converted.
OTHER_MAPS = (
    nn.MultiheadAttention,
    nn.Bilinear,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.RNNCellBase,
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which are lost where it is replaced."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def is_plain_but_for_constants(layer: nn.Module) -> bool:
    """Whether a layer's parameters are the canonical ones, of which some entries are constants."""
    constants = isinstance(layer, HasConstants) and hasattr(layer, "trainable_entries")
    return constants and isinstance(layer, ReparametrizedLayer) and layer.affine and "weight" in layer._parameters


def is_graph_linear(kind: type) -> bool:
    """Whether a class is torch-geometric's ``Linear``, which takes seconds to import."""
    return (kind.__module__, kind.__qualname__) == ("torch_geometric.nn.dense.linear", "Linear")


def why_not_decomposable(weight: Tensor) -> str | None:
    """Return why a weight has no values to build other coordinates from, or None."""
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if weight.numel() == 0:
        return "its weight is empty"
    if weight.is_meta:
        return "its weight is on the meta device"
    if not bool(weight.isfinite().all()):
        return "its weight is not finite"
    return None


def why_not_convertible(
    net: nn.Module,
    layers: Mapping[str, nn.Module],
    kinds: Iterable[type[nn.Module]],
    known: Callable[[nn.Module], bool],
    may_be_tied: Container[str] = (),
) -> dict[str, str]:
    """Return the reason for each layer that no conversion can replace.

    Args:
        net: The network.
        layers: Its layers by name.
        kinds: Plain layers that the conversion is for; a subclass of one may have a forward of its own.
        known: Whether the conversion knows how a layer computes.
        may_be_tied: Names of layers whose tied parameters the conversion takes care of.
    """
    kinds = tuple(kinds)
    uncalled = why_not_callable(net)
    tied = tied_parameters(net)
    reasons = {}
    for name, module in layers.items():
        weight = module._parameters.get("weight")
        if name in uncalled:
            reasons[name] = uncalled[name]
        elif isinstance(weight, UninitializedParameter) and (isinstance(module, kinds) or known(module)):
            reasons[name] = "its parameters are lazy: run the network once before"
        elif isinstance(module, kinds) and (parametrize.is_parametrized(module) or "weight" not in module._parameters):
            reasons[name] = "its weight is parametrised"
        elif not known(module):
            base = next((kind for kind in kinds if isinstance(module, kind)), None)
            if base:
                reasons[name] = f"a subclass of {base.__name__} with a forward of its own"
            elif isinstance(module, ReparametrizedLayer):
                reasons[name] = f"{type(module).__name__} holds its weight in other coordinates"
            else:
                reasons[name] = "its weights are not those of a linear layer or convolution"
        elif name in tied and name not in may_be_tied:
            reasons[name] = f"its parameters are tied to {', '.join(other or 'the network' for other in tied[name])}"
        elif has_hooks(module):
            reasons[name] = "it has hooks, which would be lost"
    return reasons
