"""Whether a rescaling leaves the function of a network as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.permutation.rescaling import Rescaling
from lightning_symmetry.permutation.trace import tensors_in
from lightning_symmetry.surgery import call, evaluating

NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_TOLERANCE = 1e-6  # relative; what is no symmetry changes the output by about its own size
_TINY_EPS = 1e-30


class RescalingCheck:
    """Tries random elements of a rescaling in float64, at random parameters and a random input.

    Args:
        net: The network; it is left as it was.
        example_input: Example of its arguments, around which the input is drawn.
        normalising: Whether norms do so exactly: with a tiny eps and, for batch norm, the statistics of the batch.
    """

    def __init__(self, net: nn.Module, example_input: Any, normalising: bool) -> None:
        generator = self._generator = torch.Generator().manual_seed(0)
        self._net = copy.deepcopy(net).cpu().double()
        self._normalising = normalising
        with torch.no_grad():  # off special values such as zero and one
            for parameter in self._net.parameters():
                if parameter.is_floating_point():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self._inputs = _random_like(example_input, generator)
        self._state = {name: tensor.clone() for name, tensor in self._net.state_dict().items()}
        self._expected = self._outputs(self._state)

    @property
    def is_possible(self) -> bool:
        """Whether the network takes a random input in float64."""
        return self._expected is not None

    def which_hold(self, proposed: Sequence[Rescaling]) -> list[bool]:
        """Say of each proposal whether it is a symmetry; they are tried together, and in halves where that fails."""
        if not proposed or self._hold(proposed):
            return [True] * len(proposed)
        half = len(proposed) // 2
        return [*self.which_hold(proposed[:half]), *self.which_hold(proposed[half:])] if half else [False]

    def _hold(self, proposed: Sequence[Rescaling]) -> bool:
        changed = self._state
        for rescaling in proposed:
            changed = rescaling.apply(changed, rescaling.random(self._generator))
        outputs = self._outputs(changed)
        if outputs is None or self._expected is None:
            return False
        pairs = [(a, b) for a, b in zip(outputs, self._expected, strict=True) if b.numel()]
        return all(float((a - b).abs().max()) <= _TOLERANCE * float(b.abs().max()) for a, b in pairs)

    def _outputs(self, state: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Return what the network makes of the input; None if it refuses it."""
        self._net.load_state_dict(dict(state))
        with evaluating(self._net):
            for module in self._net.modules():
                if self._normalising and isinstance(module, NORM_LAYERS):
                    module.train()
                    module.eps = _TINY_EPS
            try:
                return [t.double() for t in tensors_in(call(self._net, self._inputs)) if t.is_floating_point()]
            except (ValueError, RuntimeError, TypeError):
                return None


def _random_like(value: Any, generator: torch.Generator) -> Any:
    """Return arguments of the same kind with random real entries."""
    if isinstance(value, Tensor):
        value = value.cpu()
        if value.is_floating_point():
            return value.double() + torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return value
    if isinstance(value, Mapping):
        return {key: _random_like(part, generator) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_random_like(part, generator) for part in value]
    return value
