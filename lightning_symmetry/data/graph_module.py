"""What the graph data modules share: one graph, whose masks are the splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_symmetry.data._checks import check_choice
from lightning_symmetry.data.loaders import SPLITS, Split, keep_batch

if TYPE_CHECKING:
    from torch_geometric.data import Data


class GraphDataModule(LightningDataModule):
    """Base of the graph data modules: a subclass says how to load, by `_load`.

    Learning is transductive: every loader yields the same whole graph, once an epoch, as a PyG `Data` with
    `x`, `y`, an undirected `edge_index` and the boolean `train_mask`, `val_mask` and `test_mask`; the model
    picks the mask of its step. Pass `batch_size=` to `self.log`, because Lightning cannot tell how many items
    a graph is.
    """

    def __init__(self) -> None:
        """Start without a graph."""
        super().__init__()
        self._graph: Data | None = None

    def _load(self) -> Data:
        raise NotImplementedError

    @property
    def graph(self) -> Data:
        """The graph, loaded on first use."""
        if self._graph is None:
            self._graph = self._load()
        return self._graph

    @property
    def num_classes(self) -> int:
        """Number of node classes."""
        return int(self.graph.y.max()) + 1

    @property
    def num_features(self) -> int:
        """Number of features of a node."""
        return self.graph.num_features

    def setup(self, stage: str | None = None) -> None:
        """Load the graph, once.

        Args:
            stage: Ignored: every stage uses the same graph.
        """
        _ = self.graph

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of one batch, the graph."""
        return self.eval_dataloader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of one batch, the graph."""
        return self.eval_dataloader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of one batch, the graph."""
        return self.eval_dataloader("test")

    def eval_dataloader(self, split: Split) -> DataLoader[Any]:
        """Return a loader of one batch, the graph.

        Args:
            split: "train", "val" or "test"; all give the same graph, whose `{split}_mask` selects the nodes.

        Returns:
            The loader.

        Raises:
            ValueError: If there is no such split.
        """
        check_choice("split", split, SPLITS)
        return DataLoader([self.graph], batch_size=None, collate_fn=keep_batch)


def node_mask(indices: Tensor, num_nodes: int) -> Tensor:
    """Turn node indices into a mask.

    Args:
        indices: int64 node indices.
        num_nodes: Length of the mask.

    Returns:
        Boolean mask, true at the indices.
    """
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[indices] = True
    return mask
