"""Transductive node classification: the digits' neighbour graph, citation networks and ogbn-arxiv."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_symmetry.data._checks import check_at_least, check_choice, check_fraction
from lightning_symmetry.data.digits import MAX_VALUE, digits_splits, load_digits
from lightning_symmetry.data.graph_module import GraphDataModule, node_mask
from lightning_symmetry.data.read_only import writable_root

if TYPE_CHECKING:
    from torch_geometric.data import Data


class DigitsGraph(GraphDataModule):
    """The k-nearest-neighbour graph of scikit-learn's handwritten digits.

    Its 1,797 nodes are images, with the 64 pixels as features; i and j are joined if either is among the k
    nearest of the other by Euclidean distance. Features are normalised by the mean and standard deviation of
    all pixels, because a transductive learner sees every node. Classes are the ten digits.
    """

    def __init__(
        self,
        num_neighbors: int = 8,
        test_fraction: float = 0.2,
        val_fraction: float = 0.2,
        split_seed: int = 0,
    ) -> None:
        """Set the graph and the split.

        Args:
            num_neighbors: Nearest neighbours that each node is joined to.
            test_fraction: Fraction of the nodes in `test_mask`.
            val_fraction: Fraction of the nodes in `val_mask`; the rest is in `train_mask`.
            split_seed: Seed of the stratified split.

        Raises:
            ValueError: If an argument is out of range, or the fractions leave nothing for training.
        """
        super().__init__()
        self.num_neighbors = check_at_least("num_neighbors", num_neighbors, 1)
        self.test_fraction = check_fraction("test_fraction", test_fraction, zero=False)
        self.val_fraction = check_fraction("val_fraction", val_fraction, zero=False)
        if test_fraction + val_fraction >= 1:
            raise ValueError(
                "Expected arguments `test_fraction` and `val_fraction` to add up to less than 1, but got "
                f"{test_fraction} and {val_fraction}."
            )
        self.split_seed = split_seed
        self.save_hyperparameters(logger=False)

    def _load(self) -> Data:
        from sklearn.neighbors import kneighbors_graph
        from torch_geometric.data import Data
        from torch_geometric.utils import to_undirected

        images, labels = load_digits()
        pixels = images.flatten(1).double()
        neighbors = kneighbors_graph(pixels.numpy(), self.num_neighbors, include_self=False).tocoo()
        directed = torch.stack([torch.from_numpy(neighbors.row), torch.from_numpy(neighbors.col)]).to(torch.int64)
        x = pixels / MAX_VALUE
        x = ((x - x.mean()) / x.std(correction=0)).float()
        parts = digits_splits(labels, self.test_fraction, self.val_fraction, self.split_seed)
        masks = {f"{name}_mask": node_mask(index, len(labels)) for name, index in parts.items()}
        return Data(x=x, y=labels, edge_index=to_undirected(directed, num_nodes=len(labels)), **masks)


class PlanetoidData(GraphDataModule):
    """A citation network, Cora, CiteSeer or PubMed, through PyG's `Planetoid`.

    It is looked for in `data_dir/NAME/raw`, then in `data_dir/planetoid/NAME/raw`, and else downloaded to the
    first. PyG writes processed files beside the raw ones: where that is not possible, the raw files are
    copied first.
    """

    def __init__(
        self,
        name: Literal["Cora", "CiteSeer", "PubMed"] = "Cora",
        data_dir: str = "data",
        split: Literal["public", "full", "random"] = "public",
        normalize_features: bool = True,
        split_seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        """Choose the network.

        Args:
            name: Which network.
            data_dir: Folder of the data.
            split: "public": 20 training nodes a class, 500 for validation, 1,000 for testing, as published.
                "full": all other nodes for training. "random": as many as "public" of each, drawn by
                `split_seed`.
            normalize_features: Divide each node's features by their sum.
            split_seed: Seed of the "random" split.
            cache_dir: Where to copy the raw files to if `data_dir` is read-only; None for a temporary folder.

        Raises:
            ValueError: If the name or the split is unknown.
        """
        super().__init__()
        data_dir, cache_dir = str(data_dir), None if cache_dir is None else str(cache_dir)
        self.name = check_choice("name", name, ("Cora", "CiteSeer", "PubMed"))
        self.data_dir = Path(data_dir)
        self.split = check_choice("split", split, ("public", "full", "random"))
        self.normalize_features = normalize_features
        self.split_seed = split_seed
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self.save_hyperparameters(logger=False)

    def prepare_data(self) -> None:
        """Download the raw files if they are not there, and process them where the result can be kept.

        Raises:
            RuntimeError: If downloading or reading fails.
        """
        _ = self.graph

    def _load(self) -> Data:
        from torch_geometric.datasets import Planetoid
        from torch_geometric.transforms import NormalizeFeatures
        from torch_geometric.utils import to_undirected

        nested = self.data_dir / "planetoid"
        root = nested if (nested / self.name).is_dir() and not (self.data_dir / self.name).is_dir() else self.data_dir
        # PyG draws the "random" split from the global generator.
        with (
            writable_root(root, self.name, ("raw",), self.cache_dir) as root,
            torch.random.fork_rng(devices=[]),
        ):
            torch.manual_seed(self.split_seed)
            try:
                graph = Planetoid(str(root), self.name, split=self.split)[0]
            except OSError as error:
                raise RuntimeError(
                    f"Could not load {self.name}: looked for raw files in {self.data_dir / self.name}/raw "
                    f"and in {nested / self.name}/raw, then tried to download them: {error}."
                ) from error
        graph.edge_index = to_undirected(graph.edge_index, num_nodes=graph.num_nodes)
        return NormalizeFeatures()(graph) if self.normalize_features else graph


class ArxivData(GraphDataModule):
    """The citation network ogbn-arxiv, 169,343 papers in 40 subjects, through the optional package `ogb`.

    It is looked for in `data_dir/ogbn_arxiv` and else downloaded there. The split is the published one, by
    year. Citations are made undirected.
    """

    def __init__(self, data_dir: str = "data", cache_dir: str | None = None) -> None:
        """Choose the folders.

        Args:
            data_dir: Folder of the data.
            cache_dir: Where to copy the raw files to if `data_dir` is read-only; None for a temporary folder.
        """
        super().__init__()
        data_dir, cache_dir = str(data_dir), None if cache_dir is None else str(cache_dir)
        self.data_dir = Path(data_dir)
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self.save_hyperparameters(logger=False)

    @property
    def num_classes(self) -> int:
        """Forty."""
        return 40

    def prepare_data(self) -> None:
        """Download the raw files if they are not there, and process them where the result can be kept.

        Raises:
            ImportError: If `ogb` is not installed.
        """
        _ = self.graph

    def _load(self) -> Data:
        from torch_geometric.utils import to_undirected

        dataset_class = _ogb_dataset_class()
        needed = ("raw", "split", "RELEASE_v1.txt")
        # ogb 1.3.6 loads its own file of PyG objects without saying so, which PyTorch 2.6 and later refuse.
        with (
            writable_root(self.data_dir, "ogbn_arxiv", needed, self.cache_dir) as root,
            torch.serialization.safe_globals(_pyg_classes()),
        ):
            dataset = dataset_class(name="ogbn-arxiv", root=str(root))
            graph, split = dataset[0], dataset.get_idx_split()
        graph.y = graph.y.squeeze(1)
        graph.edge_index = to_undirected(graph.edge_index, num_nodes=graph.num_nodes)
        for name, key in (("train", "train"), ("val", "valid"), ("test", "test")):
            graph[f"{name}_mask"] = node_mask(split[key], graph.num_nodes)
        return graph


def _ogb_dataset_class() -> Any:
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(
            "ogbn-arxiv needs the package `ogb`, which could not be imported. "
            'Install it with: pip install "lightning-symmetry[ogb]"'
        ) from error
    return PygNodePropPredDataset


def _pyg_classes() -> list[Any]:
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    return [DataEdgeAttr, DataTensorAttr, GlobalStorage]
