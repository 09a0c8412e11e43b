"""What tests of variational layers share: dense reference moments in float64, and z-scores of Monte Carlo estimates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lightning_symmetry.variational import VariationalLayer


def randomize(layer: VariationalLayer, variance: float = 0.3) -> VariationalLayer:
    """Give a layer's posterior a covariance in which each part counts."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * variance - 1.5 if name.endswith("log_variance") else noise)
    return layer


def joint(layer: VariationalLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, d and V over the entries of [weight; bias] that are not fixed, in float64, written down anew."""
    parts = []
    trainable = torch.ones_like(layer.weight, dtype=torch.bool)
    if hasattr(layer, "mask"):
        trainable = layer.mask.repeat_interleave(layer.weight[0].numel() // layer.mask.shape[1], 1)
        trainable = trainable.view_as(layer.weight)
    if getattr(layer, "padding_idx", None) is not None:
        trainable[layer.padding_idx] = False
    for name, keep in (("weight", trainable), ("bias", None)):
        mean = getattr(layer, name)
        if mean is None:
            continue
        keep = torch.ones_like(mean, dtype=torch.bool) if keep is None else keep
        factors, log_variance = getattr(layer, f"{name}_factors"), getattr(layer, f"{name}_log_variance")
        d = (
            torch.full_like(mean, layer.posterior.variance, dtype=torch.float64)
            if log_variance is None
            else log_variance.exp()
        )
        rows = mean.new_zeros(1, int(keep.sum())) if factors is None else factors.view(-1, *mean.shape)[:, keep]
        parts.append((mean[keep].double(), d[keep].double(), rows.double()))
    return tuple(torch.cat([part[i] for part in parts], -1).detach() for i in range(3))


def covariance(layer: VariationalLayer) -> Tensor:
    """Return the posterior's covariance of the entries that are not fixed, dense, in float64."""
    _, d, factors = joint(layer)
    return torch.diag(d) + factors.T @ factors / len(factors)


def output_moments(layer: VariationalLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the exact mean of the flattened output of one example, and the diagonal's and the low-rank covariance.

    By the Jacobian of the plain layer's output in its weight and bias.
    """
    plain = layer.to_layer().double()
    values = {name: p.detach() for name, p in plain.named_parameters()}
    jacobian = jacrev(lambda p: functional_call(plain, p, (x,)).flatten())(values)
    keep = {"weight": torch.ones_like(layer.weight, dtype=torch.bool)}
    if hasattr(layer, "mask"):
        size = layer.weight[0].numel() // layer.mask.shape[1]
        keep["weight"] = layer.mask.repeat_interleave(size, 1).view_as(layer.weight)
    columns = [
        jacobian[name].flatten(1)[:, keep[name].flatten()] if name in keep else jacobian[name] for name in values
    ]
    dense = torch.cat(columns, 1)
    _, d, factors = joint(layer)
    spread = dense @ factors.T
    return plain(x).flatten().detach(), (dense * d) @ dense.T, spread @ spread.T / len(factors)


def z_scores(draw: Callable[[int], Tensor], count: int, mean: Tensor, cov: Tensor) -> tuple[float, float]:
    """Return the largest z-scores of mean and covariance of samples; ``draw(n)`` gives n rows.

    The outputs are Gaussian given an example: the error of a covariance's entry is
    ``sqrt((C_ij^2 + C_ii C_jj) / n)``, that of a mean's ``sqrt(C_ii / n)``.
    """
    samples = draw(count).double()
    centred = samples - mean
    found = centred.T @ centred / count
    variances = cov.diagonal()
    of_mean = centred.mean(0) / (variances / count).sqrt()
    of_covariance = (found - cov) / ((cov.square() + torch.outer(variances, variances)) / count).sqrt()
    return float(of_mean.abs().max()), float(of_covariance.abs().max())


def limit(outputs: int) -> float:
    """Return the z-score that the largest of all entries of a covariance exceeds with a probability below 1e-4."""
    tests = outputs * (outputs + 3) / 2
    return float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - 0.5e-4 / tests, dtype=torch.float64)))


def small_network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 24), nn.Tanh(), nn.Linear(24, 5)).to(dtype)


def images(count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
