"""Networks with each likelihood, and their Fisher matrices by a loop over samples and outcomes in float64."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

from lightning_symmetry import MLP

SAMPLES = 5


class LastAxis(nn.Module):
    """Exchanges the last two axes."""

    def forward(self, input: Tensor) -> Tensor:
        return input.transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def layer_norm() -> nn.Module:
    return MLP(4, (5, 4), 3)


def cnn() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 2, bias=False), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    return net


def attention() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(4, 2, 3, batch_first=True)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(12, 2))


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), LastAxis())  # (N, classes, positions)


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(9, 3))


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 4), nn.Sigmoid())


def single() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0))  # (N,)


CASES = {
    "mlp": (mlp, (4,), "categorical"),
    "layer norm": (layer_norm, (4,), "categorical"),
    "cnn": (cnn, (2, 4, 4), "categorical"),
    "attention": (attention, (3, 4), "categorical"),
    "sequence": (sequence, (2, 4), "categorical"),
    "embedding": (embedding, (3,), "categorical"),
    "regression": (mlp, (4,), "mse"),
    "regression of images": (sequence, (2, 4), "mse"),
    "one number": (single, (4,), "mse"),
    "autoencoder": (autoencoder, (4,), "bernoulli"),
    "autoencoder, squared error": (autoencoder, (4,), "mse"),
    "logits": (mlp, (4,), "bernoulli_logits"),
    "one logit": (single, (4,), "bernoulli_logits"),
}


def case(name: str) -> tuple[nn.Module, Tensor, str]:
    """Return a network in float64, an input and the likelihood."""
    make, shape, likelihood = CASES[name]
    torch.manual_seed(0)
    net = make().double()
    if make is embedding:
        return net, torch.randint(6, (SAMPLES, *shape)), likelihood
    return net, torch.randn(SAMPLES, *shape, dtype=torch.float64), likelihood


def distribution(output: Tensor, likelihood: str):
    if likelihood == "categorical":
        return Categorical(logits=output.movedim(0, -1))
    if likelihood == "mse":
        return Normal(output, 1.0)
    return Bernoulli(**{"probs" if likelihood == "bernoulli" else "logits": output})


def outcomes(output: Tensor, likelihood: str) -> list[Tensor]:
    """All outcomes of a sample; for the Gaussian, points whose mean and covariance are its own."""
    if likelihood == "mse":
        size = output.numel()
        steps = torch.eye(size, dtype=output.dtype) * size**0.5
        return [output.detach() + step.reshape(output.shape) for step in [*steps, *-steps]]
    shape, choices = (output.shape[1:], output.shape[0]) if likelihood == "categorical" else (output.shape, 2)
    values = itertools.product(range(choices), repeat=shape.numel())
    return [torch.tensor(value, dtype=output.dtype).reshape(shape) for value in values]


def scores(net: nn.Module, inputs: Tensor, likelihood: str, names: list[str]) -> list[list[tuple[float, Tensor]]]:
    """Return, for each sample and outcome, its probability and the gradient of its log-probability."""
    net = copy.deepcopy(net).eval()
    parameters = [dict(net.named_parameters())[name].requires_grad_() for name in names]
    result = []
    for x in inputs:
        result.append([])
        points = outcomes(net(x[None])[0], likelihood)
        for y in points:
            log_prob = distribution(net(x[None])[0], likelihood).log_prob(y).sum()
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(log_prob, parameters)])
            weight = 1 / len(points) if likelihood == "mse" else log_prob.exp().item()
            result[-1].append((weight, gradient))
    return result


def fisher_by_loop(net: nn.Module, inputs: Tensor, likelihood: str, names: list[str] | None = None) -> Tensor:
    """Return the mean over samples, and the expectation over outcomes, of the scores' outer products."""
    names = [name for name, _ in net.named_parameters()] if names is None else names
    samples = scores(net, inputs, likelihood, names)
    return sum(weight * torch.outer(g, g) for sample in samples for weight, g in sample) / len(samples)
