"""What kind of MLP can be embedded: linear layers with one activation between them that splits a line."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from lightning_symmetry.networks import MLP


def read_mlp(mlp: nn.Module) -> tuple[list[nn.Linear], nn.Module, bool]:
    """Return the linear layers, the activation, and whether the MLP flattens its input; check that it is one."""
    if isinstance(mlp, MLP):
        if any(not isinstance(norm, nn.Identity) for norm in mlp.norms):
            raise ValueError("Cannot embed normalised layers: build the MLP with norm=False.")
        linears, activations, flatten = list(mlp.linears), list(mlp.activations), True
    elif isinstance(mlp, nn.Sequential):
        modules = list(_flat(mlp))
        flatten = bool(modules) and isinstance(modules[0], nn.Flatten)
        modules = modules[flatten:]
        linears, activations = modules[::2], modules[1::2]
        listed = " -> ".join(type(m).__name__ for m in modules)
        if others := [m for m in modules if isinstance(m, nn.Dropout | nn.modules.batchnorm._NormBase | nn.LayerNorm)]:
            raise TypeError(f"Expected nn.Linear and activations only but got {type(others[0]).__name__}: {listed}.")
        is_linear = [isinstance(m, nn.Linear) for m in modules]
        if not modules or is_linear != [k % 2 == 0 for k in range(len(modules))] or not is_linear[-1]:
            raise ValueError(f"Expected nn.Linear -> activation -> ... -> nn.Linear but got: {listed or 'nothing'}.")
    else:
        raise TypeError(f"Expected `mlp` to be an MLP or an nn.Sequential but got {type(mlp).__name__}.")
    if wrong := [m for m in linears if type(m) is not nn.Linear]:
        raise TypeError(f"Expected plain nn.Linear layers but got {type(wrong[0]).__name__}.")
    for before, after in pairwise(linears):
        if before.out_features != after.in_features:
            raise ValueError(f"The layers {before} and {after} do not follow one another.")
    return linears, _checked_activation(activations), flatten


def _flat(net: nn.Sequential) -> Iterator[nn.Module]:
    """Yield the modules of a sequence of sequences."""
    for module in net:
        yield from _flat(module) if isinstance(module, nn.Sequential) else [module]


def _checked_activation(activations: Sequence[nn.Module]) -> nn.Module:
    """Return the MLP's activation, after a check that it is one function with ``eta(x) - eta(-x) = x``."""
    activations = activations or [nn.ReLU()]
    x = torch.cat([torch.linspace(-50, 50, 4001, dtype=torch.float64), torch.tensor([-1e3, -1e-3, 1e-3, 1e3])])
    x = x.unsqueeze(1)
    values = []
    for activation in activations:
        with torch.no_grad():
            eta = copy.deepcopy(activation).to("cpu", torch.float64)
            values.append(eta(x.clone()))  # it may work in place
            miss = float(((values[-1] - eta(-x) - x).abs() / (1 + x.abs())).max())
        if not miss <= 1e-12:
            raise ValueError(
                f"The activation {activation} does not satisfy eta(x) - eta(-x) = x, which the embedding needs (it "
                f"misses by {miss:.1e}): use ReLU, GELU or SiLU."
            )
        if not torch.equal(values[0], values[-1]):
            raise ValueError(f"Expected one activation everywhere but got {activations[0]} and {activation}.")
    return activations[0]
