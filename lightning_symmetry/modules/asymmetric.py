"""Train an asymmetric version of a base network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.modules.supervised import SupervisedModule


class AsymmetricModule(SupervisedModule):
    """Wrap a base network with an asymmetry transform and train it.

    Masks and constants are buffers in the checkpoint: a module loaded in another process has the same ones, whatever
    was drawn when it was built. ``AsymmetricModule.load_from_checkpoint(path, net=base_network)`` needs the base
    network only; the settings of the transform are hyper-parameters in the checkpoint.

    Args:
        net: The base network, changed in place.
        method: See :func:`~lightning_symmetry.asymmetry.asymmetrize`, also for the arguments up to ``example_input``.
        preset: Name of one of the paper's settings.
        n_fix: Fixed entries in each row.
        kappa: Standard deviation of the constants.
        layout: ``"entries"`` or ``"filters"``.
        scale: Scale of FiGLU.
        asymmetry_seed: Seed of masks and constants: not the training seed. Networks to interpolate share it.
        skip: Patterns of layers to leave alone.
        overrides: Settings of single layers by pattern.
        example_input: An input of the network, for sigma.
        loss: See :class:`SupervisedModule`, also for what follows.
        optimizer: Called with the parameters.
        scheduler: Called with the optimizer.
        interval: Whether the scheduler steps by epoch or step.
        metrics: torchmetrics by name.

    Raises:
        ValueError: If the network cannot be converted.
    """

    def __init__(
        self,
        net: nn.Module,
        method: Literal["w", "sigma"] | None = None,
        preset: str | None = None,
        n_fix: int | float | None = None,
        kappa: float | None = None,
        layout: Literal["entries", "filters"] | None = None,
        scale: float | None = None,
        asymmetry_seed: int = 0,
        skip: Sequence[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        example_input: Any = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        optimizer: Callable[[Any], Optimizer] = partial(torch.optim.AdamW, lr=1e-3),  # noqa: B008 (never changed)
        scheduler: Callable[[Optimizer], Any] | None = None,
        interval: Literal["epoch", "step"] = "epoch",
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        asymmetrize(
            net,
            method,
            preset=preset,
            n_fix=n_fix,
            kappa=kappa,
            layout=layout,
            scale=scale,
            seed=asymmetry_seed,
            skip=skip,
            overrides=overrides,
            example_input=example_input,
        )
        super().__init__(net, loss, optimizer, scheduler, interval, metrics)
        self.save_hyperparameters(ignore=["net", "example_input", "loss", "optimizer", "scheduler", "metrics"])
