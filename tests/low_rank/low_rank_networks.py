"""Small networks to factorise."""

from __future__ import annotations

import torch
from torch import nn


def network():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 40),
        nn.Tanh(),
        nn.Linear(40, 4),
    ]
    return nn.Sequential(*layers)


def images(count=2):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(30, 12), nn.Linear(12, 12), nn.Linear(12, 30)
        self.head.weight = self.table.weight
        self.other = nn.Linear(12, 30)
        self.other.bias = self.head.bias
        self.images = nn.ModuleList([nn.Conv2d(4, 8, 3, stride=s, bias=False) for s in (1, 2)])
        self.images[1].weight = self.images[0].weight

    def forward(self, x):
        return self.head(self.middle(self.table(x))) + self.other(self.middle(self.table(x)))


class EveryKind(nn.Module):
    """Has every kind of layer; its input are ``(batch, 8)`` tokens of 30."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.along = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.image = nn.Conv2d(1, 12, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.head = nn.Linear(96, 20)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.along(x.mT).relu()
        return self.head(self.norm(self.image(x.unsqueeze(1))).flatten(2).mean(1).flatten(1).repeat(1, 3)[:, :96])
