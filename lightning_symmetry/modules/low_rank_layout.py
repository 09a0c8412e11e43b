"""Checkpoints of a network that is factorised in the middle of training load into a dense one, and the other way."""

from __future__ import annotations

from typing import Any

from lightning_symmetry.low_rank.layout import apply_layout, layout_of, layout_of_state

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
        layout = checkpoint.get(LAYOUT_KEY)
        if layout is None and "state_dict" in checkpoint:  # sharding strategies keep it elsewhere
            layout = layout_of_state(self, checkpoint["state_dict"])
        if layout is not None:
            apply_layout(self, layout)
        super().on_load_checkpoint(checkpoint)
