"""PRONG by hand: a bare float64 loop over (V, d), with its own whitening, and modules to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from tiny_modules import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SIZES = (6, 9, 7, 3)
Layer = dict[str, Tensor]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def data(count: int = 40, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(SIZES[0], SIZES[0], generator=generator)
    inputs = torch.randn(count, SIZES[0], generator=generator) @ mixing + 1
    targets = torch.randn(count, SIZES[-1], generator=generator)
    return TensorDataset(inputs.to(dtype), targets.to(dtype))


def batches(batch_size: int = 8, count: int = 40, dtype: torch.dtype = torch.float64) -> DataLoader:
    return DataLoader(data(count, dtype), batch_size=batch_size)


def stream(items: list[Any]) -> DataLoader:
    """A loader of batches as they are."""
    return DataLoader(items, batch_size=None)


class Regression(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = network() if net is None else net
        self.build = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.build(self.parameters())


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, steps: int, loader: Any = None, **kwargs: Any
) -> pl.Trainer:
    """Train for a number of optimizer steps in float64."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    settings = {"max_epochs": -1, "max_steps": steps, "precision": "64-true", **kwargs}
    run = trainer(*callbacks, **settings)
    run.fit(module, batches() if loader is None else loader, ckpt_path=ckpt_path)
    return run


