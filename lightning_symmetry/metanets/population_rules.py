"""Rules of ``vmap`` for autograd functions, called without the detour that PyTorch takes to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:  # not public: where a PyTorch does not have them, the detour is taken
    from torch._C._functorch import (
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_get_bdim,
        maybe_get_level,
    )
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter
except ImportError:  # pragma: no cover
    VmapInterpreter = None


class VmapOnly(torch.autograd.Function):
    """A function that exists under ``vmap`` only, and is differentiated outside of it; subclasses give the rule."""

    @staticmethod
    def forward(*_: Any) -> Any:
        """Refuse to run.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("This layer is called under `torch.func.vmap` only.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        """Apply the rule.

        On tiny tensors ``apply`` takes 0.3 ms a call, most of it in Python, and this 0.15.

        Args:
            arguments: Those of the rule, after ``info`` and ``dims``.

        Returns:
            What the rule returns.
        """
        interpreter = None if VmapInterpreter is None else retrieve_current_functorch_interpreter()
        if not isinstance(interpreter, VmapInterpreter):
            return cls.apply(*arguments)
        level = interpreter.level()
        plain, dims = [], []
        for argument in arguments:
            mine = isinstance(argument, Tensor) and is_batchedtensor(argument) and maybe_get_level(argument) == level
            plain.append(get_unwrapped(argument) if mine else argument)
            dims.append(maybe_get_bdim(argument) if mine else None)
        with interpreter.lower():
            found, places = cls.vmap(SimpleNamespace(batch_size=interpreter.batch_size()), tuple(dims), *plain)
        if isinstance(found, tuple):
            return tuple(_add_batch_dim(f, place, level) for f, place in zip(found, places, strict=True))
        return _add_batch_dim(found, places, level)
