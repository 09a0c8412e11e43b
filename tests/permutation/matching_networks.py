"""Small networks of many kinds, trained a little so that no two units are alike, and planted permutations of them."""

from __future__ import annotations

import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from trace_reference import Net

from lightning_symmetry import GNN, MLP, ResNet20, trace_permutations
from lightning_symmetry.surgery import call

STATISTICS = ("running_mean", "running_var")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vit(net, images):
    tokens = net.patches(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.token.expand(len(tokens), -1, -1), tokens], 1) + net.positions
    return net.head(net.encoder(tokens)[:, 0])


def encoder(width, heads, layers=1, norm_first=False):
    layer = nn.TransformerEncoderLayer(width, heads, 10, dropout=0.1, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def make_vit():
    return Net(
        vit,
        patches=nn.Conv2d(1, 8, 4, 4),
        token=nn.Parameter(0.1 * torch.randn(1, 1, 8)),
        positions=nn.Parameter(0.1 * torch.randn(1, 5, 8)),
        encoder=encoder(8, 2, 2, norm_first=True),
        head=nn.Linear(8, 3),
    )


def shared_keys(net, x):
    """Attention in which three heads of queries share each of two heads of keys and values."""
    n, t, _ = x.shape
    h = net.embed(x)
    q = net.q(h).view(n, t, 2, 3, 4).permute(0, 2, 3, 1, 4)
    k = net.k(h).view(n, t, 2, 1, 4).permute(0, 2, 3, 1, 4)
    v = net.v(h).view(n, t, 2, 1, 4).permute(0, 2, 3, 1, 4)
    mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    return net.out(h + net.o(mixed.permute(0, 3, 1, 2, 4).reshape(n, t, 24)))


def make_shared_keys():
    parts = {"embed": (5, 8), "q": (8, 24), "k": (8, 8), "v": (8, 8), "o": (24, 8), "out": (8, 3)}
    return Net(shared_keys, **{name: nn.Linear(*sizes) for name, sizes in parts.items()})


def recurrent(net, x):
    return net.out(net.rnn(x)[0])


def residual(net, x):
    h = net.into(x)
    return net.out(h + F.relu(net.square(h)))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 9),
        nn.ReLU(),
        nn.Linear(9, 3),
    )


def grouped():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, groups=4),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


ROWS, IMAGES, SEQUENCES = draw(32, 12), draw(16, 1, 8, 8), draw(8, 6, 5)
EDGES = torch.randint(32, (2, 90), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(0))

NETWORKS = {
    "mlp": (lambda: MLP(12, (16, 14, 16), 4), ROWS),
    "mlp without norm": (lambda: MLP(12, (16, 14), 4, norm=False, activation=nn.ReLU), ROWS),
    "resnet20, layer norm": (lambda: ResNet20(in_channels=1), IMAGES),
    "resnet20, batch norm": (lambda: ResNet20(in_channels=1, norm="batch"), IMAGES),
    "convolutions": (conv_net, IMAGES),
    "grouped convolutions": (grouped, IMAGES),
    "transformer": (lambda: nn.Sequential(nn.Linear(5, 12), encoder(12, 3, 2), nn.Linear(12, 3)), SEQUENCES),
    "vit": (make_vit, IMAGES),
    "shared keys": (make_shared_keys, SEQUENCES),
    "gnn": (lambda: GNN(12, 4, 10), (ROWS, EDGES)),
    "language": (
        lambda: nn.Sequential(nn.Embedding(11, 8), encoder(8, 2), nn.Linear(8, 11)),
        TOKENS,
    ),
    "gru": (lambda: Net(recurrent, rnn=nn.GRU(5, 8, 2, batch_first=True), out=nn.Linear(8, 3)), SEQUENCES),
    "lstm": (lambda: Net(recurrent, rnn=nn.LSTM(5, 8, batch_first=True), out=nn.Linear(8, 3)), SEQUENCES),
    "rnn": (lambda: Net(recurrent, rnn=nn.RNN(5, 8, batch_first=True), out=nn.Linear(8, 3)), SEQUENCES),
    "square residual": (
        lambda: Net(residual, into=nn.Linear(12, 10), square=nn.Linear(10, 10), out=nn.Linear(10, 3)),
        ROWS,
    ),
}


def train(net, inputs, steps=20, seed=0):
    """Fit random targets, so that all parameters and running statistics move."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with torch.no_grad():
        target = torch.randn(call(net, inputs).shape, generator=generator)
    net.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(call(net, inputs), target).backward()
        optimizer.step()
    return net.eval()


@cache
def _trained(name, seed):
    factory, inputs = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = train(factory(), inputs, 6 if name.startswith("resnet") else 20, seed)
    return net, trace_permutations(net, inputs)


def trained(name, seed=0):
    """Return a trained network, its inputs and its symmetries."""
    net, spec = _trained(name, seed)
    return copy.deepcopy(net), NETWORKS[name][1], spec


def planted(net, spec, seed):
    """Return a random element of the group and the network after it."""
    element = spec.random(torch.Generator().manual_seed(seed))
    moved = copy.deepcopy(net)
    moved.load_state_dict(spec.apply(net.state_dict(), element))
    return element, moved


def assert_undone(spec, element, found):
    for name, permutation in spec.compose(element, found).items():
        assert torch.equal(permutation, torch.arange(len(permutation))), name


def similarity(a, b, spec, permutations=None):
    """The inner product of two state dicts, the second permuted, in float64."""
    moved = spec.apply(b, permutations or {})
    names = [name for name in spec.moved if not name.endswith(STATISTICS)]
    return sum(float((a[name].double() * moved[name].double()).sum()) for name in names)
