"""Checkpoints of a network that is factorised in the middle of training load into a dense one, and the other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.attention import (
    PROJECTIONS,
    DenseProjection,
    LowRankMultiheadAttention,
    LowRankProjection,
    projections_of,
)
from lightning_symmetry.low_rank.candidates import LAYERS, is_asymmetric, is_factorized, plain
from lightning_symmetry.low_rank.recompose import recompose
from lightning_symmetry.surgery.layout import Layout, restructure
from lightning_symmetry.surgery.replace import module_names

LAYOUT_KEY = "low_rank_layout"
"""Where a checkpoint has its layout."""


class LowRankLayoutMixin:
    """A LightningModule whose checkpoints know which layers have factors; put it before ``LightningModule``.

    A checkpoint gets the layout, ``{layer name: {"rank": r, "scheme": ...}}``, of attention the rank of each
    projection. Before a checkpoint's weights are loaded the module gets the same layers, dense or factorised: on
    ``fit(ckpt_path=)``, ``validate`` and ``test``, on ``load_from_checkpoint``, and on ``torch.load`` followed by
    ``on_load_checkpoint(checkpoint)`` and ``load_state_dict``; from before a switch to after it and back. Of a
    checkpoint without a layout it is read off the names and shapes of its state.

    A module with ``on_save_checkpoint`` or ``on_load_checkpoint`` of its own calls these through ``super()``. Its
    ``configure_optimizers`` must sort factors (``left``, ``right``) into the groups that it sorts ``weight`` into.

    Example::

        >>> import lightning.pytorch as pl
        >>> from lightning_symmetry.modules import LowRankLayoutMixin
        >>> class Classifier(LowRankLayoutMixin, pl.LightningModule):
        ...     pass
    """

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the layout."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[LAYOUT_KEY] = layout_of(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the layout of a checkpoint, before its weights are loaded."""
        apply_layout(self, checkpoint.get(LAYOUT_KEY, layout_of_state(self, checkpoint["state_dict"])))
        super().on_load_checkpoint(checkpoint)


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
    layout = {}
    for module, names in module_names(net).items():
        name = names[0]
        if settings := _settings_in(module, {key: state.get(f"{name}.{key}".lstrip(".")) for key in _KEYS}):
            layout[name] = settings
    return layout


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
    return {"rank": module.rank, **({"scheme": module.scheme} if module.left.ndim == 4 else {})}


def _settings_in(module: nn.Module, state: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return a layer's settings in a state; none if it is a plain layer there, or no layer of these kinds."""
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
        new = LowRankMultiheadAttention.from_layer(layer, 1, "random", min_saving=-1)
        for key, (weight, _, like) in projections_of(layer).items():
            if rank := settings[key]:
                factors = (weight.new_zeros(1, size, rank) for size in weight.shape)
                new.add_module(key, LowRankProjection(*factors, like))
            else:
                new.add_module(key, DenseProjection(weight, like))
        return new.train(layer.training)
    dense = plain(layer)
    kind = LAYERS.get(type(dense))
    if kind is None:
        raise ValueError(f"The checkpoint has factors for {name!r}, but it is a {type(layer).__name__}.")
    scheme = {"scheme": settings["scheme"]} if "scheme" in settings else {}
    matrices = kind.matrices_of(dense, **scheme)
    factors = (matrices.new_zeros(len(matrices), size, settings["rank"]) for size in matrices.shape[1:])
    new = kind.from_factors(dense, *factors, **scheme)
    if dense is not layer:
        new.register_parameter("bias", layer.bias)  # the same object, not the plain layer's copy
    return new
