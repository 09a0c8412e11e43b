"""Steps of a LightningModule as parts of variational inference, whoever defines them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl

STEPS = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}
"""Names of the steps and their splits."""

Around = Callable[[Any, str, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


def wrap_steps(cls: type, mixin: type, around: Around) -> None:
    """Put ``around(module, split, step, args, named)`` around each step of a class that is not Lightning's own.

    A step that is not defined stays so, so that Lightning knows that there is none; it reads the signature of a step,
    which is that of what is wrapped. A step that calls another one, or that of a base class, is one step.

    Args:
        cls: The class; its steps are replaced.
        mixin: The class that does so; it must stand in front of ``LightningModule``.
        around: What happens in place of a step.

    Raises:
        TypeError: If it stands behind it.
    """
    order = list(cls.__mro__)
    if pl.LightningModule not in order:
        return
    if order.index(pl.LightningModule) < order.index(mixin):
        raise TypeError(f"{cls.__name__}: {mixin.__name__} must be put before the LightningModule in the bases.")
    for name, split in STEPS.items():
        own, step = name in cls.__dict__, getattr(cls, name)
        given = name == "predict_step" or step is not getattr(pl.LightningModule, name)
        if given and (own or not hasattr(step, "_variational")):
            setattr(cls, name, _wrapped(cls, name, split, step if own else None, step, around))


def _wrapped(
    cls: type, name: str, split: str, own: Callable[..., Any] | None, known: Callable[..., Any], around: Around
) -> Callable[..., Any]:
    """Return the step of a class: its own, or the one that its bases have by then."""

    def step(self: Any, *args: Any, **named: Any) -> Any:
        inner = getattr(super(cls, self), name) if own is None else partial(own, self)
        return around(self, split, inner, args, named)

    step.__name__, step.__qualname__, step.__doc__ = name, f"{cls.__qualname__}.{name}", known.__doc__
    step.__module__ = cls.__module__
    step.__wrapped__ = getattr(known, "__wrapped__", known)
    step.__signature__ = inspect.signature(known)
    step._variational = True
    return step
