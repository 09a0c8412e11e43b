"""The base of the variational layers: ``q = N(mu, diag(d) + V^T V / K)`` over weight and bias jointly."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.surgery import HasConstants, ReparametrizedLayer
from lightning_symmetry.variational.gaussian import Gaussian, divergence, second_moment
from lightning_symmetry.variational.settings import Mode, Posterior, covariance_parameters

Pair = tuple[Tensor, Tensor | None]


class VariationalLayer(ReparametrizedLayer, HasConstants):
    r"""A layer with a Gaussian posterior over its P entries of weight and bias jointly.

    .. math:: q = N\Big(\mu, \operatorname{diag}(d) + \frac1K \sum_{k=1}^K v_k v_k^\top\Big)

    A call samples the output, in training and in evaluation mode alike. The attribute ``mode`` says how:

    ============ ===================================================================================================
    ``"local"``  :math:`y = W x + b + \sqrt{d_w x^2 + d_b} \odot \epsilon + K^{-1/2} \sum_k z_k (V_k x + v_{bk})` with
                 one z for each example and one :math:`\epsilon` for each output. Exact for one input vector an
                 example; where the weight meets an example at several places (pixels, tokens) z is shared by them,
                 which is exact, and the diagonal noise drawn for each, which is not.
    ``"shared"`` The same with one z for the whole batch: about one matrix product in place of K + 1.
    ``"weight"`` One sample of weight and bias for the whole batch, exact for any use of the weight.
    ``"mean"``   The mean, without noise.
    ============ ===================================================================================================

    Examples are what the input's first axis counts: where that is time, ``(T, N, F)``, each step has a z of its own;
    choose another mode there. Entries that are constants of the layer that it was built from, or the padding of an
    embedding, have no noise and no part in the divergence. Noise comes from PyTorch's global random state.

    Attributes:
        weight: Mean of the weight, under the plain layer's name, so that its checkpoints load.
        bias: Mean of the bias, or None.
        weight_factors: The weight's part of V, of shape ``(K, rows, inputs)`` with the weight's rows flattened; None
            if K is 0.
        bias_factors: The bias's part of V, of shape ``(K, *bias.shape)``, or None.
        weight_log_variance: ln d of the weight, for a learned diagonal; else None.
        bias_log_variance: ln d of the bias, for a learned diagonal; else None.
        posterior: The settings.
        prior_variance: Variance p of the prior; None: the optimal one.
        mode: How outputs are sampled.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.2, App. E.2;
    Tomczak, Swaroop, Turner, Efficient Low Rank Gaussian Variational Inference for Neural Networks (2020).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_factors: nn.Parameter | None
    bias_factors: nn.Parameter | None
    weight_log_variance: nn.Parameter | None
    bias_log_variance: nn.Parameter | None
    posterior: Posterior
    prior_variance: float | None
    mode: Mode
    _trainable: Tensor | None
    _constants: Tensor | None
    _source: list[nn.Module]

    @classmethod
    def from_layer(
        cls, layer: nn.Module, posterior: Posterior | None = None, *, seed: int = 0, name: str = "", **settings: Any
    ) -> Self:
        """Build the layer from a deterministic one, whose parameters it takes over as the means.

        Args:
            layer: The plain layer, or one with constants whose plain layer it is.
            posterior: The settings; None: those of ``settings``.
            seed: Seed of the first factors.
            name: Name of the layer in its network; factors are drawn for each name apart.
            **settings: Attributes of :class:`~lightning_symmetry.variational.settings.Posterior`.

        Raises:
            ValueError: If a setting is none, or both forms are given.
        """
        if posterior is not None and settings:
            raise ValueError(f"Expected either `posterior` or single settings but got both: {sorted(settings)}.")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._adopt(layer, posterior or Posterior(**settings), seed, name)
        return self

    @abstractmethod
    def _take_settings(self, layer: nn.Module) -> None:
        """Take over what else a plain layer knows: sizes, stride, padding."""

    @abstractmethod
    def _map(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the plain layer's output."""

    @abstractmethod
    def _low_rank_noise(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the low-rank noise of the output with one z an example, given the factors."""

    @abstractmethod
    def _deviation(self, input: Tensor) -> Tensor:
        """Return the standard deviation of the diagonal noise; it broadcasts to the shape of the output."""

    def _adopt(self, layer: nn.Module, posterior: Posterior, seed: int, name: str) -> None:
        self._source = [layer]  # in a list: it is no submodule, and its parameters are this layer's
        self.posterior, self.mode = posterior, posterior.mode
        plain = layer.to_layer() if isinstance(layer, ReparametrizedLayer) else layer
        self._take_settings(plain)
        self.prior_variance = posterior.prior_variance(plain)
        self.weight = layer.weight
        self.register_parameter("bias", getattr(layer, "bias", None))
        for key, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(key, buffer)
        trainable, constants = self._fixed_entries()
        self.register_buffer("_trainable", trainable, persistent=False)
        self.register_buffer("_constants", constants, persistent=False)
        self._size = self.weight.numel() if trainable is None else int(trainable.expand_as(self.weight).sum())
        for key, parameter in covariance_parameters(plain, posterior, trainable, seed, name).items():
            self.register_parameter(key, parameter)
        self.train(layer.training)

    def _fixed_entries(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what of the weight is not fixed, and constants where it is; none if nothing is fixed."""
        source = self._source[0]
        if not hasattr(source, "trainable_entries"):
            return None, None
        trainable = source.trainable_entries().contiguous()
        return trainable, torch.where(trainable, 0, source.canonical_weight().detach())

    def canonical_weight(self) -> Tensor:
        """Return the mean of the weight, differentiable, and constant where it is fixed."""
        if self._constants is None:
            return self.weight
        return torch.where(self._trainable, self.weight, self._constants)

    def constants(self) -> dict[str, Tensor]:
        """Return the constants of the layer that it was built from, mask and fixed entries; none of a plain one."""
        source = self._source[0]
        return {name: getattr(self, name) for name in source.constants()} if isinstance(source, HasConstants) else {}

    @property
    def num_fixed(self) -> int:
        """Number of entries of the weight that are constants; the padding of an embedding is none."""
        return 0 if self._constants is None else self.weight.numel() - self._size

    @property
    def num_fixed_parameters(self) -> int:
        """The same for mean, factors and a learned diagonal together."""
        return self.num_fixed * (1 + self.posterior.rank + (self.weight_log_variance is not None))

    def forward(self, input: Tensor) -> Tensor:
        """Sample the output of the layer; shapes are the plain layer's."""
        if self.mode == "weight":
            return self._map(input, *self.sample())
        weight, bias = self.canonical_weight(), self.bias
        if self.mode == "mean":
            return self._map(input, weight, bias)
        if self.mode == "shared" and self.weight_factors is not None:
            weight, bias = self._shifted(weight, bias, self._normal((1, self.posterior.rank)))
        output = self._map(input, weight, bias)
        if self.mode == "local" and self.weight_factors is not None:
            output = output + self._low_rank_noise(input, *self._factors())
        deviation = self._deviation(input).to(output.dtype)
        return torch.addcmul(output, deviation, torch.randn_like(output))

    def sample(self, generator: torch.Generator | None = None) -> Pair:
        """Return a sample of weight and bias, differentiable in the parameters.

        Args:
            generator: What it is drawn from, on the parameters' device; None: the global random state.
        """
        weight, bias = self.canonical_weight(), self.bias
        if self.weight_factors is not None:
            weight, bias = self._shifted(weight, bias, self._normal((1, self.posterior.rank), generator))
        weight = weight + self._masked(self._diagonal_noise(self.weight, self.weight_log_variance, generator))
        if bias is not None:
            bias = bias + self._diagonal_noise(self.bias, self.bias_log_variance, generator)
        return weight, bias

    def _shifted(self, weight: Tensor, bias: Tensor | None, z: Tensor) -> Pair:
        r"""Return weight and bias plus :math:`K^{-1/2} \sum_k z_k v_k`, for z of shape ``(1, K)``."""
        z = z / math.sqrt(self.posterior.rank)
        with torch.autocast(z.device.type, enabled=False):
            if self._trainable is None:
                shifted = torch.addmm(weight.reshape(1, -1), z, self.weight_factors.flatten(1)).view(weight.shape)
            else:
                shifted = weight + self._masked((z @ self.weight_factors.flatten(1)).view(weight.shape))
            if bias is not None:
                bias = torch.addmm(bias.unsqueeze(0), z, self.bias_factors).squeeze(0)
        return shifted, bias

    def _diagonal_noise(self, mean: Tensor, log_variance: Tensor | None, generator: torch.Generator | None) -> Tensor:
        noise = self._normal(mean.shape, generator)
        if log_variance is None:
            return noise * math.sqrt(self.posterior.variance)
        return noise * torch.exp(0.5 * log_variance)

    def _normal(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        given = {} if generator is None else {"generator": generator}  # its overload takes no symbolic sizes
        return torch.randn(shape, **given, dtype=self.weight.dtype, device=self.weight.device)

    def _z(self, input: Tensor) -> Tensor:
        """Return one z over the square root of K for each example, of shape ``(len(input), K)``."""
        return self._normal((len(input), self.posterior.rank)) / math.sqrt(self.posterior.rank)

    def _masked(self, tensor: Tensor) -> Tensor:
        """Return a tensor over entries of the weight that is zero where these are fixed."""
        return tensor if self._trainable is None else torch.where(self._trainable, tensor, 0)

    def _factors(self) -> Pair:
        return self._masked(self.weight_factors.unflatten(2, self.weight.shape[1:])), self.bias_factors

    def _variances(self) -> Pair:
        """Return d of weight and bias where it is learned, or ones where the weight is trainable."""
        if self.weight_log_variance is None:
            return self._trainable.to(self.weight.dtype), None
        bias = None if self.bias_log_variance is None else self.bias_log_variance.exp()
        return self._masked(self.weight_log_variance.exp()), bias

    def gaussian(self) -> Gaussian:
        """Return the posterior over weight and bias, for its divergence."""
        parts = ["weight"] if self.bias is None else ["weight", "bias"]
        learned = self.weight_log_variance is not None
        factors = [getattr(self, f"{part}_factors") for part in parts] if self.posterior.rank else []
        if factors and (learned or self._trainable is not None):
            factors[0] = self._factors()[0]
        return Gaussian(
            means=(self._masked(self.weight), self.bias)[: len(parts)],
            log_variances=tuple(getattr(self, f"{part}_log_variance") for part in parts)
            if learned
            else math.log(self.posterior.variance),
            factors=tuple(factors),
            trainable=(self._trainable, None)[: len(parts)],
            size=self._size + (0 if self.bias is None else self.bias.numel()),
        )

    def kl_divergence(self) -> Tensor:
        """Return the divergence from the prior, summed over all entries that are not fixed, in float64 and nats.

        See :func:`~lightning_symmetry.variational.gaussian.gaussian_kl`.
        """
        return divergence([self.gaussian()], [self.prior_variance])

    @torch.no_grad()
    def optimal_prior_variance(self) -> float:
        r"""Return the p with the least divergence, :math:`(\sum d + \operatorname{tr} G + \|\mu\|^2) / P`."""
        q = self.gaussian()
        return float(second_moment(q)) / q.size

    def release(self) -> nn.Module:
        """Return the deterministic layer that this one replaced, with the means, the same Parameter objects."""
        layer = self._source[0]
        layer.weight = self.weight
        if self.bias is not None:
            layer.bias = self.bias
        layer.to(self.weight.device, self.weight.dtype)
        if self._constants is not None:  # by its own loader, which notes where they stand
            names = ["weight", *(["bias"] if self.bias is not None else []), *layer._buffers]
            layer.load_state_dict({name: getattr(self, name).detach().clone() for name in names})
        return layer.train(self.training)

    def to_layer(self) -> nn.Module:
        """Return the plain layer of the mean: same dtype, device, mode and ``requires_grad``."""
        layer = copy.deepcopy(self).release()
        return layer.to_layer() if isinstance(layer, ReparametrizedLayer) else layer

    @torch.no_grad()
    def collapse(self, generator: torch.Generator | None = None) -> nn.Module:
        """Put a sample in the place of the means and return the deterministic layer that holds it.

        Args:
            generator: As in :meth:`sample`.
        """
        weight, bias = self.sample(generator)
        self.weight.copy_(weight)
        if bias is not None:
            self.bias.copy_(bias)
        return self.release()

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if self._constants is not None:
            with torch.no_grad():  # weight decay may have moved what is fixed
                self.weight.copy_(self.canonical_weight())
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, missing_keys: list[str], *args: list
    ) -> None:
        missing: list[str] = []
        *_, errors = args
        before = len(errors)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *args)
        own = {f"{prefix}{part}_{what}" for part in ("weight", "bias") for what in ("factors", "log_variance")}
        deterministic = prefix + "weight" in state_dict and not own & state_dict.keys()
        missing_keys += [key for key in missing if not (deterministic and key in own)]
        if self._trainable is not None and not self.weight.is_meta and len(errors) == before:
            if self._constants is not None:
                self.release()  # whose loader notes where the constants stand
            self._trainable, self._constants = self._fixed_entries()

    def _describe(self) -> str:
        prior = "optimal" if self.prior_variance is None else f"{self.prior_variance:.3g}"
        return f"rank={self.posterior.rank}, diagonal={self.posterior.diagonal!r}, prior={prior}, mode={self.mode!r}"
