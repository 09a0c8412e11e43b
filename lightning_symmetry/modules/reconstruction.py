"""Training of autoencoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_symmetry.modules.supervised import Split, SupervisedModule


def half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    r"""Return :math:`\frac12 \|x - \hat x\|^2` of each sample, averaged over the batch."""
    return 0.5 * (output - target).square().sum(1).mean()


class ReconstructionModule(SupervisedModule):
    """Train a network to return its input, flattened; labels in the batches are ignored.

    Logs ``{train,val,test}/loss`` by epoch.

    Args:
        net: The network.
        loss: ``loss(output, input) -> scalar mean over the batch``. Default: half the squared error of each sample.
        optimizer: Called with the parameters. Default: AdamW with learning rate 1e-3.
        scheduler: Called with the optimizer; none by default.
        interval: Whether the scheduler steps by ``"epoch"`` or by optimizer ``"step"``.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[Any, Any], Tensor] = half_squared_error,
        optimizer: Callable[[Any], Optimizer] = partial(torch.optim.AdamW, lr=1e-3),  # noqa: B008 (never changed)
        scheduler: Callable[[Optimizer], Any] | None = None,
        interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(net, loss, optimizer, scheduler, interval)

    def output_and_target(self, batch: Any, split: Split) -> tuple[Tensor, Tensor]:
        """Return the reconstruction and the flattened input."""
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return self.net(inputs), inputs.flatten(1)
