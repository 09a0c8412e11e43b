"""Checkpoints of Bayesian modules, and deterministic ones that a Bayesian module starts from."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_symmetry.low_rank.layout import recomposed_state
from lightning_symmetry.modules.low_rank_layout import LAYOUT_KEY as LOW_RANK_KEY
from lightning_symmetry.variational.convert import to_mean
from lightning_symmetry.variational.layout import apply_layout, layout_of

KEY = "variational"
"""Where a checkpoint has the layout of the posterior and the seed of the noise."""


def save_layout(module: pl.LightningModule, checkpoint: dict[str, Any], seed: int | None) -> None:
    """Write the layout of a module's posterior and the seed of its noise.

    Args:
        module: The module.
        checkpoint: The checkpoint.
        seed: The seed.
    """
    checkpoint[KEY] = {"layout": layout_of(module), "seed": seed}


def load_layout(module: pl.LightningModule, checkpoint: dict[str, Any]) -> int | None:
    """Give a module the posterior of a checkpoint, before its weights are loaded, and return the seed of its noise.

    Of a deterministic checkpoint the module keeps the posterior that it has: weights become means, low-rank factors
    the weights that they stand for, and of its optimizer, whose parameters are fewer, nothing is taken.

    Args:
        module: The module.
        checkpoint: The checkpoint; state and optimizer states of a deterministic one may change.

    Raises:
        ValueError: If the module has no such layers.
    """
    if saved := checkpoint.get(KEY):
        apply_layout(module, saved["layout"])
        return saved["seed"]
    if "state_dict" in checkpoint:  # sharding strategies keep it elsewhere
        _start_from(module, checkpoint)
    return None


def _start_from(module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    if any(f"{name}.left" in state and f"{name}.weight" not in state for name in layout_of(module)):
        state = checkpoint["state_dict"] = recomposed_state(to_mean(copy.deepcopy(module)), state)
        checkpoint[LOW_RANK_KEY] = {}
    if checkpoint.get("optimizer_states") and any(name not in state for name, _ in module.named_parameters()):
        checkpoint["optimizer_states"] = []
        if module._trainer is not None and module.trainer.state.fn == "fit":
            rank_zero_warn(
                "The checkpoint is of a deterministic network: its weights become the means of the posterior, and the "
                "optimizer, which has more parameters now, starts anew."
            )
