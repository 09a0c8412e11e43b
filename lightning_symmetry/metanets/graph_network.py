"""A graph metanetwork."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.metanetwork import Layout, Metanetwork, mean_by, perceptron
from lightning_symmetry.metanets.normalization import Normalization
from lightning_symmetry.metanets.weight_graph import TensorInGraph, WeightGraph, network_graph, weight_graph
from lightning_symmetry.metanets.weight_layout import WeightLayout
from lightning_symmetry.permutation.spec import PermutationSpec


class GraphMetanetwork(Metanetwork):
    r"""Message passing over the units and weights of a network.

    The graph (:class:`~lightning_symmetry.metanets.WeightGraph`) has a node for each unit and an edge for each weight
    or kernel. A linear map of each tensor embeds its entries on edges, :math:`e_{ij}`, or on nodes, :math:`v_i`, where
    an embedding of the unit's orbit is added. Each layer updates both,

    .. math::
        e_{ij} &\leftarrow e_{ij} + \mathrm{MLP}(e_{ij}, v_i, v_j), \\
        v_i &\leftarrow v_i + \mathrm{MLP}\bigl(v_i, \mathrm{mean}_j\, m_{ij}, \mathrm{mean}_j\, m'_{ij}\bigr), \qquad
        m_{ij} = e_{ij} \odot (B v_j + b)

    with messages along and against the direction of the weights. A perceptron reads the means of the nodes of each
    part: ``(B, P) -> (B, outputs)``. It is invariant to every traced permutation. Of asymmetric networks, whose units
    do not move, each unit has an embedding of its own, and edges say which of their entries are fixed. Standardised by
    the statistics of each tensor, of its constants apart from those of its other entries.

    Args:
        layout: What stands where in the flat vectors; fixed entries must hold the constants.
        graph: The graph, or the permutation symmetries from which it is built.
        hidden: Width of nodes and edges.
        layers: Number of layers.
        outputs: Number of outputs; None for one without an axis of its own.
        bounded: Whether outputs lie in [0, 1], by a sigmoid.

    Raises:
        ValueError: If the layout is not that of the graph or of the traced network, or a number is not positive.

    Source: Lim et al., Graph Metanetworks for Processing Diverse Neural Architectures (2024); Kofinas et al., Graph
    Neural Networks for Learning Equivariant Representations of Neural Networks (2024), for messages that edges modulate
    and in both directions.
    """

    def __init__(
        self,
        layout: Layout,
        graph: WeightGraph | PermutationSpec,
        hidden: int = 32,
        layers: int = 3,
        outputs: int | None = None,
        bounded: bool = False,
    ) -> None:
        from lightning_symmetry.metanets.graph_conv import WeightConv  # it imports torch-geometric

        super().__init__(layout, outputs, bounded)
        if hidden < 1 or layers < 1:
            raise ValueError(f"Expected `hidden` and `layers` to be at least 1 but got {hidden} and {layers}.")
        self.graph = graph if isinstance(graph, WeightGraph) else weight_graph(self.layout, graph)
        for ours, theirs in zip_longest(self.layout.shapes.items(), self.graph.layout.shapes.items()):
            if ours != theirs:
                raise ValueError(f"The graph is of networks that have {theirs} where the layout has {ours}.")
        # Constants are many times as large as weights, which would be lost beside them.
        kinds = 2 * self.layout.tensor_of + self.layout.fixed
        self.normalization = Normalization(kinds.unique(return_inverse=True)[1])
        self.on_edges = nn.ModuleList(_Entries(t, hidden) for t in self.graph.tensors if t.is_edge)
        self.on_nodes = nn.ModuleList(_Entries(t, hidden) for t in self.graph.tensors if not t.is_edge)
        self.orbits = nn.Embedding(int(self.graph.orbit.max()) + 1, hidden)
        self.layers = nn.ModuleList(WeightConv(hidden) for _ in range(layers))
        counts = torch.bincount(self.graph.part)
        readout = perceptron(hidden * len(counts), [64], outputs or 1)
        self.readout = nn.Sequential(nn.LayerNorm(hidden), nn.Flatten(), readout)
        for name, value in (
            ("edge_index", self.graph.edge_index),
            ("orbit", self.graph.orbit),
            ("part", self.graph.part),
            ("part_sizes", counts),
        ):
            self.register_buffer(name, value, persistent=False)

    @classmethod
    def from_network(cls, network: nn.Module, example_input: Any = None, **arguments: Any) -> GraphMetanetwork:
        """Build it for the architecture of a network.

        Args:
            network: A network of the architecture.
            example_input: A tensor, or a tuple or dictionary of arguments. Default: ``network.example_input_array``.
            arguments: Further arguments of the class.

        Raises:
            DynamicNetworkError: If the computation depends on the values that flow through it.
            ValueError: As in :func:`~lightning_symmetry.metanets.network_graph`.
        """
        return cls(WeightLayout.of(network), network_graph(network, example_input), **arguments)

    def features(self, weights: Tensor) -> Tensor:
        """Return the weights, fixed ones too."""
        self.layout.check(weights)
        return weights

    def read(self, features: Tensor) -> Tensor:
        """Pass messages over the graph of ``(B, P)`` entries and read the nodes out."""
        nodes = self.orbits(self.orbit).expand(len(features), -1, -1)
        for entries in self.on_nodes:
            nodes = nodes.index_add(1, entries.nodes, entries(features).to(nodes.dtype))  # autocast
        edges = [nodes.new_zeros(len(features), 0, nodes.shape[-1]), *(entries(features) for entries in self.on_edges)]
        edges = torch.cat(edges, dim=1)
        for layer in self.layers:
            nodes, edges = layer(nodes, edges, self.edge_index)
        return self.readout(mean_by(nodes, self.part, self.part_sizes))


class _Entries(nn.Module):
    """Embed the entries of one tensor on its nodes or edges, ``(B, P) -> (B, n, hidden)``."""

    def __init__(self, tensor: TensorInGraph, hidden: int) -> None:
        super().__init__()
        self.register_buffer("entries", tensor.entries, persistent=False)
        self.register_buffer("nodes", tensor.nodes[0], persistent=False)
        self.register_buffer("fixed", tensor.fixed, persistent=False)
        width = tensor.entries.shape[1]
        self.embed = nn.Linear(width, hidden)
        self.flag = None if tensor.fixed is None else nn.Linear(width, hidden, bias=False)

    def forward(self, weights: Tensor) -> Tensor:
        embedded = self.embed(weights[:, self.entries])
        return embedded if self.flag is None else embedded + self.flag(self.fixed.to(weights.dtype))
