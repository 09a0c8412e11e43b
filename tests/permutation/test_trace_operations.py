"""Views, writes in place, looking up, sorting and shifting: what keeps the order free, and what does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trace_reference import EXACT, Net, assert_symmetric, largest_deviation, normal, parameter, randomise, sizes

from lightning_symmetry.permutation.spec import trace_permutations

rows = normal(5, 3)
graph = normal(7, 3), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 3]])


def hidden(middle, width=6, after=None, **parts):
    """Return linear, ``middle(net, hidden)``, linear."""
    return lambda: Net(
        lambda net, x: net.b(middle(net, net.a(x))), a=nn.Linear(3, width), b=nn.Linear(after or width, 2), **parts
    )


def added_in_place(net, x):
    x = x.clone()
    x[:, :2] += net.c(rows)
    return x


def zero_column(net, x):
    x[:, 0] = 0
    return x


def rectified_part(net, x):
    first, _ = x.chunk(2, 1)
    first.relu_()
    return x


def written_rows(net, x):
    made = torch.zeros(5, 6, dtype=x.dtype)
    made[:, :4] = x[:, 2:]
    made[:, 4:].copy_(x[:, :2])
    return made


def product_into(net, x):
    made = torch.empty(5, 6, dtype=x.dtype)
    torch.mm(x, net.m, out=made)
    return made


def gram(net, x):
    return (x.unsqueeze(2) @ x.unsqueeze(1)).flatten(1)


def gram_upper(net, x):
    i, j = torch.triu_indices(6, 6)
    return (x.unsqueeze(2) * x.unsqueeze(1))[:, i, j]


def masked_columns(net, x):
    return x * torch.arange(6).lt(4)


def negative_to_zero(net, x):
    x[x < 0] = 0.1
    return x


def sliding(net, x):
    return x.unfold(1, 2, 2).flatten(1)


def through_a_list(net, x):
    return torch.stack(list(reversed(x.unbind(1))), 1)


OPERATIONS = {
    "part added in place": (hidden(added_in_place, c=nn.Linear(3, 2)), rows, [2, 4]),
    "column set": (hidden(zero_column), rows, [5]),
    "part rectified in place": (hidden(rectified_part), rows, [3, 3]),
    "parts swapped in a new tensor": (hidden(written_rows), rows, [2, 4]),
    "product into a tensor": (hidden(product_into, m=parameter(6, 6)), rows, [6, 6]),
    "parameters of (C, 1)": (hidden(lambda net, x: (x[..., None] * net.g).flatten(1), g=parameter(6, 1)), rows, [6]),
    "parameters of (C, 2)": (
        hidden(lambda net, x: (x[..., None] * net.g).flatten(1), g=parameter(6, 2), after=12),
        rows,
        [2, 6],
    ),
    "raw product": (
        hidden(lambda net, x: (x @ net.m).relu(), g=parameter(6), m=parameter(6, 4), after=4),
        rows,
        [4, 6],
    ),
    "chunks": (hidden(lambda net, x: torch.mul(*x.chunk(2, -1)), 12, 6), rows, [6]),
    "every second": (hidden(lambda net, x: x[:, ::2] * x[:, 1::2], 12, 6), rows, [6]),
    "every second of an odd number": (hidden(lambda net, x: x[:, ::2], 5, 3), rows, []),
    "GEGLU": (hidden(lambda net, x: x[:, :6] * F.gelu(x[:, 6:]), 12, 6), rows, [6]),
    "first half": (hidden(lambda net, x: x.narrow(1, 0, 3).relu(), 6, 3), rows, [3, 3]),
    "mean": (hidden(lambda net, x: x - x.mean(1, keepdim=True)), rows, [6]),
    "variance": (hidden(lambda net, x: x / (1 + x.var(1, keepdim=True))), rows, [6]),
    "maximum": (hidden(lambda net, x: x / (1 + x.amax(1, keepdim=True).abs())), rows, [6]),
    "maximum with its place": (hidden(lambda net, x: x + x.max(1, keepdim=True)[0]), rows, []),
    "norms": (hidden(lambda net, x: x / (1 + x.norm(dim=1, keepdim=True) + x.norm())), rows, [6]),
    "log-sum-exp": (hidden(lambda net, x: x - x.logsumexp(1, keepdim=True)), rows, [6]),
    "softmax": (hidden(lambda net, x: x.softmax(1)), rows, [6]),
    "product of all": (hidden(lambda net, x: x + x.prod(1, keepdim=True)), rows, [6]),
    "argmax": (hidden(lambda net, x: x * x.argmax(1, keepdim=True)), rows, []),
    "top k": (hidden(lambda net, x: x.topk(3, 1)[0], 6, 3), rows, []),
    "sort": (hidden(lambda net, x: x.sort(1)[0]), rows, []),
    "cumulative sum": (hidden(lambda net, x: x.cumsum(1)), rows, []),
    "cumulative sum of each head": (hidden(lambda net, x: x.view(5, 3, 2).cumsum(2).flatten(1)), rows, [3]),
    "largest of each head": (hidden(lambda net, x: x.view(5, 3, 2).sort(2)[0].flatten(1)), rows, [3]),
    "looked up": (hidden(lambda net, x: x[:, net.p], buffers=()), rows, []),
    "flip": (hidden(lambda net, x: x.flip(1)), rows, []),
    "flip of each head": (hidden(lambda net, x: x.view(5, 3, 2).flip(2).flatten(1)), rows, [3]),
    "flip of the heads": (hidden(lambda net, x: x.view(5, 3, 2).flip(1).flatten(1)), rows, [2]),
    "softmax over heads": (hidden(lambda net, x: x.view(5, 3, 2).softmax(1).flatten(1)), rows, [2, 3]),
    "norm over heads": (hidden(lambda net, x: F.layer_norm(x.view(5, 3, 2).mT, (3,)).flatten(1)), rows, [2, 3]),
    "norm of each head": (hidden(lambda net, x: F.layer_norm(x.view(5, 3, 2), (2,)).flatten(1)), rows, [2, 2, 2, 3]),
    "batch norm of heads": (
        hidden(
            lambda net, x: F.batch_norm(x.view(5, 3, 2), None, None, net.g, training=True).flatten(1), g=parameter(3)
        ),
        rows,
        [2, 2, 2, 3],
    ),
    "largest of the heads": (hidden(lambda net, x: x.view(5, 3, 2).amax(1), 6, 2), rows, [2, 3]),
    "one head": (hidden(lambda net, x: x.view(5, 3, 2)[:, 1], 6, 2), rows, [2, 2, 2]),
    "heads in a loop": (
        hidden(lambda net, x: torch.stack([h.relu() for h in x.view(5, 3, 2).unbind(1)], 1).flatten(1)),
        rows,
        [2, 2, 2],
    ),
    "roll": (hidden(lambda net, x: x.roll(1, 1)), rows, []),
    "roll of all": (hidden(lambda net, x: x.roll(1)), rows, []),
    "reversed by unbind": (hidden(through_a_list), rows, []),
    "sliding windows": (hidden(sliding), rows, []),
    "outer product": (hidden(lambda net, x: gram(net, x), 6, 36), rows, [6]),
    "upper triangle": (hidden(gram_upper, 6, 21), rows, []),
    "triu": (hidden(lambda net, x: (x[:, :, None] * x[:, None]).triu().flatten(1), 6, 36), rows, []),
    "trace of a product": (
        hidden(lambda net, x: x * (net.m.T @ x.T @ x).trace(), m=parameter(6, 6)),
        rows,
        [6],
    ),
    "diagonal": (hidden(lambda net, x: x * torch.diagonal(net.m), m=parameter(6, 6)), rows, [6]),
    "shifted diagonal": (hidden(lambda net, x: x[:, 1:] * net.m.diagonal(1), 6, 5, m=parameter(6, 6)), rows, []),
    "diagonal matrix": (hidden(lambda net, x: x @ torch.diag_embed(net.g), g=parameter(6)), rows, [6]),
    "quadratic form": (hidden(lambda net, x: x * ((x @ net.m) * x).sum(1, True), m=parameter(6, 6)), rows, [6]),
    "columns masked": (hidden(masked_columns), rows, []),
    "entries set by a mask": (hidden(negative_to_zero), rows, [6]),
    "rows set by a mask": (
        hidden(lambda net, x: x.index_put((torch.arange(5) > 2,), net.g), g=parameter(6)),
        rows,
        [6],
    ),
    "rows set by numbers": (
        hidden(lambda net, x: x.index_put((torch.tensor([0, 2]),), net.g, accumulate=True), g=parameter(2, 6)),
        rows,
        [6],
    ),
    "rows of a mask": (hidden(lambda net, x: x[torch.arange(5) > 2]), rows, [6]),
    "columns of a mask": (hidden(lambda net, x: x[:, torch.arange(6) > 2], 6, 3), rows, []),
    "gather": (hidden(lambda net, x: x.gather(1, torch.arange(6).flip(0).expand(5, 6))), rows, []),
    "gather of rows": (hidden(lambda net, x: x.gather(0, torch.tensor([[1], [0]]).expand(2, 6))), rows, [6]),
    "scatter of rows": (
        hidden(lambda net, x: torch.zeros_like(x).scatter_add(0, torch.tensor([[1], [0]]).expand(2, 6), x)),
        rows,
        [6],
    ),
    "where": (hidden(lambda net, x: torch.where(x > net.g, x, net.g), g=parameter(6)), rows, [6]),
    "addcmul and lerp": (hidden(lambda net, x: torch.lerp(x, x.addcmul(x, net.g), 0.3), g=parameter(6)), rows, [6]),
    "clamped by a parameter": (hidden(lambda net, x: torch.minimum(x, net.g), g=parameter(6)), rows, [6]),
    "stacked and summed": (hidden(lambda net, x: torch.stack([x, x.relu(), -x], 0).prod(0)), rows, [6]),
    "repeated": (hidden(lambda net, x: x.repeat(1, 2), 6, 12), rows, [2, 6]),
    "repeated entries": (hidden(lambda net, x: x.repeat_interleave(2, 1), 6, 12), rows, [2] * 6 + [6]),
    "tiled parameters": (hidden(lambda net, x: x * net.g.repeat(3), g=parameter(2)), rows, [2, 3]),
    "reshaped across": (hidden(lambda net, x: x.view(5, 2, 3).transpose(1, 2).flatten(1)), rows, [2, 3]),
    "Fourier": (hidden(lambda net, x: torch.fft.fft(x, dim=1).real), rows, []),
    "Fourier of the rows": (hidden(lambda net, x: torch.fft.fft(x, dim=0).real), rows, [6]),
    "Fourier of each head": (hidden(lambda net, x: torch.fft.rfft(x.view(5, 3, 2)).abs().flatten(1)), rows, [3]),
    "complex": (hidden(lambda net, x: torch.complex(x, x.sin()).abs()), rows, [6]),
    "dropout that is left on": (hidden(lambda net, x: F.dropout(x, 0.5, training=True)), rows, []),
    "low precision within": (hidden(lambda net, x: x.float().double()), rows, [6]),
    "data": (hidden(lambda net, x: x.data.detach() * net.g.data, g=parameter(6)), rows, [6]),
    "vmap": (hidden(lambda net, x: torch.vmap(lambda r: r * net.g)(x), g=parameter(6)), rows, [6]),
    "channels that are padded": (hidden(lambda net, x: F.pad(x, (1, 2), value=0.3), 6, 9), rows, [2, 6]),
    "channels that are cut": (hidden(lambda net, x: F.pad(x, (-1, -2)), 6, 3), rows, [2, 3]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_output_and_what_is_free(name):
    factory, inputs, expected = OPERATIONS[name]
    net = factory().double()
    if name == "looked up":
        net.register_buffer("p", torch.tensor([1, 0, 2, 5, 4, 3]))
    tolerance = 1e-6 if name == "low precision within" else EXACT
    torch.manual_seed(0)
    spec = assert_symmetric(net, inputs, tolerance, elements=0 if "dropout" in name else 3)
    assert sizes(spec) == expected, spec.report()


def test_a_free_order_is_free_and_a_frozen_one_matters():
    """Swapping units by hand where the trace froze them changes the output: it is not frozen for nothing."""
    for name in ("cumulative sum", "sort", "flip", "roll", "argmax", "upper triangle", "Fourier", "columns masked"):
        net = randomise(OPERATIONS[name][0]().double())
        free = randomise(OPERATIONS["softmax"][0]().double())
        spec = trace_permutations(free, rows)
        element = {"a": torch.tensor([4, 0, 1, 3, 2, 5])}
        assert largest_deviation(free, rows, spec, element) < EXACT
        before = net(rows)
        with torch.no_grad():
            net.a.weight.copy_(net.a.weight[element["a"]])
            net.a.bias.copy_(net.a.bias[element["a"]])
            if net.b.weight.shape[1] == 6:
                net.b.weight.copy_(net.b.weight[:, element["a"]])
        assert not torch.allclose(net(rows), before, rtol=1e-3), name


def convolved(kind, *args, **kwargs):
    import torch_geometric.nn

    def build():
        layer = getattr(torch_geometric.nn, kind)
        return Net(
            lambda net, x, edges: net.last(F.relu(net.norm(net.first(x, edges))), edges),
            first=layer(3, *args, **kwargs),
            norm=nn.BatchNorm1d(6),
            last=layer(6, 2),
        )

    return build


def gin():
    from torch_geometric.nn import GINConv

    first, last = (nn.Sequential(nn.Linear(n, 6), nn.ReLU(), nn.Linear(6, m)) for n, m in ((3, 5), (5, 2)))
    return Net(
        lambda net, x, edges: net.last(F.relu(net.first(x, edges)), edges),
        first=GINConv(first, train_eps=True),
        last=GINConv(last),
    )


def simple():
    from torch_geometric.nn import SimpleConv, global_mean_pool

    return Net(
        lambda net, x, edges: net.b(global_mean_pool(net.conv(net.a(x), edges), None)),
        a=nn.Linear(3, 6),
        conv=SimpleConv("mean"),
        b=nn.Linear(6, 2),
    )


GRAPHS = {
    "SAGEConv": (convolved("SAGEConv", 6), [6]),
    "SAGEConv, maximum": (convolved("SAGEConv", 6, aggr="max"), [6]),
    "GCNConv": (convolved("GCNConv", 6), [6]),
    "GATConv": (convolved("GATConv", 2, heads=3), [2, 3]),  # its attention vectors are one parameter for all heads
    "GATv2Conv": (convolved("GATv2Conv", 2, heads=3), [2, 3]),
    "TransformerConv": (convolved("TransformerConv", 2, heads=3), [*7 * [2], 3]),
    "GINConv": (gin, [5, 6, 6]),
    "SimpleConv": (simple, [6]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_networks(name):
    factory, expected = GRAPHS[name]
    spec = assert_symmetric(factory().double(), graph)
    assert sizes(spec) == expected, spec.report()
