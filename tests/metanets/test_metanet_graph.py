"""The graph of a network: nodes, edges and what they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from metanet_cases import NETWORKS, randomise, setting
from torch import nn

from lightning_symmetry import MLP, ResNet, asymmetrize, factorize, trace_permutations
from lightning_symmetry.metanets import GraphMetanetwork, WeightGraph, WeightLayout, network_graph, weight_graph
from lightning_symmetry.metanets.graph_conv import WeightConv
from lightning_symmetry.surgery import plain_copy


@pytest.mark.parametrize("name", [*NETWORKS, "asymmetric"])
def test_every_weight_stands_at_one_place(name):
    _, spec, layout = setting(name)
    graph = weight_graph(layout, spec)
    entries = torch.cat([tensor.entries.flatten() for tensor in graph.tensors])
    assert torch.equal(entries.sort().values, torch.arange(layout.num_features))
    for tensor in graph.tensors:
        assert tensor.nodes.shape[1] == len(tensor.entries)
        assert int(tensor.nodes.max()) < graph.num_nodes
        assert len({tuple(node) for node in tensor.nodes.T.tolist()}) == len(tensor.entries)


def test_an_mlp_is_its_layers():
    """Each weight W[i, j] leads from unit j of one layer to unit i of the next; biases and norms stand on units."""
    _, spec, layout = setting("mlp")
    graph = weight_graph(layout, spec)
    assert graph.num_nodes == 5 + 4 + 3 + 2
    assert sorted(torch.bincount(graph.part).tolist()) == [2, 3, 4, 5]
    assert sorted(torch.bincount(graph.orbit).tolist()) == [1] * 7 + [3, 4]
    at = {tensor.name: tensor for tensor in graph.tensors}
    units = {0: at["linears.0.bias"].nodes[0], 1: at["linears.1.bias"].nodes[0], 2: at["linears.2.bias"].nodes[0]}
    for layer in range(3):
        weight = at[f"linears.{layer}.weight"]
        for entry, (source, target) in zip(weight.entries[:, 0].tolist(), weight.nodes.T.tolist(), strict=True):
            i, j = divmod(entry - layout.offsets[weight.name], layout.shapes[weight.name][1])
            assert target == units[layer][i]
            if layer > 0:
                assert source == units[layer - 1][j]
    assert torch.equal(at["norms.0.weight"].nodes[0], units[0])


def test_a_residual_stream_is_one_set_of_units():
    _, spec, layout = setting("resnet with layer norm")
    at = {tensor.name: tensor for tensor in weight_graph(layout, spec).tensors}
    stream = set(at["stem_norm.weight"].nodes[0].tolist())
    assert set(at["stage1.0.norm2.weight"].nodes[0].tolist()) == stream
    assert set(at["stage1.0.conv2.weight"].nodes[1].tolist()) == stream
    assert set(at["stage1.0.conv1.weight"].nodes[0].tolist()) == stream
    assert set(at["stage1.0.conv1.weight"].nodes[1].tolist()).isdisjoint(stream)
    assert at["stage1.0.conv1.weight"].entries.shape == (16 * 16, 9)


def test_kernels_and_flattened_images_are_features():
    _, spec, layout = setting("cnn with batch norm")
    graph = weight_graph(layout, spec)
    at = {tensor.name: tensor for tensor in graph.tensors}
    assert at["conv.weight"].entries.shape == (4 * 6, 9)
    assert at["hidden.weight"].entries.shape == (5 * 6, 9)
    assert set(at["hidden.weight"].nodes[0].tolist()) == set(at["conv.bias"].nodes[0].tolist())
    assert not at["depthwise.weight"].is_edge
    assert at["depthwise.weight"].entries.shape == (4, 9)
    assert graph.num_nodes == 4 + 6 + 5 + 1  # the one input channel has only the kernels that lead from it
    entry = layout.offsets["hidden.weight"] + 2 * 54 + 3 * 9 + 7  # output 2, channel 3, pixel 7
    edge, pixel = (at["hidden.weight"].entries == entry).nonzero()[0].tolist()
    assert pixel == 7
    source, target = at["hidden.weight"].nodes[:, edge]
    assert (source, target) == (at["conv.bias"].nodes[0, 3], at["hidden.bias"].nodes[0, 2])


def test_units_within_heads_are_alike_and_those_of_values_are_others():
    _, spec, layout = setting("attention")
    graph = weight_graph(layout, spec)
    at = {tensor.name: tensor for tensor in graph.tensors}
    values = graph.part[at["1.self_attn.out_proj.weight"].nodes[0]].unique()
    # Outputs, inputs, hidden units, the residual stream; queries with keys and values, two in each of two heads.
    assert sorted(torch.bincount(graph.part).tolist()) == [2, 3, 4, 4, 4, 5]
    assert sorted(torch.bincount(graph.orbit).tolist()) == [1] * 5 + [4, 4, 4, 5]
    assert len(values) == 1
    assert torch.bincount(graph.part)[values].tolist() == [4]


def test_queries_and_keys_of_a_joint_projection_are_told_apart():
    """They are permuted together and share their units, but are sections with embeddings of their own."""
    _, spec, layout = setting("attention")
    sections = [t for t in weight_graph(layout, spec).tensors if t.name == "1.self_attn.in_proj_bias"]
    places = [sorted((t.entries - layout.offsets[t.name]).flatten().tolist()) for t in sections]
    assert places == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    nodes = [dict(zip(t.entries[:, 0].tolist(), t.nodes[0].tolist(), strict=True)) for t in sections]
    first = layout.offsets["1.self_attn.in_proj_bias"]
    assert [nodes[0][first + i] for i in range(4)] == [nodes[1][first + 4 + i] for i in range(4)]
    assert len(set(nodes[0].values())) == 8


def test_units_of_an_asymmetric_network_are_told_apart_and_fixed_entries_flagged():
    net, spec, layout = setting("asymmetric")
    graph = weight_graph(layout, spec)
    assert len(graph.orbit.unique()) == graph.num_nodes == 5 + 4 + 4 + 2
    assert sorted(torch.bincount(graph.part).tolist()) == [2, 4, 4, 5]
    at = {tensor.name: tensor for tensor in graph.tensors}
    free = net.linears[1].trainable_entries().flatten()
    order = at["linears.1.weight"].entries[:, 0] - layout.offsets["linears.1.weight"]
    assert torch.equal(at["linears.1.weight"].fixed[:, 0], ~free[order])
    assert at["linears.1.bias"].fixed is None
    metanet = GraphMetanetwork(layout, graph, hidden=4)
    metanet(torch.randn(2, layout.num_features)).sum().backward()
    flags = [entries.flag for entries in metanet.on_edges if entries.flag is not None]
    assert len(flags) == 3
    assert all(bool(flag.weight.grad.any()) for flag in flags)


def test_weights_and_constants_are_standardised_apart():
    net, spec, layout = setting("asymmetric")
    rows = torch.stack([layout.flatten(randomise(net, seed).state_dict()) for seed in range(9)])
    rows[:, layout.fixed] *= 100
    metanet = GraphMetanetwork(layout, spec, hidden=4).fit_normalization(rows)
    values = metanet.normalization(rows).double().numpy()
    for tensor in range(len(layout.names)):
        for fixed in (False, True):
            part = values[:, ((layout.tensor_of == tensor) & (layout.fixed == fixed)).numpy()]
            if part.size:
                np.testing.assert_allclose([part.mean(), part.std()], [0, 1], atol=1e-5)


ASYMMETRIC = {
    "w": lambda net: asymmetrize(net, "w", n_fix=2, kappa=1.0, layout="filters", skip=["stem", "stage3*"]),
    "sigma": lambda net: asymmetrize(net, "sigma", scale=0.1),
}


@pytest.mark.parametrize("method", ASYMMETRIC)
def test_an_asymmetric_residual_network_has_the_graph_of_the_plain_one(method):
    plain, net = ResNet(1, "layer"), ASYMMETRIC[method](ResNet(1, "layer"))
    ours, theirs = network_graph(plain), network_graph(net)
    tensors = {tensor.name: tensor for tensor in theirs.tensors}
    for tensor in ours.tensors:
        assert torch.equal(tensor.nodes, tensors[tensor.name].nodes)
    assert torch.equal(ours.part, theirs.part)
    if method == "w":  # the layout too says where constants are
        same = weight_graph(WeightLayout.of(net), trace_permutations(plain_copy(net)))
        assert torch.equal(same.orbit, theirs.orbit)
    inside = ours.part == ours.part[tensors["stage3.0.norm1.weight"].nodes[0, 0]]
    alike = torch.bincount(theirs.orbit)[theirs.orbit] > 1
    assert torch.equal(alike, inside if method == "w" else torch.zeros_like(inside))
    assert (method == "w") == any(t.fixed is not None and t.entries.shape[1] == 9 for t in theirs.tensors)


def shuffled(graph: WeightGraph, generator: torch.Generator) -> WeightGraph:
    """Number the nodes otherwise, and list the edges of each tensor in another order."""
    new = torch.randperm(graph.num_nodes, generator=generator)
    tensors = []
    for tensor in graph.tensors:
        order = torch.randperm(len(tensor.entries), generator=generator)
        fixed = None if tensor.fixed is None else tensor.fixed[order]
        moved = {"entries": tensor.entries[order], "nodes": new[tensor.nodes[:, order]], "fixed": fixed}
        tensors.append(dataclasses.replace(tensor, **moved))
    old = torch.argsort(new)
    return dataclasses.replace(graph, orbit=graph.orbit[old], part=graph.part[old], tensors=tuple(tensors))


@pytest.mark.parametrize("name", ["mlp", "cnn with batch norm", "attention", "asymmetric"])
def test_the_order_of_nodes_and_edges_does_not_matter(name):
    net, spec, layout = setting(name)
    graph = weight_graph(layout, spec)
    one = GraphMetanetwork(layout, graph, hidden=8).double()
    other = GraphMetanetwork(layout, shuffled(graph, torch.Generator().manual_seed(0)), hidden=8).double()
    other.load_state_dict(one.state_dict())
    rows = torch.stack([layout.flatten(randomise(net, seed).state_dict()) for seed in range(2)]).double()
    torch.testing.assert_close(other(rows), one(rows), rtol=0, atol=1e-12)


def test_a_layer_is_its_equation():
    torch.manual_seed(0)
    layer = WeightConv(3).double()
    nodes, edges = torch.randn(2, 4, 3).double(), torch.randn(2, 3, 3).double()
    index = torch.tensor([[0, 2, 3], [1, 1, 0]])
    found_nodes, found_edges = layer(nodes, edges, index)
    seen = layer.node_norm(nodes)
    to_ends, values = layer.ends(seen), layer.values(seen)
    messages = {(node, way): [] for node in range(4) for way in range(2)}
    for k, (j, i) in enumerate(index.T.tolist()):
        joined = layer.edge(layer.edge_norm(edges[:, k])) + to_ends[:, j, :3] + to_ends[:, i, 3:]
        edge = edges[:, k] + layer.edge_out(joined.relu())
        torch.testing.assert_close(found_edges[:, k], edge, rtol=1e-12, atol=1e-12)
        messages[i, 0].append(layer.edge_norm(edge) * values[:, j, :3])
        messages[j, 1].append(layer.edge_norm(edge) * values[:, i, 3:])
    for node in range(4):
        received = [
            torch.stack(messages[node, way]).mean(0) if messages[node, way] else torch.zeros(2, 3).double()
            for way in range(2)
        ]
        update = layer.node_out(layer.node(torch.cat([seen[:, node], *received], dim=-1)).relu())
        torch.testing.assert_close(found_nodes[:, node], nodes[:, node] + update, rtol=1e-12, atol=1e-12)


def test_every_weight_has_an_influence():
    net, spec, layout = setting("cnn with batch norm")
    rows = layout.flatten(randomise(net, 0).state_dict()).unsqueeze(0).double().requires_grad_()
    GraphMetanetwork(layout, spec, hidden=8).double()(rows).sum().backward()
    assert bool((rows.grad != 0).all())


class Product(nn.Module):
    """Has a weight with three axes that are permuted."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(6, 2)
        self.weight = nn.Parameter(torch.randn(6, 4, 5))

    def forward(self, x):
        return self.out(torch.einsum("oij,bi,bj->bo", self.weight, self.left(x).relu(), self.right(x).relu()).relu())


