"""Random small networks: a list of numbers is read as a program of layers, reshapes, products and reductions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from trace_reference import normal

WIDTHS = (2, 3, 4, 6, 8, 12)
MOST_ENTRIES = 1500
FACTORS = (2, 3)


class Program(nn.Module):
    """Runs instructions ``(operation, a, b, c)`` on a growing list of tensors, the last of which is read out.

    An instruction that does not fit the shapes at hand is passed over. Parameters are made in the first run.
    """

    def __init__(self, instructions):
        super().__init__()
        self.instructions = instructions
        self.weights = nn.ParameterList()
        self.made = False
        self(normal(3, 6))
        self.made = True

    def weight(self, *shape):
        if not self.made:
            self.weights.append(nn.Parameter(normal(*shape, seed=len(self.weights))))
        weight = self.weights[self.next]
        self.next += 1
        return weight

    def forward(self, x):
        self.next = 0
        tensors = [x @ self.weight(6, 12), x @ self.weight(6, 12)]
        for operation, a, b, c in self.instructions:
            t = tensors[-1 - a % min(3, len(tensors))]
            made = OPERATIONS[operation](self, t, tensors, b, c)
            if made is not None and made.dim() < 5 and 0 < made.numel() <= MOST_ENTRIES:
                tensors.append(made / made.norm().clamp_min(1e-3))
        return 1 + tensors[-1].reshape(1, -1) @ self.weight(tensors[-1].numel(), 2)  # some programs end in zeros


def other(t, tensors, b):
    """Return another tensor with as many entries, in the shape of ``t``."""
    fitting = [u for u in tensors if u.numel() == t.numel()]
    return fitting[b % len(fitting)].reshape(t.shape)


def linear(net, t, tensors, b, c):
    width = WIDTHS[b % len(WIDTHS)]
    return t @ net.weight(t.shape[-1], width) + net.weight(width)


def contract(net, t, tensors, b, c):
    dim, width = b % t.dim(), WIDTHS[c % len(WIDTHS)]
    return torch.tensordot(t, net.weight(t.shape[dim], width), ([dim], [0]))


def split(net, t, tensors, b, c):
    dim, part = b % t.dim(), FACTORS[c % 2]
    if t.shape[dim] % part == 0:
        return t.unflatten(dim, (part, -1) if c % 4 < 2 else (-1, part))
    return None


def merge(net, t, tensors, b, c):
    return t.flatten(b % (t.dim() - 1), b % (t.dim() - 1) + 1) if t.dim() > 1 else None


def regroup(net, t, tensors, b, c):
    """Reshape across boundaries."""
    sizes = [n for n in range(1, t.numel() + 1) if t.numel() % n == 0]
    return t.reshape(sizes[b % len(sizes)], -1)


def permute(net, t, tensors, b, c):
    return t.transpose(b % t.dim(), c % t.dim())


def chunk(net, t, tensors, b, c):
    dim = b % t.dim()
    length = 1 + c % t.shape[dim]
    return t.narrow(dim, c % (t.shape[dim] - length + 1), length)


def every_second(net, t, tensors, b, c):
    dim = b % t.dim()
    return t[(slice(None),) * dim + (slice(c % 2, None, 2),)]


def cat(net, t, tensors, b, c):
    return torch.cat([t, other(t, tensors, c).tanh()], b % t.dim())


def stack(net, t, tensors, b, c):
    return torch.stack([t, other(t, tensors, c)], b % (t.dim() + 1))


def select(net, t, tensors, b, c):
    return t.select(b % t.dim(), c % t.shape[b % t.dim()]) if t.dim() > 1 else None


def repeat(net, t, tensors, b, c):
    dim = b % t.dim()
    if c % 2:
        return t.repeat_interleave(2, dim)
    return t.repeat(*(2 if place == dim else 1 for place in range(t.dim())))


def expand(net, t, tensors, b, c):
    dim = b % (t.dim() + 1)
    return t.unsqueeze(dim).expand(*t.shape[:dim], 2 + c % 2, *t.shape[dim:])


def add(net, t, tensors, b, c):
    return t + other(t, tensors, b)


def multiply(net, t, tensors, b, c):
    return t * other(t, tensors, b)


def scale(net, t, tensors, b, c):
    return t * net.weight(*t.shape[b % t.dim() :])


def broadcast(net, t, tensors, b, c):
    return t.unsqueeze(-1) + net.weight(WIDTHS[b % 3]) if t.dim() < 4 else None


def outer(net, t, tensors, b, c):
    return t.unsqueeze(-1) * t.unsqueeze(-2)


def product(net, t, tensors, b, c):
    return t @ other(t, tensors, b).transpose(-1, -2) if t.dim() > 1 else None


def reduce(net, t, tensors, b, c):
    if t.dim() == 1:
        return None
    kept = {"dim": b % t.dim(), "keepdim": c % 8 > 3}
    return t.var(correction=0, **kept) if c % 4 == 0 else (torch.sum, torch.amax, torch.logsumexp)[c % 4 - 1](t, **kept)


def along(net, t, tensors, b, c):
    function = (torch.softmax, torch.cumsum, lambda t, d: t.sort(d)[0], lambda t, d: t.flip(d))[c % 4]
    return function(t, b % t.dim())


def elementwise(net, t, tensors, b, c):
    return (torch.tanh, torch.sigmoid, torch.cos, F.relu)[b % 4](t)


def normalise(net, t, tensors, b, c):
    shape = t.shape[b % t.dim() :]
    return F.layer_norm(t, shape, net.weight(*shape)) if math.prod(shape) > 1 else None


def write(net, t, tensors, b, c):
    t, dim = t.clone(), b % t.dim()
    part = t.narrow(dim, 0, max(1, t.shape[dim] // 2))
    fitting = [u for u in tensors if u.numel() == part.numel()]
    part.add_(fitting[c % len(fitting)].reshape(part.shape) if fitting else 1.0)
    return t


def fill(net, t, tensors, b, c):
    made = torch.zeros(*t.shape, 2, dtype=t.dtype)
    made[..., b % 2] = t
    return made


def pad(net, t, tensors, b, c):
    return F.pad(t, (c % 2, 1), value=0.5)


def diagonal(net, t, tensors, b, c):
    return t.diagonal(dim1=-1, dim2=-2) if t.dim() > 1 and t.shape[-1] == t.shape[-2] else None


def look_up(net, t, tensors, b, c):
    return t.index_select(b % t.dim(), torch.tensor([c % t.shape[b % t.dim()], 0]))


def convolve(net, t, tensors, b, c):
    if t.dim() != 3:
        return None
    groups = 2 if c % 2 and t.shape[1] % 2 == 0 else 1
    return F.conv1d(t, net.weight(4, t.shape[1] // groups, 1 if b % 2 else min(2, t.shape[2])), groups=groups)


def attend(net, t, tensors, b, c):
    return F.scaled_dot_product_attention(t, other(t, tensors, b), other(t, tensors, c)) if t.dim() > 2 else None


STRUCTURE = [split, merge, permute, stack, expand, product, attend, multiply, linear, contract, select]
OPERATIONS = [
    *(STRUCTURE * 3),  # what makes heads, and blocks within blocks
    *(regroup, chunk, every_second, cat, repeat, add, scale, broadcast, outer, reduce, along, elementwise, normalise),
    *(write, fill, pad, diagonal, look_up, convolve),
]
