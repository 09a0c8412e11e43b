"""Arguments of the mixin that makes a module Bayesian."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_symmetry.variational.elbo import kl_warmup
from lightning_symmetry.variational.predictive import Outputs, check_num_samples, check_outputs


@dataclass(frozen=True)
class VariationalSettings:
    """Arguments of :class:`~lightning_symmetry.modules.VariationalMixin`, which says what they are.

    Raises:
        ValueError: If one is out of range.
    """

    num_data: int | None = None
    num_samples_train: int = 1
    num_samples_predict: int = 25
    temperature: float = 1.0
    kl_warmup_steps: int = 0
    posterior: Mapping[str, Any] | None = None
    outputs: Outputs = "logits"
    class_dim: int | None = -1
    predictor: str | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.num_data, int) and not isinstance(self.num_data, bool) and self.num_data >= 1
        if self.num_data is not None and not number:
            raise ValueError(f"Expected `num_data` to be an int of at least 1 or None but got {self.num_data!r}.")
        for name in ("num_samples_train", "num_samples_predict"):
            check_num_samples(name, getattr(self, name))
        kl_warmup(0, self.kl_warmup_steps, self.temperature)
        check_outputs(self.outputs, self.class_dim)


def check_names(
    settings: VariationalSettings, constructor: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Check that no setting was meant for the constructor of the module that is made Bayesian.

    Args:
        settings: The settings.
        constructor: The constructor, bound.
        args: What it is given.
        named: What it is given by name.

    Raises:
        MisconfigurationException: If it has an argument of that name, which it was not given.
    """
    signature = inspect.signature(constructor)
    given = [*list(signature.parameters)[: len(args)], *named]
    for field in fields(settings):
        meant = field.name in signature.parameters and field.name not in given
        if meant and getattr(settings, field.name) != field.default:
            raise MisconfigurationException(
                f"`{field.name}` is an argument of VariationalMixin and of the module that it makes Bayesian: give the "
                "module's by position."
            )
