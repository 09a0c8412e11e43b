"""What a posterior is built with, and its first factors."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Mode = Literal["local", "shared", "weight", "mean"]
Diagonal = Literal["constant", "learned"]
Prior = float | str

VARIANCE = math.exp(-10)  # the paper's for multi-layer perceptrons


@dataclass(frozen=True)
class Posterior:
    r"""Settings of a layer's posterior :math:`N(\mu, \operatorname{diag}(d) + \frac1K \sum_k v_k v_k^\top)`.

    Attributes:
        rank: K; 0 is mean-field.
        diagonal: ``"constant"``, one d for the layer that is not trained, or ``"learned"``, one for each entry.
        variance: d at the beginning.
        prior: The variance p of the prior :math:`N(0, p I)`: a number; ``"fan_in"``, 1/n with n inputs of an output
            (1 for embeddings); ``"fan_in:100"``, 100/n; or ``"optimal"``, the p with the least divergence at any time.
        mode: How outputs are sampled: ``"local"``, ``"shared"``, ``"weight"``, or ``"mean"``: not at all.
        scale: Standard deviation of the first entries of v, as a multiple of that of the weight's entries over
            :math:`\sqrt K`.

    Raises:
        ValueError: If a setting is none of these, the rank negative, or a variance not positive and finite.
    """

    rank: int = 4
    diagonal: Diagonal = "constant"
    variance: float = VARIANCE
    prior: Prior = "fan_in"
    mode: Mode = "local"
    scale: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"Expected `rank` to be an int of at least 0 (0 is mean-field) but got {self.rank!r}.")
        if self.diagonal not in get_args(Diagonal):
            raise ValueError(f"Expected `diagonal` to be 'constant' or 'learned' but got {self.diagonal!r}.")
        _check_positive("variance", self.variance, "a variance, not its logarithm")
        check_mode(self.mode)
        _check_positive("scale", self.scale, "at 0 the factors are at a saddle and stay there")
        self._prior_factor()

    def prior_variance(self, layer: nn.Module) -> float | None:
        """Return p for a plain layer; None is the optimal one."""
        if self.prior == "optimal":
            return None
        if not isinstance(self.prior, str):
            return float(self.prior)
        return self._prior_factor() / (1 if isinstance(layer, nn.Embedding) else layer.weight[0].numel())

    def _prior_factor(self) -> float:
        """Return what stands before 1/n in the prior's variance, after a check."""
        if not isinstance(self.prior, str):
            _check_positive("prior", self.prior, "a variance, 'fan_in', 'fan_in:100' or 'optimal'")
            return 1.0
        kind, colon, factor = self.prior.partition(":")
        try:
            value = float(factor) if colon else 1.0
        except ValueError:
            value = math.nan
        if not (self.prior == "optimal" or (kind == "fan_in" and 0 < value < math.inf)):
            raise ValueError(
                f"Expected `prior` to be a variance, 'fan_in', 'fan_in:100' or 'optimal' but got {self.prior!r}."
            )
        return value


def check_mode(mode: str) -> None:
    """Check the name of a mode of sampling.

    Raises:
        ValueError: If there is none of that name.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"Expected `mode` to be 'local', 'shared', 'weight' or 'mean' but got {mode!r}.")


def _check_positive(name: str, value: object, hint: str) -> None:
    number = isinstance(value, float | int) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"Expected `{name}` to be positive and finite ({hint}) but got {value!r}.")


def first_factors(
    layer: nn.Module, settings: Posterior, trainable: Tensor | None, seed: int, name: str
) -> list[Tensor]:
    r"""Return Gaussian factors of weight and bias, of shape ``(K, rows, inputs)`` and ``(K, rows)``, in float32.

    Kernels are flattened: a parameter with five axes cannot be brought into the memory format ``channels_last``.

    Their standard deviation is :math:`s \operatorname{std}(W) / \sqrt K` over the entries of W that are not fixed; of a
    weight that is constant, the deviation that PyTorch initialises it with.

    Args:
        layer: The plain layer.
        settings: The rank K and the scale s.
        trainable: What of the weight is not fixed, broadcast to its shape; None: all.
        seed: The seed.
        name: Name of the layer in its network, for each of which factors are drawn apart.
    """
    digest = hashlib.sha256(f"variational/{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    entries = layer.weight.detach()
    if trainable is not None:
        entries = entries[trainable.expand_as(entries)]
    usual = 1.0 if isinstance(layer, nn.Embedding) else (3 * layer.weight[0].numel()) ** -0.5
    deviation = float(entries.double().std(correction=0)) or usual
    scale = settings.scale * deviation / math.sqrt(max(settings.rank, 1))
    parameters = [layer.weight, getattr(layer, "bias", None)]
    shapes = [(settings.rank, *(p.flatten(1) if p.ndim > 1 else p).shape) for p in parameters if p is not None]
    return [scale * torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
