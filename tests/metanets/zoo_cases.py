"""Networks whose state has every kind of tensor, and zoos of them."""

from __future__ import annotations

import torch
from torch import nn

from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.metanets import ZooWriter


def plain(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def asymmetric(seed: int = 0) -> nn.Module:
    """A W-asymmetric network with batch norm."""
    return asymmetrize(normed(), method="w", n_fix=2, kappa=1.0, seed=seed)


def gated(seed: int = 0) -> nn.Module:
    """A sigma-asymmetric network."""
    return asymmetrize(plain(), method="sigma", example_input=torch.zeros(2, 4), seed=seed)


class Odd(nn.Module):
    """A scalar parameter, a frozen one, a table of integers, a sparse and a boolean buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.rough = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


CASES = {"plain": plain, "normed": normed, "asymmetric": asymmetric, "gated": gated, "odd": Odd}
MODULE = "metanets.zoo_cases"


@torch.no_grad()
def trained(make, seed: int) -> nn.Module:
    """Return a network whose floating parameters and buffers, but no constants, are random."""
    net = make()
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*net.named_parameters(), *net.named_buffers()]:
        if name.endswith(("mask", "fixed")) or value.layout != torch.strided or value.dtype == torch.bool:
            continue
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator).abs())
        elif value.numel() == 1:
            value.fill_(seed)
    net.state_dict()  # writes the constants into the weights
    return net.eval()


def write(path, indices, make=plain, chunk=3, **options):
    """Write networks of these indices, which are also their seeds, and return the writer's folder."""
    indices = list(indices)
    with ZooWriter(path, make(), **options) as writer:
        for start in range(0, len(indices), chunk):
            part = indices[start : start + chunk]
            states = [trained(make, index).state_dict() for index in part]
            writer.append(states, [record(index) for index in part])
    return path


def record(index: int) -> dict:
    return {"index": index, "accuracy": (index * 37 % 101) / 101, "lr": 0.1 / (index + 1), "_seconds": 1.0 * index}
