"""Products of vectors with a network's Fisher matrix, by curvlinops."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from tqdm.auto import tqdm

from lightning_symmetry.landscape.steps import Step, supervised_step
from lightning_symmetry.surgery import evaluating, match_patterns, plain_copy, without_attention_fast_path
from lightning_symmetry.whitening.coordinates import WhitenedCoordinates
from lightning_symmetry.whitening.likelihoods import Likelihood, check_outputs, likelihood_of

Coefficients = tuple[Tensor, Tensor | None]  # U and c
_REPEATABLE = 1e-6  # relative; two runs of one network differ by rounding at most


class FisherOperator:
    """The Fisher matrix over some parameters as a linear operator: ``operator @ X`` for X of shape ``(D, K)``.

    Attributes:
        size: D.
        rank_bound: What the rank cannot exceed.
        dtype: Type of the entries.
        device: Where products are computed.
    """

    def __init__(self, curvature: Any, scale: float, coordinates: list[WhitenedCoordinates | int], bound: int) -> None:
        self._curvature, self._scale, self._coordinates = curvature, scale, coordinates
        self.size: int = curvature.shape[0]
        self.rank_bound = min(bound, self.size)
        self.dtype: torch.dtype = curvature.dtype
        self.device: torch.device = curvature.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        vectors = self._each("to_canonical", vectors)
        return self._each("pull_back", self._scale * (self._curvature @ vectors))

    def _each(self, direction: str, vectors: Tensor) -> Tensor:
        if all(isinstance(layer, int) for layer in self._coordinates):
            return vectors
        parts = vectors.split([layer if isinstance(layer, int) else layer.size for layer in self._coordinates])
        pairs = zip(self._coordinates, parts, strict=True)
        return torch.cat([x if isinstance(layer, int) else getattr(layer, direction)(x) for layer, x in pairs])

    def dense(self, columns: int, bar: tqdm) -> Tensor:
        """Return the matrix, of which ``columns`` columns are computed at a time.

        Raises:
            ValueError: If it is not finite.
        """
        matrix = torch.empty(self.size, self.size, dtype=self.dtype, device=self.device)
        for part in torch.arange(self.size, device=self.device).split(columns):
            unit = torch.zeros(self.size, len(part), dtype=self.dtype, device=self.device)
            unit[part, torch.arange(len(part), device=self.device)] = 1
            matrix[:, part] = self @ unit
            bar.update(len(part))
        if not bool(torch.isfinite(matrix).all()):
            raise ValueError("The Fisher matrix is not finite: derivatives of the network on the batch are not.")
        return (matrix + matrix.mT) / 2  # rounding apart, it is symmetric


class FisherModel:
    """A network with a batch and a likelihood, ready for products with Fisher matrices of its layers.

    Attributes:
        parameters: Parameters of each chosen layer, by name.
    """

    def __init__(
        self,
        net: nn.Module,
        batch: Any,
        layers: Iterable[str] | None,
        likelihood: str,
        samples: int | None,
        generator: torch.Generator | None,
        whitening: Mapping[str, Coefficients] | None,
        step: Step | None,
    ) -> None:
        self._likelihood = likelihood_of(likelihood)
        self.parameters = _layer_parameters(net, layers)
        self._coordinates = _coordinates(net, self.parameters, whitening or {})
        if samples is not None and samples < 1:
            raise ValueError(f"Expected `samples` to be at least 1 but got {samples}.")
        self._samples, self._seed = samples, _seed(generator)
        self._net, self._step = net, step or _first_input
        like = next(p for parameters in self.parameters.values() for p in parameters)
        self._batch = tree_map(lambda leaf: _like(leaf, like), batch)
        output = self._step(net, self._batch)[0]
        check_outputs(output, likelihood)
        again = self._step(net, self._batch)[0]
        if again.shape != output.shape or not torch.allclose(output, again, rtol=_REPEATABLE, atol=_REPEATABLE):
            raise ValueError("The network gives other outputs each time in evaluation mode: its Fisher is not defined.")
        self._count = len(output)
        self._outputs = self._likelihood.natural(output)

    def operator(self, names: Iterable[str]) -> FisherOperator:
        """Return the Fisher matrix over the parameters of some of the chosen layers, in the order given."""
        names = list(names)
        parameters = [parameter for name in names for parameter in self.parameters[name]]
        arguments = {
            "model_func": _Outputs(self._net, self._step, self._likelihood),
            "loss_func": self._likelihood.loss,
            "params": parameters,
            "data": [({"batch": self._batch}, self._likelihood.target(self._outputs))],
            "check_deterministic": False,  # it would use up global random numbers; FisherModel has looked
            "num_data": self._count,
            "batch_size_fn": lambda _: self._count,
        }
        ggn, monte_carlo = _curvlinops()
        if self._samples is None:
            curvature = ggn(**arguments)
        else:
            curvature = monte_carlo(**arguments, seed=self._seed, mc_samples=self._samples)
        coordinates = [self._coordinates.get(name, sum(p.numel() for p in self.parameters[name])) for name in names]
        bound = self._likelihood.rank_bound(self._outputs, self._samples)
        return FisherOperator(curvature, self._likelihood.scale / self._count, coordinates, bound)


@contextmanager
def fisher_model(
    net: nn.Module, batch: Any, layers: Iterable[str] | None, dtype: torch.dtype, **settings: Any
) -> Iterator[FisherModel]:
    """Prepare a copy of a network with plain layers, in evaluation mode; products are to be taken within."""
    # Attention's fused kernels have no forward-mode derivative.
    with without_attention_fast_path(), torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH):
        copy = plain_copy(net).to(dtype)
        with evaluating(copy):
            yield FisherModel(copy, batch, layers, **settings)


class _Outputs(nn.Module):
    """The natural parameters that a network gives for a batch."""

    def __init__(self, net: nn.Module, step: Step, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self._step, self._natural = net, step, likelihood.natural

    def forward(self, data: Mapping[str, Any]) -> Tensor:
        return self._natural(self._step(self.net, data["batch"])[0])


@cache
def _curvlinops() -> tuple[type, type]:
    """Import curvlinops when it is needed first: it takes a while, and torch warns of its own scripts meanwhile."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", category=Warning)
        from curvlinops import FisherMCLinearOperator, GGNLinearOperator

        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))  # the first one loads its decompositions
    return GGNLinearOperator, FisherMCLinearOperator


