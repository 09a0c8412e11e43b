"""What the tests of asymmetric networks compare with: loops and masked plain networks."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from lightning_symmetry import MLP, asymmetrize
from lightning_symmetry.asymmetry import AsymmetricLayer


def dense_weight(layer: AsymmetricLayer) -> np.ndarray:
    """Return W' of eq. 2 in float64, entry by entry."""
    shape = layer.weight.shape
    rows, units = layer.mask.shape
    weight = layer.weight.detach().double().numpy().reshape(rows, units, -1).copy()
    mask, fixed = layer.mask.numpy(), layer.fixed.double().numpy()
    for row in range(rows):
        constants = iter(fixed[row])
        for unit, entry in itertools.product(range(units), range(weight.shape[2])):
            if not mask[row, unit]:
                weight[row, unit, entry] = next(constants)
    return weight.reshape(tuple(shape))


def spoil(layer: AsymmetricLayer) -> None:
    """Put nonsense where the constants stand, as weight decay does."""
    with torch.no_grad():
        layer.weight[~layer.trainable_entries()] = 1e3


def constants_of(net: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return a copy of (mask, fixed) of each asymmetric layer."""
    return {
        name: (module.mask.clone(), module.fixed.clone())
        for name, module in net.named_modules()
        if isinstance(module, AsymmetricLayer)
    }


def image_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def sequence_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(3, 6, 5, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(42, 4))


PLAIN = {"mlp": lambda: MLP(12, (16, 16), 4), "images": image_net, "sequences": sequence_net}
SHAPES = {"mlp": (12,), "images": (3, 6, 6), "sequences": (3, 7)}


def asymmetric(kind: str, seed: int = 0) -> nn.Module:
    """Return a small asymmetric network; its initialisation is always the same."""
    torch.manual_seed(0)
    return asymmetrize(PLAIN[kind](), n_fix=0.25, kappa=1.5, seed=seed)


def batch(kind: str, count: int = 6, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *SHAPES[kind], generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.arange(count) % 4


class MaskedPlain(nn.Module):
    """The plain network whose weights are ``where(M, W, F)`` in each forward pass: the dense form of eq. 2."""

    def __init__(self, kind: str, net: nn.Module) -> None:
        super().__init__()
        self.plain = PLAIN[kind]().to(next(net.parameters()).dtype)
        self.trainable, self.fixed = {}, {}
        for name, module in net.named_modules():
            if isinstance(module, AsymmetricLayer):
                self.trainable[f"{name}.weight"] = module.trainable_entries().clone()
                self.fixed[f"{name}.weight"] = torch.from_numpy(dense_weight(module)).to(module.weight.dtype)
        self.plain.load_state_dict({n: p.detach().clone() for n, p in net.named_parameters()}, strict=False)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.where(self.trainable[name], p, self.fixed[name]) if name in self.fixed else p
            for name, p in self.plain.named_parameters()
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.plain, self.weights(), (x,))


def assert_truthful(kind: str, net: nn.Module, constants: dict, x: torch.Tensor, **tolerance: float) -> None:
    """Check that the state dict holds the constants to the bit and describes the function that the network computes."""
    state = net.state_dict()
    layers = {n: m for n, m in net.named_modules() if isinstance(m, AsymmetricLayer)}
    assert layers.keys() == constants.keys()
    for name, (mask, fixed) in constants.items():
        assert torch.equal(state[f"{name}.mask"], mask)
        assert torch.equal(state[f"{name}.fixed"], fixed)
        rows = state[f"{name}.weight"].reshape(len(mask), mask.shape[1], -1)
        assert torch.equal(rows[~mask].reshape(len(mask), -1), fixed)
    plain = PLAIN[kind]().to(next(net.parameters()).dtype)
    plain.load_state_dict({key: state[key] for key in plain.state_dict()})
    torch.testing.assert_close(net(x), plain(x), **tolerance)
