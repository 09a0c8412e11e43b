"""Check that two networks compute the same function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_symmetry.permutation.trace import run_plainly, tensors_in
from lightning_symmetry.surgery import example_of

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest deviation that counts as rounding, relative to the largest output, by the coarsest type of the parameters."""


class NotEquivalentError(ValueError):
    """Two networks that should compute the same function do not."""


def check_equivalence(a: nn.Module, b: nn.Module, example_input: Any = None, tolerance: float | None = None) -> float:
    r"""Check that two networks compute the same function, up to rounding, in evaluation mode.

    .. math:: \max |f_a(x) - f_b(x)| \le \tau \max |f_a(x)|

    Where they do not, the layers are compared in the order in which they run. Hidden units may be permuted, so that the
    sorted values of each layer's output are: they agree for every permutation.

    Args:
        a: A network.
        b: Another, of the same structure.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``a.example_input_array``. Real-valued
            inputs of one value (zeros) would show little and are replaced by normal ones.
        tolerance: The largest relative deviation; by default 1e-10 in float64, 1e-4 in float32, 0.1 in bfloat16.

    Returns:
        The relative deviation.

    Raises:
        NotEquivalentError: If they differ; the message names the first layer that does.
        ValueError: If a network cannot be called with the example input.
    """
    inputs = _informative(example_of(a, example_input))
    dtypes = {p.dtype for p in [*a.parameters(), *tensors_in(inputs)] if p.dtype in TOLERANCES}
    if tolerance is None:
        tolerance = max((TOLERANCES[dtype] for dtype in dtypes), default=TOLERANCES[torch.float32])
    ours, theirs = (tensors_in(_run(net, inputs)) for net in (a, b))
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        raise NotEquivalentError(
            f"The networks differ: one returns shapes {[tuple(t.shape) for t in ours]} and the other "
            f"{[tuple(t.shape) for t in theirs]}."
        )
    found = max((deviation(one, other) for one, other in zip(ours, theirs, strict=True)), default=0.0)
    if not found <= tolerance:
        raise NotEquivalentError(
            f"The networks do not compute the same function: their outputs deviate by {found:.2g} of the largest one, "
            f"more than rounding ({tolerance:.2g}). {_first_difference(a, b, inputs, tolerance)}"
        )
    return found


def deviation(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference relative to the largest entry of ``a``; infinity next to NaN."""
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().cpu(), b.detach().cpu()
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    a, b = a.double(), b.double()
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(differs.any()):
        return 0.0
    gap = (a - b)[differs].abs().max().item()
    largest = a[a.isfinite()].abs().max().item() if bool(a.isfinite().any()) else 0.0
    return gap / largest if math.isfinite(gap) and largest > 0 else math.inf


def _informative(value: Any) -> Any:
    """Put normal values into the place of real inputs that are all alike."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.numel() < 2 or bool((value != value.flatten()[0]).any()):
            return value
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    if isinstance(value, Mapping):
        return {key: _informative(part) for key, part in value.items()}
    return tuple(_informative(part) for part in value) if isinstance(value, tuple | list) else value


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to(part, device) for part in value)
    return value.to(device) if hasattr(value, "to") else value


class _Plain(TorchDispatchMode):
    """Runs operations as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _run(net: nn.Module, inputs: Any) -> Any:
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    return run_plainly(net, _to(inputs, device), _Plain())


def _first_difference(a: nn.Module, b: nn.Module, inputs: Any, tolerance: float) -> str:
    """Say which layer is the first whose output has other values."""
    ours, theirs = _sorted_outputs(a, inputs), _sorted_outputs(b, inputs)
    for (name, kind, one), (other_name, _, other) in zip(ours, theirs, strict=False):
        if name != other_name:
            return f"Up to {name!r} they agree; then the other runs {other_name!r}."
        if one.shape != other.shape or not deviation(one, other) <= tolerance:
            return f"The first layer whose output differs is {name!r} ({kind})."
    return "The outputs of all layers have the same values, in another order: the output itself is permuted."


def _sorted_outputs(net: nn.Module, inputs: Any) -> list[tuple[str, str, Tensor]]:
    """Return name, type and sorted output of each layer without parts, in the order of the calls."""
    found: list[tuple[str, str, Tensor]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            values = [t.detach().flatten().double().cpu() for t in tensors_in(output) if t.is_floating_point()]
            if values:
                found.append((name, type(module).__name__, torch.cat(values).sort().values))

        return hook

    leaves = [(name, module) for name, module in net.named_modules() if not list(module.children())]
    leaves += [(name, module) for name, module in net.named_modules() if isinstance(module, nn.MultiheadAttention)]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        _run(net, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found