def _first_input(net: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Call a network with a batch that is the input, or with the input of an (input, target) batch."""
    return (net(batch), None) if isinstance(batch, Tensor) else supervised_step(net, batch)


def _like(leaf: Any, like: Tensor) -> Any:
    """Bring tensors, also those in a graph's data object, to the device and real ones to the type of a parameter."""
    if isinstance(leaf, Tensor):  # cloned: tensors of inference mode cannot be differentiated through
        return leaf.detach().clone().to(like.device, like.dtype if leaf.is_floating_point() else leaf.dtype)
    return leaf.clone().apply(lambda tensor: _like(tensor, like)) if hasattr(leaf, "edge_index") else leaf


def _seed(generator: torch.Generator | None) -> int:
    if generator is None:
        return 0
    return int(torch.randint(2**31, (), generator=generator, device=generator.device))


def _layer_parameters(net: nn.Module, layers: Iterable[str] | None) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each layer; one that is tied stands where it is held first."""
    found: dict[str, list[nn.Parameter]] = {}
    owners = {
        name: [p for p in module._parameters.values() if p is not None and p.is_floating_point()]
        for name, module in net.named_modules()
    }
    owners = {name: parameters for name, parameters in owners.items() if parameters}
    if not owners:
        raise ValueError(f"{type(net).__name__} has no parameters.")
    patterns = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    matched = match_patterns(owners, patterns, "layers")
    seen: set[int] = set()
    for name, parameters in owners.items():
        if matched[name] and (new := [p for p in parameters if id(p) not in seen]):
            found[name] = new
            seen.update(map(id, new))
    if not found:
        raise ValueError("`layers` is empty: no layer to compute the Fisher matrix of.")
    return found


def _coordinates(
    net: nn.Module, parameters: Mapping[str, list[nn.Parameter]], whitening: Mapping[str, Coefficients]
) -> dict[str, WhitenedCoordinates]:
    coordinates = {}
    for name, (U, c) in whitening.items():
        if name not in parameters:
            raise ValueError(f"`whitening` has the layer {name!r}, but the chosen ones are {list(parameters)}.")
        layer = net.get_submodule(name)
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise ValueError(f"Layer {name!r} is {type(layer).__name__}; only linear layers and convolutions whiten.")
        if [id(p) for p in (layer.weight, layer.bias) if p is not None] != [id(p) for p in parameters[name]]:
            raise ValueError(f"Layer {name!r} shares its parameters with another chosen layer: it cannot be whitened.")
        bias = layer.bias is not None
        coordinates[name] = WhitenedCoordinates(U.to(layer.weight), c, layer.weight.shape, bias, f"layer {name!r}")
    return coordinates
