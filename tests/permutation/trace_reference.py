"""Small networks from functions, and what every traced symmetry is held to: the network's own output."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lightning_symmetry.permutation.spec import trace_permutations
from lightning_symmetry.permutation.trace import tensors_in
from lightning_symmetry.surgery import call

EXACT = 1e-10  # relative to the largest entry of the output, in float64
ROUNDING = 1e-4  # the same in float32


class Net(nn.Module):
    """Modules, parameters and buffers by name, and a function ``forward(self, *inputs)``."""

    def __init__(self, function, buffers=(), **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        for name, buffer in dict(buffers).items():
            self.register_buffer(name, buffer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def parameter(*shape):
    return nn.Parameter(torch.empty(*shape))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def randomise(net, seed=0):
    """Fill all parameters and real buffers, such that signals neither vanish nor explode and nothing is zero or one."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in net.state_dict(keep_vars=True).values():
        if not torch.is_tensor(tensor) or not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.ndim > 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(1, tensor[0].numel()) ** 0.5)
        else:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)  # also variances: positive
    return net


@torch.no_grad()
def outputs_of(net, inputs):
    return [tensor.clone() for tensor in tensors_in(call(net, copy.deepcopy(inputs)))]


def permuted(net, spec, element):
    """Return a copy of the network with the group element applied to its state dict."""
    moved = copy.deepcopy(net)
    moved.load_state_dict(spec.apply(net.state_dict(), element))
    return moved


def largest_deviation(net, inputs, spec, element):
    worst = 0.0
    for expected, actual in zip(outputs_of(net, inputs), outputs_of(permuted(net, spec, element), inputs), strict=True):
        assert actual.shape == expected.shape
        if not expected.numel():
            continue
        assert torch.isfinite(expected).all()
        if not expected.is_floating_point():
            assert torch.equal(expected, actual)
            continue
        scale = expected.abs().max().double()
        assert scale > 0
        worst = max(worst, float((actual.double() - expected.double()).abs().max() / scale))
    return worst


def assert_symmetric(net, inputs, tolerance=EXACT, elements=3):
    """Trace a randomised network; random elements of its group keep its output. Return the groups."""
    randomise(net).eval()
    spec = trace_permutations(net, inputs)
    for seed in range(elements):
        element = spec.random(torch.Generator().manual_seed(seed))
        deviation = largest_deviation(net, inputs, spec, element)
        assert deviation <= tolerance, f"{deviation}\n{spec.report()}"
    return spec


def sizes(spec):
    """Return the sizes of the groups, in order."""
    return sorted(group.size for group in spec.groups.values())
