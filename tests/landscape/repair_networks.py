"""Networks to repair, their data, and the statistics of their units written out in float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SAMPLES = 3, 29


class Axes(nn.Module):
    """Exchanges two axes."""

    def forward(self, input: Tensor) -> Tensor:
        return input.transpose(1, 2)


def mlp(width: int = 8, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width, bias), nn.ReLU(), nn.Linear(width, width, bias), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 3, groups=3, padding=1), nn.GELU(), nn.AvgPool2d(2),
        nn.Conv2d(9, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def conv1d() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, stride=2), nn.ReLU(), nn.Conv1d(6, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def sequence() -> nn.Sequential:
    """Linear layers on (N, T, C)."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


def layer_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES)
    )


def bn_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False),
        nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def mixed() -> nn.Sequential:
    """Layer 0 feeds batch norm; 3 feeds it behind a nonlinearity in place; 7 does not."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8),
        nn.Identity(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def axes_before_norm() -> nn.Sequential:
    """Layer 0 feeds batch norm along its units, 3 along the sequence, as long as there are units."""
    return nn.Sequential(
        nn.Linear(5, 4), Axes(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, CLASSES),
    )  # fmt: skip


SHAPES = {
    mlp: (6,),
    cnn: (2, 6, 6),
    conv1d: (2, 9),
    sequence: (4, 5),
    layer_norm: (6,),
    bn_cnn: (2, 6, 6),
    mixed: (6,),
    axes_before_norm: (4, 5),
}


def samples(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
    return (2 * x + 0.5).to(dtype), torch.randint(CLASSES, (SAMPLES,), generator=generator)


def data(shape: tuple[int, ...], batch_size: int = 10, dtype: torch.dtype = torch.float64) -> DataLoader:
    """Batches of uneven size: 10, 10, 9."""
    return DataLoader(TensorDataset(*samples(shape, dtype)), batch_size=batch_size)


def pair(build, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """Two networks; those with running statistics have seen data."""
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = build().to(dtype)
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules()):
            for batch, _ in data(SHAPES[build], dtype=dtype):
                net.train()(batch + seed)
        nets.append(net.train())
    return nets[0], nets[1]


def preactivations(net: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """What each linear and convolutional layer gives, as (units, values), layer by layer in float64."""
    found = {}
    x = x.double()
    with torch.no_grad():
        for name, layer in copy.deepcopy(net).double().named_children():
            x = layer(x)
            if isinstance(layer, nn.Linear):
                found[name] = x.reshape(-1, x.shape[-1]).T.clone()
            elif isinstance(layer, nn.Conv1d | nn.Conv2d):
                found[name] = x.transpose(0, 1).flatten(1).clone()
    return found


def moments(net: nn.Sequential, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (h.mean(1), h.std(1, correction=0)) for name, h in preactivations(net, x).items()}


def assert_interpolated(net, a, b, x, alpha, tolerance, skip=(), means=True) -> None:
    """The statistics of all layers but the last one are the interpolated ones."""
    ours, first, second = (moments(part, x) for part in (net, a, b))
    hidden = [name for name in list(ours)[:-1] if name not in skip]
    assert hidden
    for name in hidden:
        for i in (0, 1) if means else (1,):
            expected = (1 - alpha) * first[name][i] + alpha * second[name][i]
            expected = expected.clamp(min=0) if i else expected
            torch.testing.assert_close(ours[name][i], expected, rtol=tolerance, atol=tolerance)
