"""PRONG+ of one layer by hand: a dense D from the moving average of all rows, and inputs that differ in each step."""

from __future__ import annotations

import torch

from lightning_symmetry.whitening import collect_statistics, reparametrize, rescale_units

EPS, MOMENTUM, STEPS = 0.1, 0.8, 4
EYE = torch.eye(12, dtype=torch.float64)


class Mixture:
    """All rows of one group of inputs, each with its weight in the moving average."""

    def __init__(self, rows, centred=True):
        self.rows, self.weights, self.centred = rows, torch.ones(len(rows)).double() / len(rows), centred

    def add(self, rows):
        self.rows = torch.cat([self.rows, rows])
        self.weights = torch.cat([MOMENTUM * self.weights, (1 - MOMENTUM) * torch.ones(len(rows)).double() / len(rows)])

    def covariance(self):
        rows = self.rows - self.weights @ self.rows if self.centred else self.rows
        return rows.T @ (self.weights[:, None] * rows)


def scaled(U, mixture):
    """Return v and P' the dense way."""
    v = (U @ mixture.covariance() @ U + EPS * U @ U).diagonal()
    return v, U @ torch.diag(1 / v) @ U


def train(net, inputs, num_rows=1000):
    """Reparametrise with the first input, and show the others in training steps."""
    assert reparametrize(net, collect_statistics(net, lambda: net(inputs[0])), EPS, unit_rows=num_rows) == {}
    for input in inputs[1:]:
        net(input)
        rescale_units(net, MOMENTUM)


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shown(*shape, count=9):
    """Inputs of another spread and mean each time."""
    return [random(count + step, *shape, seed=step) * (1 + step) + step**2 / 4 for step in range(STEPS)]
