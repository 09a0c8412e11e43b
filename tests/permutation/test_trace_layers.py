"""Layers of all kinds in small networks: their symmetries hold, and none is missed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trace_reference import ROUNDING, Net, assert_symmetric, normal, parameter, sizes

C1, C2, C3 = nn.Conv1d, nn.Conv2d, nn.Conv3d
image, sound, rows = normal(2, 3, 8, 8), normal(2, 3, 12), normal(5, 3)


def seq(*layers):
    return nn.Sequential(*layers)


def head(channels):
    return seq(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))


def residual_padded(net, x):
    x = net.stem(x)
    skip = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))  # the shortcut of option A
    return net.head(F.relu(net.block(x) + skip))


def unet(net, x):
    a = F.relu(net.down1(x))
    b = F.relu(net.down2(F.max_pool2d(a, 2)))
    return net.out(torch.cat([F.interpolate(b, scale_factor=2, mode="bilinear"), a], 1))


def squeeze_excite(net, x):
    x = net.conv(x)
    return net.head(x * torch.sigmoid(net.up(F.relu(net.down(x.mean((2, 3)))))).unsqueeze(-1).unsqueeze(-1))


def shuffle(net, x):
    x = net.first(x)
    n, c, h, w = x.shape
    return net.head(net.second(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)))


def mixer(net, x):
    x = net.embed(x)
    x = x + net.tokens(x.transpose(1, 2)).transpose(1, 2)
    return net.out((x + net.channels(x)).mean(1))


def dense(net, x):
    for layer in net.layers:
        x = torch.cat([x, F.relu(layer(x))], 1)
    return net.head(x)


def recurrent(net, x):
    out, state = net.rnn(x)
    return net.out(out), net.last((state[0] if isinstance(state, tuple) else state)[-1])


def rnn(kind, hidden=4, directions=1, **kwargs):
    layer = kind(3, hidden, batch_first=True, bidirectional=directions == 2, **kwargs)
    width = kwargs.get("proj_size", hidden)
    return Net(recurrent, rnn=layer, out=nn.Linear(width * directions, 2), last=nn.Linear(width, 2))


def shared(net, x):
    return net.out(F.relu(net.square(F.relu(net.square(net.into(x))))))


def tied(net, x):
    return F.linear(F.linear(F.relu(net.a(x)), net.b.weight).relu(), net.b.weight.T) @ net.a.weight


def weight_normed():
    return seq(nn.utils.parametrizations.weight_norm(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 2))


def spectral_normed():
    net = seq(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 2))
    net.eval()
    return net


LAYERS = {
    "linear": (lambda: seq(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), rows, [5, 6]),
    "identity layer": (lambda: seq(nn.Linear(3, 6), nn.Identity(), nn.Linear(6, 2)), rows, [6]),
    "conv": (lambda: seq(C2(3, 6, 3), nn.ReLU(), C2(6, 5, 3, dilation=2), head(5)), image, [5, 6]),
    "conv1d": (lambda: seq(C1(3, 6, 3), nn.ReLU(), C1(6, 5, 3, stride=2), nn.ReLU(), C1(5, 2, 1)), sound, [5, 6]),
    "conv3d": (lambda: seq(C3(3, 6, 3, padding=1), nn.GELU(), C3(6, 2, 1)), normal(1, 3, 4, 4, 4), [6]),
    "conv circular": (lambda: seq(C2(3, 6, 3, padding=1, padding_mode="circular"), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "conv reflect": (lambda: seq(C2(3, 6, 3, padding=1, padding_mode="reflect"), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "conv unbatched": (lambda: seq(C2(3, 6, 3), nn.ReLU(), C2(6, 2, 3)), image[0], [6]),
    "depthwise": (lambda: seq(C2(3, 6, 1), C2(6, 6, 3, groups=6), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "depthwise twice": (
        lambda: seq(C2(3, 6, 1), C2(6, 12, 3, groups=6), nn.ReLU(), C2(12, 2, 1)),
        image,
        [2] * 6 + [6],
    ),
    "grouped": (lambda: seq(C2(3, 6, 1), C2(6, 8, 3, groups=2), nn.ReLU(), C2(8, 2, 1)), image, [2, 3, 4, 4]),
    "transposed": (lambda: seq(nn.ConvTranspose2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 2, 2)), image, [6]),
    "transposed grouped": (
        lambda: seq(C2(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.ReLU(), C2(6, 2, 1)),
        image,
        [2, 2, 2, 3],
    ),
    "batch norm": (lambda: seq(C2(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "batch norm of rows": (lambda: seq(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), rows, [6]),
    "batch statistics": (
        lambda: seq(C2(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU(), C2(6, 2, 1)),
        image,
        [6],
    ),
    "group norm": (lambda: seq(C2(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), C2(6, 2, 1)), image, [2, 3, 3]),
    "instance norm": (lambda: seq(C2(3, 6, 3), nn.InstanceNorm2d(6, True), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "instance norm, running": (
        lambda: seq(C2(3, 6, 3), nn.InstanceNorm2d(6, True, track_running_stats=True), nn.ReLU(), C2(6, 2, 1)),
        image,
        [6],
    ),
    "layer norm": (lambda: seq(nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)), rows, [6]),
    "layer norm of images": (lambda: seq(C2(3, 6, 3), nn.LayerNorm([6, 6, 6]), C2(6, 2, 1)), image, [6]),
    "RMS norm": (lambda: seq(nn.Linear(3, 6), nn.RMSNorm(6), nn.GELU(), nn.Linear(6, 2)), rows, [6]),
    "local response norm": (lambda: seq(C2(3, 6, 3), nn.LocalResponseNorm(3), C2(6, 2, 1)), image, []),
    "PReLU": (lambda: seq(C2(3, 6, 3), nn.PReLU(6), C2(6, 2, 1)), image, [6]),
    "PReLU of one": (lambda: seq(nn.Linear(3, 6), nn.PReLU(), nn.Linear(6, 2)), rows, [6]),
    "GLU": (lambda: seq(nn.Linear(3, 12), nn.GLU(), nn.Linear(6, 2)), rows, [6]),
    "softmax within": (lambda: seq(nn.Linear(3, 6), nn.Softmax(-1), nn.Linear(6, 2)), rows, [6]),
    "log softmax within": (lambda: seq(nn.Linear(3, 6), nn.LogSoftmax(-1), nn.Linear(6, 2)), rows, [6]),
    "Softmax2d": (lambda: seq(C2(3, 6, 3), nn.Softmax2d(), C2(6, 2, 1)), image, [6]),
    "flatten": (
        lambda: seq(C2(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5), nn.ReLU(), nn.Linear(5, 2)),
        image,
        [5, 6],
    ),
    "pooling": (
        lambda: seq(C2(3, 6, 3), nn.MaxPool2d(2), C2(6, 5, 1), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(1), C2(5, 2, 1)),
        image,
        [5, 6],
    ),
    "upsampling": (lambda: seq(C2(3, 6, 3), nn.Upsample(scale_factor=2), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "pixel shuffle": (lambda: seq(C2(3, 24, 3), nn.PixelShuffle(2), nn.ReLU(), C2(6, 2, 1)), image, [6]),
    "pixel unshuffle": (lambda: seq(C2(3, 6, 3), nn.PixelUnshuffle(2), nn.ReLU(), C2(24, 2, 1)), image, [6]),
    "nn.ChannelShuffle": (lambda: seq(C2(3, 6, 1), nn.ChannelShuffle(2), nn.ReLU(), C2(6, 2, 1)), image, [2, 3]),
    "channel shuffle": (
        lambda: Net(shuffle, first=C2(3, 8, 1, groups=1), second=C2(8, 8, 3, groups=4), head=head(8)),
        image,
        [2, 2, 2, 2, 2, 4],
    ),
    "unfold": (
        lambda: seq(C2(3, 6, 1), nn.ReLU(), nn.Unfold(2, stride=2), C1(24, 5, 1), nn.ReLU(), C1(5, 2, 1)),
        image,
        [5, 6],
    ),
    "fold": (lambda: seq(C1(3, 24, 1), nn.Fold(8, 2, stride=2), nn.ReLU(), C2(6, 2, 1)), normal(2, 3, 16), [6]),
    "padded residual": (
        lambda: Net(
            residual_padded,
            stem=C2(3, 4, 3, padding=1),
            block=seq(C2(4, 5, 3, 2, 1), nn.BatchNorm2d(5), nn.ReLU(), C2(5, 8, 3, 1, 1)),
            head=head(8),
        ),
        image,
        [2, 2, 4, 5],
    ),
    "skips of a U-Net": (
        lambda: Net(unet, down1=C2(3, 4, 3, padding=1), down2=C2(4, 5, 3, padding=1), out=C2(9, 2, 1)),
        image,
        [4, 5],
    ),
    "squeeze and excitation": (
        lambda: Net(squeeze_excite, conv=C2(3, 6, 3), down=nn.Linear(6, 4), up=nn.Linear(4, 6), head=head(6)),
        image,
        [4, 6],
    ),
    "MLP-Mixer": (
        lambda: Net(
            mixer,
            embed=nn.Linear(3, 6),
            tokens=seq(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 7)),
            channels=seq(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)),
            out=nn.Linear(6, 2),
        ),
        normal(2, 7, 3),
        [5, 6, 8],
    ),
    "mixing of hidden tokens": (
        lambda: Net(
            lambda net, x: net.out(F.relu(net.channels(F.gelu(net.tokens(x)).transpose(1, 2)).sum(1))),
            tokens=C1(7, 5, 1),
            channels=C1(3, 4, 1),
            out=nn.Linear(5, 2),
        ),
        normal(2, 7, 3),
        [4, 5],
    ),
    "dense connections": (
        lambda: Net(dense, layers=nn.ModuleList(C2(3 + 4 * i, 4, 3, padding=1) for i in range(3)), head=head(15)),
        image,
        [4, 4, 4],
    ),
    "bilinear": (
        lambda: Net(
            lambda net, x: net.out(net.pair(F.relu(net.a(x)), F.relu(net.b(x)))),
            a=nn.Linear(3, 4),
            b=nn.Linear(3, 5),
            pair=nn.Bilinear(4, 5, 6),
            out=nn.Linear(6, 2),
        ),
        rows,
        [4, 5, 6],
    ),
    "RNN": (lambda: rnn(nn.RNN), normal(2, 5, 3), [4]),
    "LSTM": (lambda: rnn(nn.LSTM), normal(2, 5, 3), [4]),
    "LSTM, two layers": (lambda: rnn(nn.LSTM, num_layers=2), normal(2, 5, 3), [4, 4]),
    "LSTM, both directions": (lambda: rnn(nn.LSTM, directions=2, num_layers=2), normal(2, 5, 3), [4] * 4),
    "LSTM with projection": (lambda: rnn(nn.LSTM, proj_size=3), normal(2, 5, 3), [3, 4]),
    "GRU": (lambda: rnn(nn.GRU, num_layers=2), normal(2, 5, 3), [4, 4]),
    "cells": (
        lambda: Net(
            lambda net, x: net.out(net.gru(x, net.lstm(x)[0])),
            lstm=nn.LSTMCell(3, 4),
            gru=nn.GRUCell(3, 4),
            out=nn.Linear(4, 2),
        ),
        rows,
        [4],
    ),
    "embedding": (
        lambda: seq(nn.Embedding(9, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
        torch.arange(8),
        [5, 6],
    ),
    "embedding bag": (lambda: seq(nn.EmbeddingBag(9, 6), nn.Linear(6, 2)), torch.arange(8).view(2, 4), [6]),
    "tied head": (
        lambda: Net(
            lambda net, i: F.linear(net.norm(net.embed(i) + net.mlp(net.embed(i))), net.embed.weight),
            embed=nn.Embedding(9, 6),
            norm=nn.LayerNorm(6),
            mlp=seq(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)),
        ),
        torch.arange(8),
        [5, 6],
    ),
    "layer called twice": (
        lambda: Net(shared, into=nn.Linear(3, 6), square=nn.Linear(6, 6), out=nn.Linear(6, 2)),
        rows,
        [6],
    ),
    "tied weights": (lambda: Net(tied, a=nn.Linear(3, 6), b=nn.Linear(6, 4, bias=False)), rows, [4, 6]),
    "weight norm": (weight_normed, rows, [6]),
    "spectral norm": (spectral_normed, rows, [6]),
    "cosine similarity": (
        lambda: Net(lambda net, x: F.cosine_similarity(net.a(x), net.b(x)), a=nn.Linear(3, 6), b=nn.Linear(3, 6)),
        rows,
        [6],
    ),
    "distances to prototypes": (
        lambda: Net(
            lambda net, x: torch.cdist(net.a(x), net.p) @ net.v, a=nn.Linear(3, 6), p=parameter(4, 6), v=parameter(4, 2)
        ),
        rows,
        [4, 6],
    ),
    "normalised features": (
        lambda: Net(lambda net, x: net.b(F.normalize(net.a(x), dim=-1)), a=nn.Linear(3, 6), b=nn.Linear(6, 2)),
        rows,
        [6],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_the_output_and_are_free(name):
    factory, inputs, expected = LAYERS[name]
    spec = assert_symmetric(factory().double(), inputs)
    assert sizes(spec) == expected, spec.report()
    assert not spec.frozen_by


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_in_float32(kind):
    """In single precision some run in one kernel, which shows nothing of its units."""
    spec = assert_symmetric(rnn(kind, num_layers=2), normal(2, 5, 3).float(), ROUNDING)
    assert sizes(spec) == [4, 4]
    assert not spec.frozen_by
