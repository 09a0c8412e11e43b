"""Check that two networks compute the same function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_symmetry.landscape.batches import to_device
from lightning_symmetry.permutation.running import run_plainly, tensors_in
from lightning_symmetry.surgery import device_of, example_of

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest deviation that counts as rounding, relative to the largest output, by the coarsest type of the parameters."""


class NotEquivalentError(ValueError):
    """Two networks that should compute the same function do not."""


def check_equivalence(a: nn.Module, b: nn.Module, example_input: Any = None, tolerance: float | None = None) -> float:
    r"""Check that two networks compute the same function, up to rounding, in evaluation mode.

    .. math:: \max |f_a(x) - f_b(x)| \le \tau \max |f_a(x)|

    for each output. Where they do not, the layers are compared in the order in which they end. Hidden units may be
    permuted, so that the sorted values of each layer's output are: they agree for every permutation.

    Args:
        a: A network.
        b: Another, of the same structure; each is run on its own device.
        example_input: A tensor, or a tuple or dictionary of arguments. Default: ``a.example_input_array``. Real-valued
            inputs of one value (zeros) would show little and are replaced by normal ones, where ``a`` takes those.
        tolerance: The largest relative deviation; by default 1e-10 in float64, 1e-4 in float32, 0.1 in bfloat16 and
            0.02 in float16 and TF32, of which the coarsest type of parameters and inputs counts.

    Returns:
        The relative deviation.

    Raises:
        NotEquivalentError: If they differ; the message names the first layer that does.
        ValueError: If a network cannot be called with the example input.
    """
    inputs, ours = _informative_run(a, example_of(a, example_input))
    theirs = _run(b, inputs)
    if tolerance is None:
        tolerance = _tolerance([*a.parameters(), *b.parameters(), *tensors_in(inputs)])
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
    if a.is_complex() != b.is_complex():
        return math.inf
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    a, b = a.double(), b.double()
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(differs.any()):
        return 0.0
    gap = (a - b)[differs].abs().max().item()
    largest = a[a.isfinite()].abs().max().item() if bool(a.isfinite().any()) else 0.0
    return gap / largest if math.isfinite(gap) and largest > 0 else math.inf


def _tolerance(tensors: list[Tensor]) -> float:
    types = {tensor.dtype.to_real() for tensor in tensors}
    if torch.float32 in types and any(tensor.is_cuda for tensor in tensors) and rounds_to_tf32():
        types.add(torch.float16)  # of as many digits
    return max((TOLERANCES[kind] for kind in types if kind in TOLERANCES), default=TOLERANCES[torch.float32])


def rounds_to_tf32() -> bool:
    """Return whether products of float32 on an NVIDIA GPU round their factors; those of convolutions do by default."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cuda, "fp32_precision"):  # since PyTorch 2.9; the older names must not be read where this is set
        return "tf32" in (cuda.fp32_precision, cudnn.conv.fp32_precision)
    return cuda.allow_tf32 or cudnn.allow_tf32


def _informative_run(net: nn.Module, given: Any) -> tuple[Any, list[Tensor]]:
    """Return inputs that show much, and the network's outputs: normal inputs instead of those that are all alike.

    Where the network cannot be called with those, or returns no finite numbers (as for negative lengths), the inputs
    stay as they are.
    """
    inputs = _informative(given)
    try:
        outputs = _run(net, inputs)
    except ValueError:
        return given, _run(net, given)
    if all(bool(output.isfinite().all()) for output in outputs):
        return inputs, outputs
    plain = _run(net, given)
    better = sum(int(t.isfinite().sum()) for t in plain) > sum(int(t.isfinite().sum()) for t in outputs)
    return (given, plain) if better else (inputs, outputs)


def _informative(value: Any) -> Any:
    """Put normal values into the place of real inputs that are all alike."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.numel() < 2 or bool((value != value.flatten()[0]).any()):
            return value
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    if isinstance(value, Mapping):
        return {key: _informative(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_informative, value))
    return type(value)(map(_informative, value)) if isinstance(value, tuple | list) else value


class _Plain(TorchDispatchMode):
    """Runs operations as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _run(net: nn.Module, inputs: Any) -> list[Tensor]:
    return tensors_in(run_plainly(net, to_device(inputs, device_of(net)), _Plain()))


def _first_difference(a: nn.Module, b: nn.Module, inputs: Any, tolerance: float) -> str:
    """Say which layer is the first whose output has other values."""
    agreed = ""
    for ours, theirs in zip_longest(_sorted_outputs(a, inputs), _sorted_outputs(b, inputs)):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            more = [f"{name[0]!r}" if name is not None else "nothing" for name in (ours, theirs)]
            return f"Up to {agreed!r} they agree; then one runs {more[0]} and the other {more[1]}."
        (name, kind, one), (_, _, other) = ours, theirs
        if one.shape != other.shape or not deviation(one, other) <= tolerance:
            return f"The first layer whose output differs is {name!r} ({kind})."
        agreed = name
    return "The outputs of all layers have the same values, in another order: the output itself is permuted."


def _sorted_outputs(net: nn.Module, inputs: Any) -> list[tuple[str, str, Tensor]]:
    """Return name, type and sorted output of each module, in the order in which they end: parts before the whole."""
    found: list[tuple[str, str, Tensor]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            values = [_real(tensor) for tensor in tensors_in(output)]
            found.append((name, type(module).__name__, torch.cat(values or [torch.empty(0)]).sort().values))

        return hook

    handles = [
        module.register_forward_hook(watch(name or "the network itself"))
        for name, module in net.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        _run(net, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double()
