"""The layer of the graph metanetwork; imported when one is built, as torch-geometric takes seconds to import."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing


class WeightConv(MessagePassing):
    r"""Update edges from their ends, and nodes from the edges along and against their direction.

    With layer normalisation of what comes in,

    .. math::
        e_{ij} &\leftarrow e_{ij} + W_2\, \mathrm{ReLU}(W_e e_{ij} + W_i v_i + W_j v_j), \\
        v_i &\leftarrow v_i + U_2\, \mathrm{ReLU}(U_1 [v_i, \bar m_i, \bar m'_i]), \qquad
        \bar m_i = \mathrm{mean}_j\, e_{ij} \odot (B v_j + b)

    where m' is m over the reversed edges, with B and b of its own; b begins at 1. A node without edges receives zeros.

    Args:
        hidden: Width of nodes and edges.

    Source: Kofinas et al., Graph Neural Networks for Learning Equivariant Representations of Neural Networks (2024);
    there edges modulate messages through two linear maps of theirs, which the update of edges has here already.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__(node_dim=-2)
        self.node_norm, self.edge_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.ends = nn.Linear(hidden, 2 * hidden, bias=False)
        self.edge = nn.Linear(hidden, hidden)
        self.edge_out = nn.Linear(hidden, hidden)
        self.values = nn.Linear(hidden, 2 * hidden)
        nn.init.ones_(self.values.bias)
        self.node = nn.Linear(3 * hidden, hidden)
        self.node_out = nn.Linear(hidden, hidden)

    def forward(self, nodes: Tensor, edges: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Update nodes ``(B, N, hidden)`` and edges ``(B, E, hidden)`` of one graph ``(2, E)``."""
        seen = self.node_norm(nodes)
        source, target = self.ends(seen).chunk(2, dim=-1)
        update = self.edge_updater(edge_index, source=source, target=target, edge=self.edge(self.edge_norm(edges)))
        edges = edges + self.edge_out(update)
        factor = self.edge_norm(edges)
        along, against = self.values(seen).chunk(2, dim=-1)
        received = [
            self.propagate(edge_index, x=along, factor=factor),
            self.propagate(edge_index.flip(0), x=against, factor=factor),
        ]
        nodes = nodes + self.node_out(self.node(torch.cat([seen, *received], dim=-1)).relu())
        return nodes, edges

    def edge_update(self, source_j: Tensor, target_i: Tensor, edge: Tensor) -> Tensor:
        """Join an edge with its ends."""
        return (edge + source_j + target_i).relu()

    def message(self, x_j: Tensor, factor: Tensor) -> Tensor:
        """Return what an edge makes of the value of its source."""
        return factor * x_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        """Average the messages to each node; PyG's mean makes an index of each number, and takes twice as long."""
        counts = torch.bincount(index, minlength=dim_size).clamp(min=1).to(inputs.dtype).unsqueeze(1)
        total = inputs.new_zeros(len(inputs), dim_size, inputs.shape[-1])
        return total.index_add(-2, index, inputs) / counts