class ByHand:
    """Algorithm 1 on (V, d). Coefficients come from torch.linalg.eigh of the covariance, samples from past batches.

    Args:
        net: Linear layers with tanh between them; copied.
        update: Called with parameters and gradients (lists); changes the parameters in place.
        momenta: Of ``update``, one list of tensors like the parameters; carried through a reparametrisation.
    """

    def __init__(self, net: nn.Sequential, eps: float, mode: str = "full", relative: bool = False) -> None:
        self.layers: list[Layer] = []
        for part in net:
            if isinstance(part, nn.Linear):
                weight, bias = part.weight.detach().double().clone(), part.bias.detach().double().clone()
                size = weight.shape[1]
                self.layers.append(
                    {"V": weight, "d": bias, "U": torch.eye(size).double(), "c": torch.zeros(size).double()}
                )
        self.eps, self.mode, self.relative = eps, mode, relative
        self.directions: list[list[Tensor]] = []  # optimizer states that are carried along, like parameters
        self.pooled: list[tuple[Tensor, Tensor]] | None = None  # rows and their weights of a moving average

    @property
    def parameters(self) -> list[Tensor]:
        return [layer[key] for layer in self.layers for key in ("V", "d")]

    def forward(self, x: Tensor, inputs: list[Tensor] | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if inputs is not None:
                inputs.append(x)
            x = (x - layer["c"]) @ layer["U"].T @ layer["V"].T + layer["d"]
            x = torch.tanh(x) if index < len(self.layers) - 1 else x
        return x

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        gradients = torch.autograd.grad(F.mse_loss(self.forward(x), y), self.parameters)
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        return list(gradients)

    def canonical(self, values: list[Tensor]) -> list[Tensor]:
        """Return (W, b) for (V, d), layer by layer."""
        result = []
        for layer, weight, bias in zip(self.layers, values[::2], values[1::2], strict=True):
            weight = weight @ layer["U"]
            result += [weight, bias - weight @ layer["c"]]
        return result

    def whitened(self, values: list[Tensor]) -> list[Tensor]:
        result = []
        for layer, weight, bias in zip(self.layers, values[::2], values[1::2], strict=True):
            result += [weight @ torch.linalg.inv(layer["U"]), bias + weight @ layer["c"]]
        return result

    def reparametrize(self, x: Tensor, ema: float | None = None) -> None:
        inputs: list[Tensor] = []
        self.forward(x, inputs)
        fresh = [(rows, torch.ones(len(rows)).double()) for rows in inputs]
        if ema is not None and self.pooled is not None:
            fresh = [
                (torch.cat([old, new]), torch.cat([ema * weights, ones]))
                for (old, weights), (new, ones) in zip(self.pooled, fresh, strict=True)
            ]
        self.pooled = fresh if ema is not None else None
        values, moved = self.canonical(self.parameters), [self.canonical(state) for state in self.directions]
        for layer, (rows, weights) in zip(self.layers, fresh, strict=True):
            layer["c"] = (weights @ rows) / weights.sum()
            centred = rows - layer["c"]
            layer["U"] = self._root(centred.T @ (weights[:, None] * centred) / weights.sum())
        for parameter, value in zip(self.parameters, self.whitened(values), strict=True):
            parameter.copy_(value)
        for state, canonical in zip(self.directions, moved, strict=True):
            for tensor, value in zip(state, self.whitened(canonical), strict=True):
                tensor.copy_(value)

    def _root(self, covariance: Tensor) -> Tensor:
        eye = torch.eye(len(covariance)).double()
        if self.mode == "center":
            return eye
        if self.mode == "diagonal":
            covariance = covariance.diag().diag()
        eps = self.eps * covariance.diag().mean() if self.relative else self.eps
        values, vectors = torch.linalg.eigh(covariance + eps * eye)
        return vectors @ values.rsqrt().diag() @ vectors.T


def sgd(by_hand: ByHand, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Any:
    """Return a step of SGD on (V, d), whose momentum is carried along."""
    buffers = [torch.zeros_like(parameter) for parameter in by_hand.parameters]
    by_hand.directions.append(buffers)

    def step(gradients: list[Tensor]) -> None:
        for parameter, gradient, buffer in zip(by_hand.parameters, gradients, buffers, strict=True):
            gradient = gradient + weight_decay * parameter
            buffer.mul_(momentum).add_(gradient)
            parameter.sub_(lr * (gradient + momentum * buffer if nesterov else buffer))

    return step


def adam(by_hand: ByHand, lr: float) -> Any:
    """Return a step of Adam on (V, d): its first moment is carried along, its second moment kept."""
    first = [torch.zeros_like(parameter) for parameter in by_hand.parameters]
    second = [torch.zeros_like(parameter) for parameter in by_hand.parameters]
    by_hand.directions.append(first)
    count = 0

    def step(gradients: list[Tensor]) -> None:
        nonlocal count
        count += 1
        for parameter, gradient, m, v in zip(by_hand.parameters, gradients, first, second, strict=True):
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.sub_(lr * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8))

    return step


def run_by_hand(
    by_hand: ByHand,
    step: Callable[[list[Tensor]], None],
    steps: int,
    every: int,
    num_samples: int,
    ema: float | None = None,
    batch_size: int = 8,
    count: int = 40,
) -> list[list[Tensor]]:
    """Train as the callback is meant to; return the canonical parameters after each step."""
    shown = list(batches(batch_size, count))
    first = shown[0][0][:num_samples]
    by_hand.reparametrize(first, ema)
    again = -(-num_samples // batch_size) if len(first) < num_samples else None
    trajectory, seen = [], []
    for index in range(steps):
        x, y = shown[index % len(shown)]
        seen.append(x[:num_samples])
        step(by_hand.gradients(x, y))
        trajectory.append([value.clone() for value in by_hand.canonical(by_hand.parameters)])
        if (index + 1) % every == 0 or index + 1 == again:
            count = next(n for n in range(1, len(seen) + 1) if sum(map(len, seen[-n:])) >= num_samples)
            by_hand.reparametrize(torch.cat(seen[-count:]), ema)
    return trajectory


class Trajectory(pl.Callback):
    """Keeps the parameters of the state dict after each step: plain weights and biases."""

    def __init__(self) -> None:
        self.values: list[list[Tensor]] = []

    def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if run.global_step > len(self.values):
            self.values.append([value.detach().clone() for value in module.net.state_dict().values()])


def deviation(ours: list[list[Tensor]], expected: list[list[Tensor]]) -> float:
    """The largest difference, in units of the largest entry of a parameter."""
    assert len(ours) == len(expected)
    pairs = [(a, b) for left, right in zip(ours, expected, strict=True) for a, b in zip(left, right, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
