"""Kinds of operations: products, reshapes, normalisations, and functions that act along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NORMS = {
    "native_layer_norm": "layer norm",
    "layer_norm": "layer norm",
    "rms_norm": "RMS norm",
    "_fused_rms_norm": "RMS norm",
    "native_batch_norm": "batch norm",
    "_native_batch_norm_legit_no_training": "batch norm",
    "_native_batch_norm_legit": "batch norm",
    "_batch_norm_no_update": "batch norm",
    "batch_norm": "batch norm",
    "cudnn_batch_norm": "batch norm",
    "miopen_batch_norm": "batch norm",
    "native_group_norm": "group norm",
    "group_norm": "group norm",
}
PRODUCTS = {"convolution", "mkldnn_convolution", "addmm", "mm", "bmm", "baddbmm", "linear", "embedding"}
RESHAPES = {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "clone", "squeeze", "unsqueeze", "expand"),
    *("alias", "detach", "contiguous", "_to_copy"),
}
UNTAGGED = {"hardswish", "where", "celu", "mish", "masked_fill", "prelu", "_prelu_kernel", "complex", "polar"}
"""Elementwise operations that PyTorch does not mark as such."""
_LINEAR_REDUCTIONS = {"sum", "mean", "cat", "stack", "avg_pool1d", "avg_pool2d", "avg_pool3d"}
_MAXIMA = ("max_pool", "adaptive_max_pool", "amax", "max")


def function_name(
    name: str, elementwise: bool, args: Any, num_flowing: int, is_parameter: Sequence[bool]
) -> str | None:
    """Return the name of the function that an operation applies along the axes of activations; None if linear.

    Args:
        name: Name of the operation.
        elementwise: Whether it is elementwise.
        args: Its arguments.
        num_flowing: How many of its tensors depend on the network's input.
        is_parameter: For each of its tensors whether it is a parameter.
    """
    if name in NORMS:
        return NORMS[name]
    if name in ("_softmax", "_log_softmax", "_safe_softmax"):
        return "softmax"
    if name.startswith(_MAXIMA):
        return "maximum"
    if not elementwise:
        return None
    if name in ("add", "sub", "rsub"):
        shifted = num_flowing == 1 and not any(is_parameter)  # by a number, or by a tensor that is no parameter
        return "shift" if shifted else None
    if name in ("mul", "div"):
        return "product" if num_flowing > 1 else None
    return None if name in RESHAPES or name in _LINEAR_REDUCTIONS or name in ("neg", "copy", "fill") else name