class Scaled(nn.Module):
    """Has a parameter that is a single number, and one that is not in its layout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(self.up(x).relu() * self.scale)


def test_scalars_and_partial_layouts():
    net = Scaled()
    spec = trace_permutations(net, torch.zeros(1, 3))
    layout = WeightLayout({"scale": (), "up.weight": (4, 3)})
    graph = weight_graph(layout, spec)
    assert graph.num_nodes == 1 + 4 + 3
    assert GraphMetanetwork(layout, graph, hidden=4)(torch.randn(2, 13)).shape == (2,)
    only_nodes = WeightLayout({"up.bias": (4,)})
    assert GraphMetanetwork(only_nodes, spec, hidden=4)(torch.randn(2, 4)).shape == (2,)


def test_from_network_traces_it():
    net = Scaled()
    metanet = GraphMetanetwork.from_network(net, torch.zeros(1, 3), hidden=4, outputs=2)
    assert metanet(torch.randn(5, metanet.layout.num_features)).shape == (5, 2)


def test_layers_in_other_coordinates_are_refused():
    net = factorize(MLP(8, (8,), 2), rank=2)
    with pytest.raises(ValueError, match="no such tensor"):
        network_graph(net)


def test_errors():
    _, spec, layout = setting("mlp")
    with pytest.raises(ValueError, match="no such tensor"):
        weight_graph({"other": (3,)}, spec)
    with pytest.raises(ValueError, match=r"of shape \(4, 4\), but the traced network has \(4, 5\)"):
        weight_graph({"linears.0.weight": (4, 4)}, spec)
    with pytest.raises(ValueError, match="`hidden` and `layers`"):
        GraphMetanetwork(layout, spec, layers=0)
    graph = weight_graph(layout, spec)
    for shapes in ({**layout.shapes, "linears.2.bias": (3,)}, {**layout.shapes, "more": (3,)}):
        with pytest.raises(ValueError, match=r"graph is of networks that have .* where the layout has .*(bias|more)"):
            GraphMetanetwork(shapes, graph)
    with pytest.raises(ValueError, match="3 axes of weight are permuted"):
        network_graph(Product(), torch.zeros(2, 3))
