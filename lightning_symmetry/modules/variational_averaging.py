"""Average a network's outputs over samples while somebody else's code calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_symmetry.variational.predictive import Outputs, Predictive, samples


@contextmanager
def averaged(
    predictor: nn.Module, num_samples: int, outputs: Outputs, class_dim: int | None
) -> Iterator[list[Predictive]]:
    """Replace what a module returns by what samples of it say together, as long as the context lasts.

    Hooks that others registered on it before see the average.

    Args:
        predictor: The module.
        num_samples: Number of samples.
        outputs: What it returns, see :func:`~lightning_symmetry.variational.predictive.predictive`.
        class_dim: Axis of the classes.

    Yields:
        A list that each call's predictive distribution is put into.
    """
    found: list[Predictive] = []

    def average(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> Tensor:
        again = samples(module, partial(module.forward, *inputs, **named), num_samples - 1)
        found.append(Predictive.of(chain([output], again), outputs, class_dim))
        return found[-1].output

    handle = predictor.register_forward_hook(average, prepend=True, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def measures(found: Sequence[Predictive], result: Any, batch: Any) -> dict[str, Tensor]:
    """Return what prediction says of a batch; of a graph of its test nodes, if the step returned these only.

    Args:
        found: The predictive distribution of each call of the predictor.
        result: What the step returned.
        batch: The batch.

    Raises:
        MisconfigurationException: If there were several calls.
    """
    if len(found) > 1:
        raise MisconfigurationException(
            f"`predict_step` called its predictor {len(found)} times: it is not clear which call is the prediction."
        )
    names = ("mean", "variance") if found[0].mean is not None else ("probabilities", "entropy", "mutual_information")
    values = {name: getattr(found[0], name) for name in names}
    mask = getattr(batch, "test_mask", None)
    if mask is not None and isinstance(result, Tensor) and len(result) != len(mask):
        values = {name: value[mask] for name, value in values.items()}
    return values
