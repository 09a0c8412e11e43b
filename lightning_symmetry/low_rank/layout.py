"""Which layers of a network have factors, read off the network or a state dict, and given to another network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.candidates import LAYERS, is_asymmetric, is_factorized, plain
from lightning_symmetry.low_rank.convert import settings_of
from lightning_symmetry.low_rank.projections import PROJECTIONS
from lightning_symmetry.low_rank.recompose import recompose
from lightning_symmetry.surgery.layout import Layout, restructure
from lightning_symmetry.surgery.replace import module_names, uncompiled


def layout_of(net: nn.Module) -> Layout:
    """Return the settings of each factorised layer by its first name; of attention, 0 for a dense projection.

    Args:
        net: The network.
    """
    return {names[0]: _settings_of(module) for module, names in module_names(net).items() if is_factorized(module)}


def layout_of_state(net: nn.Module, state: Mapping[str, Tensor]) -> Layout:
    """Return the layout that a state dict was written with, from its names and shapes.

    Layers of which the state dict has nothing stay as they are.

    Args:
        net: A network with the same layers, factorised or not.
        state: The state dict.
    """
    found = {names[0]: _settings_at(names[0], module, state) for module, names in module_names(net).items()}
    return {name: settings for name, settings in found.items() if settings}


def apply_layout(net: nn.Module, layout: Layout) -> None:
    """Give a network the factorised layers of a layout, and plain ones elsewhere, in place; factors are zero.

    Args:
        net: The network; one that has that layout stays as it is, values included.
        layout: The layout.

    Raises:
        ValueError: If the network has no such layers; it is then as it was.
    """
    if layout_of(net) == layout:
        return
    tied: dict[int, nn.Module] = {}

    def build(name: str, layer: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
        new = _empty(name, layer, settings)
        if (leader := tied.setdefault(id(layer._parameters.get("weight", layer)), new)) is not new:
            new.left, new.right = leader.left, leader.right
        return new

    restructure(net, layout, recompose, build)


def recomposed_state(net: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict that a network has without factors, where it has factors; names are not compiled ones.

    Args:
        net: A plain network with the same layers; it stays as it is.
        state: The state dict.

    Raises:
        ValueError: If factors are not those of a layer of this size.
    """
    result = {uncompiled(key): value for key, value in state.items()}
    for module, names in module_names(net).items():
        names = [uncompiled(name) for name in names]
        if not (settings := _settings_at(names[0], module, result)):
            continue
        new = _empty(names[0], copy.deepcopy(module), settings)
        for prefix in (f"{name}.".lstrip(".") for name in names):
            own = {key.removeprefix(prefix): result.pop(key) for key in list(result) if key.startswith(prefix)}
            try:
                new.load_state_dict(own)
            except RuntimeError as error:
                raise ValueError(f"the factors of {prefix[:-1]} are not those of its layer: {error}") from error
            result |= {prefix + key: value for key, value in new.to_layer().state_dict().items()}
    return result


def follow_state_dicts(module: nn.Module, may_change: Callable[[], bool]) -> torch.utils.hooks.RemovableHandle:
    """Give a module the layout of each state dict before it is loaded; return the handle of the hook that does it.

    Args:
        module: The module.
        may_change: Whether its layers may change now; where they may not they stay, and loading says what differs.
    """

    def before(module: nn.Module, state: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        if not prefix and may_change():
            apply_layout(module, layout_of_state(module, state))

    return module.register_load_state_dict_pre_hook(before)


_ATTENTION = (
    "in_proj_weight",
    "q_proj_weight",
    *(f"{key}.{part}" for key in PROJECTIONS for part in ("left", "weight")),
)
_KEYS = ("left", "right", "weight", *_ATTENTION)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, LowRankMultiheadAttention):
        return {key: getattr(part, "rank", 0) for key, part in module.projections().items()}
    return {"rank": module.rank, **module.settings}


def _settings_at(name: str, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a layer's settings in a network's state; none if it is a plain layer there, or no layer of these kinds."""
    return _settings_in(module, {key: state.get(f"{name}.{key}".lstrip(".")) for key in _KEYS})


def _settings_in(module: nn.Module, state: Mapping[str, Tensor | None]) -> dict[str, Any]:
    factorized = is_factorized(module)
    if isinstance(module, LowRankMultiheadAttention | nn.MultiheadAttention):
        if state["in_proj_weight"] is not None or state["q_proj_weight"] is not None:
            return {}
        ranks = {key: state[f"{key}.left"] for key in PROJECTIONS}
        if any(rank is not None for rank in ranks.values()):
            return {key: 0 if left is None else left.shape[1] for key, left in ranks.items()}
    elif factorized or type(module) in LAYERS or is_asymmetric(module):
        left, right = state["left"], state["right"]
        if left is not None and right is not None:
            rank = {"rank": left.shape[1]}
            return {**rank, "scheme": "1xk-kx1" if left.shape[2] > 1 else "kxk-1x1"} if left.ndim == 4 else rank
        if state["weight"] is not None:
            return {}
    return _settings_of(module) if factorized else {}


def _empty(name: str, layer: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Return the factorised layer of a plain one with factors that are zero."""
    if isinstance(layer, nn.MultiheadAttention):
        return LowRankMultiheadAttention.of_ranks(layer, settings)
    dense = plain(layer)
    kind = LAYERS.get(type(dense))
    if kind is None:
        raise ValueError(f"The checkpoint has factors for {name!r}, but it is a {type(layer).__name__}.")
    own = settings_of(dense, settings)
    matrices = kind.matrices_of(dense, **own)
    factors = (matrices.new_zeros(len(matrices), size, settings["rank"]) for size in matrices.shape[1:])
    new = kind.from_factors(dense, *factors, **own)
    if dense is not layer:
        new.register_parameter("bias", layer.bias)  # the same object, not the plain layer's copy
    return new
