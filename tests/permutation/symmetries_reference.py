"""Brute force over all permutations of small networks, and networks with constants of one's choice."""

from __future__ import annotations

import itertools
import math

import torch

from lightning_symmetry.permutation.constants import plain_network


def elements(spec):
    """All elements of the group of the plain network."""
    sizes = {name: group.size for name, group in spec.groups.items()}
    assert math.prod(map(math.factorial, sizes.values())) <= 5_000
    single = [[torch.tensor(p) for p in itertools.permutations(range(size))] for size in sizes.values()]
    for chosen in itertools.product(*single):
        yield dict(zip(sizes, chosen, strict=True))


def residual(net, example_input):
    """All elements that keep every constant, tried one by one."""
    network = plain_network(net, example_input)
    tensors = {name: torch.where(c.fixed, c.values.double(), torch.pi) for name, c in network.constants.items()}
    kept = [
        element
        for element in elements(network.spec)
        if all(torch.equal(network.spec.permute(name, tensor, element), tensor) for name, tensor in tensors.items())
    ]
    return network.spec, kept


def key(element):
    return tuple(tuple(p.tolist()) for p in element.values())


def generated(spec, generators):
    """The group that some elements generate, as keys."""

    def compose(first, second):
        if spec.blocks:
            return spec.compose(first, second)
        return {name: first[name][second[name]] for name in first}

    start = spec.identity()
    found, edge = {key(start)}, [start]
    while edge:
        new = []
        for element in edge:
            for generator in generators:
                made = compose(element, generator)
                if key(made) not in found:
                    found.add(key(made))
                    new.append(made)
        edge = new
    return found


def set_constants(layer, mask, values):
    """Give a layer this mask (true where trainable) and the constants that stand at the fixed places of ``values``."""
    mask = torch.as_tensor(mask)
    size = layer.weight[0].numel() // mask.shape[1]
    fixed = (~mask).repeat_interleave(size, 1)
    values = torch.as_tensor(values, dtype=layer.weight.dtype).reshape(len(mask), -1)
    state = {**layer.state_dict(), "mask": mask, "fixed": values[fixed].view(len(mask), -1)}
    layer.load_state_dict(state)
    return layer


def constants_state(net):
    """The buffers that must never change."""
    return {name: t.clone() for name, t in net.state_dict().items() if name.endswith(("mask", "fixed"))}


def assert_kept(net, spec, element, inputs, tolerance=1e-9):
    """Permute the trainable entries of an asymmetric network: constants stay, and so does the function."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = net(*inputs)
    plain = plain_network(net, inputs).net.state_dict()
    moved = spec.apply(plain, element)
    constants = constants_state(net)
    net.load_state_dict({**before, **{name: t for name, t in moved.items() if name not in constants}})
    for name, tensor in constants_state(net).items():
        assert torch.equal(tensor, constants[name])
    actual = net(*inputs)
    assert float((actual - expected).detach().abs().max()) <= tolerance * float(expected.detach().abs().max())
    assert any(not torch.equal(t, before[name]) for name, t in net.state_dict().items())
    net.load_state_dict(before)
