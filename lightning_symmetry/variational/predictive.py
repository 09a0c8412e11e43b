"""The predictive distribution of a network whose outputs are samples: mean, entropy, mutual information."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from typing_extensions import Self

from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.sums import at_least_single

Outputs = Literal["logits", "probabilities", "values"]


@dataclass(frozen=True)
class Predictive:
    r"""What S samples of a network's output say together.

    Of classes, with the probabilities :math:`p_s` of sample s:

    .. math:: \bar p = \frac1S \sum_s p_s, \quad H[\bar p] = -\sum_c \bar p_c \ln \bar p_c, \quad
        I = H[\bar p] - \frac1S \sum_s H[p_s] \ge 0

    Attributes:
        output: What stands for the network's output: of logits :math:`\ln \bar p`, which are logits of
            :math:`\bar p` (of one logit the logit of :math:`\bar p`), else the mean.
        probabilities: :math:`\bar p`, of the output's shape; of one logit that of class 1. None for values.
        log_probabilities: :math:`\ln \bar p`, from the logarithms of :math:`p_s`. None for values.
        entropy: :math:`H[\bar p]` in nats, without the axis of the classes. None for values.
        mutual_information: I in nats, of the output and the weights; what BALD scores inputs by. None for values.
        mean: Mean of the values. None for classes.
        variance: Their variance over the samples, :math:`\frac1{S-1} \sum_s (y_s - \bar y)^2`; 0 for S = 1. It is that
            of the network's output, without noise of the observation. None for classes.

    Source: Houlsby et al., Bayesian Active Learning for Classification and Preference Learning (2011).
    """

    output: Tensor
    probabilities: Tensor | None = None
    log_probabilities: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None

    @classmethod
    def of(cls, samples: Iterable[Tensor], outputs: Outputs = "logits", class_dim: int | None = -1) -> Self:
        """Summarise samples of an output, one at a time, in float32 at least.

        Args:
            samples: The samples, of one shape.
            outputs: See :func:`predictive`.
            class_dim: See :func:`predictive`.

        Raises:
            ValueError: If there are none, or an argument is none of these.
            TypeError: If a sample is no tensor of real numbers.
        """
        check_outputs(outputs, class_dim)
        values = (_check(sample) for sample in samples)
        return cls._of_values(values) if outputs == "values" else cls._of_classes(values, outputs, class_dim)

    @classmethod
    def _of_values(cls, samples: Iterator[Tensor]) -> Self:
        mean, squares, count = torch.zeros(()), torch.zeros(()), 0
        for count, sample in enumerate(samples, 1):
            difference = sample - mean.to(sample.device)
            mean = mean.to(sample) + difference / count
            squares = squares.to(sample) + difference * (sample - mean)
        _check_count(count)
        return cls(output=mean, mean=mean, variance=squares / max(count - 1, 1))

    @classmethod
    def _of_classes(cls, samples: Iterator[Tensor], outputs: Outputs, class_dim: int | None) -> Self:
        total, entropies, count, single, dim = None, 0, 0, False, class_dim
        for sample in samples:
            count += 1
            single = class_dim is None or sample.ndim <= 1 or sample.shape[class_dim] == 1
            dim = -1 if single else class_dim
            logs, entropy = _log_probabilities(sample, outputs, single, dim)
            total = logs if total is None else torch.logaddexp(total, logs)
            entropies = entropies + entropy
        _check_count(count)
        logs = total - math.log(count)
        entropy = torch.special.entr(logs.exp()).sum(dim)
        information = (entropy - entropies / count).clamp_min(0)
        if single:
            logs, logit = logs[..., 1], logs[..., 1] - logs[..., 0]
            if class_dim is not None and logs.ndim > 1:
                entropy, information = entropy.squeeze(class_dim), information.squeeze(class_dim)
        else:
            logit = logs
        probabilities = logs.exp()
        output = logit if outputs == "logits" else probabilities
        return cls(output, probabilities, logs, entropy, information)


def predictive(
    net: nn.Module,
    *inputs: Any,
    num_samples: int = 25,
    outputs: Outputs = "logits",
    class_dim: int | None = -1,
) -> Predictive:
    """Return the predictive distribution of a network with variational layers, without gradients.

    The network is called in the mode that it is in: call ``net.eval()`` first. Noise comes from the global random
    state. Within ``sampling_mode(net, "shared")`` a sample costs about a third of one of layers whose mode is
    ``"local"`` and has the same distribution for each single input; inputs of a batch are then not independent.

    Args:
        net: The network.
        *inputs: What it is called with.
        num_samples: Number of samples; the paper's is 25.
        outputs: What the network returns: ``"logits"``, ``"probabilities"`` or ``"values"`` of a regression.
        class_dim: Axis of the classes. Where its size is 1, or the output has one axis, an output is one logit or
            probability of class 1; with None each output is one, as in classification with several labels.

    Raises:
        ValueError: If ``num_samples < 1``, or ``outputs`` is none of these.
        TypeError: If the network does not return a tensor of real numbers.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.2, App. E.2.
    """
    check_num_samples("num_samples", num_samples)
    with torch.no_grad():
        return Predictive.of(samples(net, lambda: net(*inputs), num_samples), outputs, class_dim)


def samples(net: nn.Module, call: Callable[[], Any], count: int) -> Iterator[Any]:
    """Yield a number of samples of what a call returns.

    If at least half of a network's parameters come before its first variational layer, as with a posterior over the
    last layer only, samples are computed together, by ``torch.func.vmap``: what depends on no noise is computed once.
    Of other networks that takes more memory and no less time. What cannot be mapped over is sampled one by one.

    Args:
        net: The network.
        call: Samples an output of it.
        count: Number of samples.
    """
    if count > 1 and _begins_deterministic(net):
        try:
            mapped = torch.func.vmap(lambda _: call(), randomness="different")(torch.empty(count))
        except (RuntimeError, ValueError):  # an operation or output without a rule; mistakes are raised below
            mapped = None
        if isinstance(mapped, Tensor):
            yield from mapped
            return
    for _ in range(count):
        yield call()


def _begins_deterministic(net: nn.Module) -> bool:
    """Whether at least half of the parameters come before the first variational layer, in the order of modules."""
    sizes, first = [], None
    for module in net.modules():
        if first is None and isinstance(module, VariationalLayer):
            first = sum(sizes)
        sizes.append(sum(parameter.numel() for parameter in module.parameters(recurse=False)))
    return first is not None and 2 * first >= sum(sizes)


def check_outputs(outputs: str, class_dim: int | None = -1) -> None:
    """Check what outputs are said to be.

    Raises:
        ValueError: If there is no such kind, or the axis is no whole number.
    """
    if outputs not in get_args(Outputs):
        raise ValueError(f"Expected `outputs` to be 'logits', 'probabilities' or 'values' but got {outputs!r}.")
    if class_dim is not None and (isinstance(class_dim, bool) or not isinstance(class_dim, int)):
        raise ValueError(f"Expected `class_dim` to be an axis or None but got {class_dim!r}.")


def check_num_samples(name: str, count: int) -> None:
    """Check a number of samples.

    Raises:
        ValueError: If it is not a whole number of at least 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"Expected `{name}` to be an int of at least 1 but got {count!r}.")


def _check(sample: Any) -> Tensor:
    if not isinstance(sample, Tensor) or not sample.is_floating_point():
        what = f"a tensor of {sample.dtype}" if isinstance(sample, Tensor) else f"a {type(sample).__name__}"
        raise TypeError(f"Expected the network to return a tensor of real numbers but got {what}.")
    return at_least_single(sample)


def _check_count(count: int) -> None:
    if not count:
        raise ValueError("Expected `samples` to hold at least one output but got none.")


def _log_probabilities(sample: Tensor, outputs: Outputs, single: bool, dim: int) -> tuple[Tensor, Tensor]:
    """Return logarithms of the classes' probabilities and their entropy; of one output of both classes, a last axis."""
    if outputs == "probabilities":
        probabilities = torch.stack([1 - sample, sample], -1) if single else sample
        return probabilities.log(), torch.special.entr(probabilities).sum(dim)
    logs = torch.stack([logsigmoid(-sample), logsigmoid(sample)], -1) if single else sample.log_softmax(dim)
    return logs, torch.special.entr(logs.exp()).sum(dim)
