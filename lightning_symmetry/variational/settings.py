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
        prior: The variance p of the prior :math:`N(0, p I)`: a number; ``"fan_in"``, 1/n, where n counts the inputs of
            an output, of its group only and with fixed entries (1 for embeddings); ``"fan_in:100"``, 100/n; or
            ``"optimal"``, the p with the least divergence at any time.
        mode: How outputs are sampled: ``"local"``, ``"shared"``, ``"weight"``, or ``"mean"``: not at all.
        scale: Standard deviation of the first entries of v, as a multiple of that of the weight's entries over
            :math:`\sqrt K`. None is 0.5, the paper's, and 0.1 for convolutions, whose noise is the same at all pixels:
            a ResNet20 whose kernels begin at 0.5 lags for epochs.

    Raises:
        ValueError: If a setting is none of these, the rank negative, or a variance not positive and finite.
    """

    rank: int = 4
    diagonal: Diagonal = "constant"
    variance: float = VARIANCE
    prior: Prior = "fan_in"
    mode: Mode = "local"
    scale: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"Expected `rank` to be an int of at least 0 (0 is mean-field) but got {self.rank!r}.")
        if self.diagonal not in get_args(Diagonal):
            raise ValueError(f"Expected `diagonal` to be 'constant' or 'learned' but got {self.diagonal!r}.")
        _check_positive("variance", self.variance, "a variance, not its logarithm")
        check_mode(self.mode)
        if self.scale is not None:
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


def covariance_parameters(
    layer: nn.Module, settings: Posterior, trainable: Tensor | None, seed: int, name: str
) -> dict[str, nn.Parameter | None]:
    r"""Return factors and logarithms of d of weight and bias, with type, device and ``requires_grad`` of the mean's.

    Factors are Gaussian, drawn in float32 on the CPU, of shape ``(K, rows, inputs)`` and ``(K, rows)``: kernels are
    flattened, as a parameter with five axes cannot be brought into the memory format ``channels_last``.

    Their standard deviation is :math:`s \operatorname{std}(W) / \sqrt K` over the entries of W that are not fixed; of a
    weight that is constant, or on the meta device, the deviation that PyTorch initialises it with.

    Args:
        layer: The plain layer.
        settings: The rank K, the scale s and the diagonal.
        trainable: What of the weight is not fixed, broadcast to its shape; None: all.
        seed: The seed.
        name: Name of the layer in its network, for each of which factors are drawn apart.
    """
    usual = 0.5 if isinstance(layer, nn.Linear | nn.Embedding) else 0.1
    scale = (settings.scale or usual) * _deviation(layer, trainable) / math.sqrt(max(settings.rank, 1))
    digest = hashlib.sha256(f"variational/{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    found: dict[str, nn.Parameter | None] = {}
    for key, mean in (("weight", layer.weight), ("bias", getattr(layer, "bias", None))):
        factors = log_variance = None
        if mean is not None and settings.rank:
            shape = settings.rank, *(mean.flatten(1) if mean.ndim > 1 else mean).shape
            factors = (scale * torch.randn(shape, generator=generator, device="cpu")).to(mean.device, mean.dtype)
            if key == "weight" and trainable is not None:
                factors *= trainable.flatten(1)
            factors = nn.Parameter(factors, mean.requires_grad)
        if mean is not None and settings.diagonal == "learned":
            filled = torch.full_like(mean, math.log(settings.variance), requires_grad=False)
            log_variance = nn.Parameter(filled, mean.requires_grad)
        found |= {f"{key}_factors": factors, f"{key}_log_variance": log_variance}
    return found


def _deviation(layer: nn.Module, trainable: Tensor | None) -> float:
    """Return the standard deviation of the weight's entries."""
    usual = 1.0 if isinstance(layer, nn.Embedding) else (3 * layer.weight[0].numel()) ** -0.5
    if layer.weight.is_meta:
        return usual
    entries = layer.weight.detach()
    if trainable is not None:
        entries = entries[trainable.expand_as(entries)]
    return float(entries.double().std(correction=0)) or usual
