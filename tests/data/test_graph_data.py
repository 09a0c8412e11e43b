"""Graphs against scikit-learn's neighbours and PyG's own loaders."""

from __future__ import annotations

import gzip
import pickle
import sys
import types

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_scipy_sparse_matrix

from lightning_symmetry.data import ArxivData, DigitsGraph, PlanetoidData


def adjacency(graph):
    return to_scipy_sparse_matrix(graph.edge_index, num_nodes=graph.num_nodes).toarray()


def check_masks_partition(graph):
    together = graph.train_mask.int() + graph.val_mask.int() + graph.test_mask.int()
    assert (together <= 1).all()
    return [int(mask.sum()) for mask in (graph.train_mask, graph.val_mask, graph.test_mask)]


@pytest.mark.parametrize("num_neighbors", [1, 8])
def test_digits_graph_joins_nearest_neighbours(num_neighbors):
    graph = DigitsGraph(num_neighbors).graph
    directed = kneighbors_graph(load_digits().data, num_neighbors, include_self=False).toarray()
    assert np.array_equal(adjacency(graph), np.maximum(directed, directed.T))
    assert graph.is_undirected()
    assert not graph.has_self_loops()


def test_digits_graph_features_and_masks():
    data = DigitsGraph(test_fraction=0.2, val_fraction=0.1)
    graph = data.graph
    pixels = torch.from_numpy(load_digits().data)
    expected = (pixels - pixels.mean()) / pixels.std(correction=0)
    torch.testing.assert_close(graph.x.double(), expected, rtol=1e-6, atol=1e-6)
    assert graph.x.dtype == torch.float32
    assert torch.equal(graph.y, torch.from_numpy(load_digits().target).long())
    assert check_masks_partition(graph) == [1257, 180, 360]
    assert (data.num_classes, data.num_features) == (10, 64)


def test_digits_graph_depends_on_its_seed_only():
    state = torch.get_rng_state()
    first, again, other = (DigitsGraph(split_seed=seed).graph for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.test_mask, again.test_mask)
    assert not torch.equal(first.test_mask, other.test_mask)


def test_every_loader_yields_the_whole_graph_once():
    data = DigitsGraph()
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    loaders += [data.eval_dataloader(split) for split in ("train", "val", "test")]
    for loader in loaders:
        (graph,) = pickle.loads(pickle.dumps(loader))
        assert isinstance(graph, Data)
        assert torch.equal(graph.edge_index, data.graph.edge_index)
    with pytest.raises(ValueError, match="`split` to be one of"):
        data.eval_dataloader("all")


class Convolution(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(64, 10)

    def training_step(self, graph, _):
        logits = self.conv(graph.x, graph.edge_index)
        return nn.functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])

    def validation_step(self, graph, _):
        hits = self.conv(graph.x, graph.edge_index).argmax(1) == graph.y
        self.log("accuracy", hits[graph.val_mask].float().mean(), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*number of training batches")
def test_fit_takes_one_step_an_epoch(tmp_path):
    pl.seed_everything(0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=15, default_root_dir=tmp_path, **quiet)
    trainer.fit(Convolution(), datamodule=DigitsGraph())
    assert trainer.global_step == 15
    assert trainer.callback_metrics["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DigitsGraph(num_neighbors=0), "`num_neighbors` to be an integer of at least 1, but got 0"),
        (lambda: DigitsGraph(test_fraction=0.5, val_fraction=0.5), "add up to less than 1"),
        (lambda: PlanetoidData("Citeseer"), "`name` to be one of .*'CiteSeer'.* but got 'Citeseer'"),
        (lambda: PlanetoidData(split="geom-gcn"), "`split` to be one of .* but got 'geom-gcn'"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


NODES = 564


def write_planetoid(folder, name="cora"):
    """Write a ring of two classes in Planetoid's raw format: 4 nodes for training, 10 for testing."""
    folder.mkdir(parents=True)
    x = np.random.default_rng(0).integers(0, 2, (NODES, 6)).astype(np.float32)
    x[:, 0] = 1
    y = np.eye(2, dtype=np.int32)[np.arange(NODES) % 2]
    known = NODES - 10
    parts = {key: csr_matrix(rows) for key, rows in {"x": x[:4], "tx": x[known:], "allx": x[:known]}.items()}
    parts |= {"y": y[:4], "ty": y[known:], "ally": y[:known]}
    parts["graph"] = {i: [(i + 1) % NODES, (i - 1) % NODES] for i in range(NODES)}
    for key, value in parts.items():
        (folder / f"ind.{name}.{key}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in range(known, NODES)))
    return x


@pytest.mark.parametrize("below", ["", "planetoid"])
def test_planetoid_reads_raw_files(tmp_path, below):
    x = write_planetoid(tmp_path / below / "Cora" / "raw")
    data = PlanetoidData("Cora", str(tmp_path))
    data.prepare_data()
    data.setup("fit")
    expected = torch.from_numpy(x / x.sum(1, keepdims=True))
    torch.testing.assert_close(data.graph.x, expected)
    ring = np.roll(np.eye(NODES), 1, axis=1)
    assert np.array_equal(adjacency(data.graph), ring + ring.T)
    assert data.graph.train_mask.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert data.graph.val_mask.nonzero().flatten().tolist() == list(range(4, 504))
    assert data.graph.test_mask.nonzero().flatten().tolist() == list(range(NODES - 10, NODES))
    assert (data.num_classes, data.num_features) == (2, 6)
    assert (tmp_path / below / "Cora" / "processed").is_dir()
    raw = PlanetoidData("Cora", str(tmp_path), normalize_features=False)
    assert torch.equal(raw.graph.x, torch.from_numpy(x))


@pytest.mark.parametrize("cached", [False, True])
def test_planetoid_leaves_a_read_only_folder_alone(tmp_path, cached):
    raw = tmp_path / "Cora" / "raw"
    write_planetoid(raw)
    cache = str(tmp_path / "cache") if cached else None
    for folder in (raw, raw.parent):
        folder.chmod(0o555)
    try:
        graphs = [PlanetoidData("Cora", str(tmp_path), cache_dir=cache).graph for _ in range(2)]
        assert [entry.name for entry in raw.parent.iterdir()] == ["raw"]
    finally:
        for folder in (raw.parent, raw):
            folder.chmod(0o755)
    assert torch.equal(graphs[0].x, graphs[1].x)
    assert (tmp_path / "cache" / "Cora" / "processed").is_dir() == cached


def test_planetoid_random_split_follows_its_seed(tmp_path):
    write_planetoid(tmp_path / "Cora" / "raw")
    state = torch.get_rng_state()
    first, again, other = (PlanetoidData("Cora", str(tmp_path), "random", split_seed=seed).graph for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.train_mask, again.train_mask)
    assert not torch.equal(first.train_mask, other.train_mask)
    assert check_masks_partition(first) == [40, 500, 24]


def test_planetoid_says_where_it_looked(tmp_path, monkeypatch):
    def offline(self):
        raise OSError("no route to host")

    monkeypatch.setattr("torch_geometric.datasets.Planetoid.download", offline)
    with pytest.raises(RuntimeError, match=r"(?s)Could not load Cora: looked .*Cora/raw.*no route to host"):
        PlanetoidData("Cora", str(tmp_path)).prepare_data()


@pytest.mark.parametrize(("name", "sizes"), [("Cora", (2708, 1433, 7)), ("CiteSeer", (3327, 3703, 6))])
def test_real_planetoid(real_data, tmp_path, name, sizes):
    data = PlanetoidData(name, str(real_data), cache_dir=str(tmp_path))
    assert (data.graph.num_nodes, data.num_features, data.num_classes) == sizes
    assert check_masks_partition(data.graph) == [20 * data.num_classes, 500, 1000]
    assert data.graph.is_undirected()
    sums = data.graph.x.sum(1)
    assert torch.all((sums - 1).abs().lt(1e-4) | sums.eq(0))


def test_arxiv_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r'pip install "lightning-symmetry\[ogb\]"'):
        ArxivData("nowhere").prepare_data()


SPLIT = {"train": [0, 1, 2], "valid": [3], "test": [4, 5]}
EDGES = [[0, 1, 2, 3, 4, 1], [1, 2, 3, 4, 5, 0]]


def check_arxiv(data):
    graph = data.graph
    assert graph.y.tolist() == [0, 1, 2, 0, 1, 2]
    path = np.eye(6, k=1)
    assert np.array_equal(adjacency(graph), path + path.T)
    for name, key in (("train", "train"), ("val", "valid"), ("test", "test")):
        assert graph[f"{name}_mask"].nonzero().flatten().tolist() == SPLIT[key]
    assert data.num_classes == 40


def test_arxiv_from_a_stand_in(monkeypatch, tmp_path):
    class StandIn:
        def __init__(self, name, root):
            assert (name, root) == ("ogbn-arxiv", str(tmp_path))

        def __getitem__(self, index):
            y = torch.tensor([[0], [1], [2], [0], [1], [2]])
            return Data(x=torch.zeros(6, 3), edge_index=torch.tensor(EDGES), y=y)

        def get_idx_split(self):
            return {key: torch.tensor(value) for key, value in SPLIT.items()}

    module = types.SimpleNamespace(PygNodePropPredDataset=StandIn)
    monkeypatch.setitem(sys.modules, "ogb", types.SimpleNamespace(nodeproppred=module))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    check_arxiv(ArxivData(str(tmp_path)))


def test_arxiv_through_ogb(tmp_path):
    pytest.importorskip("ogb.nodeproppred", reason="ogb is not installed")
    root = tmp_path / "ogbn_arxiv"
    tables = {
        "raw/edge": list(zip(*EDGES, strict=True)),
        "raw/node-feat": [[float(i), 1.0] for i in range(6)],
        "raw/node-label": [[i % 3] for i in range(6)],
        "raw/node_year": [[2000 + i] for i in range(6)],
        "raw/num-node-list": [[6]],
        "raw/num-edge-list": [[6]],
    }
    tables |= {f"split/time/{key}": [[i] for i in value] for key, value in SPLIT.items()}
    for name, rows in tables.items():
        file = root / f"{name}.csv.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))
    (root / "RELEASE_v1.txt").touch()
    check_arxiv(ArxivData(str(tmp_path)))
    root.chmod(0o555)
    try:
        data = ArxivData(str(tmp_path), cache_dir=str(tmp_path / "cache"))
        check_arxiv(data)
    finally:
        root.chmod(0o755)
    assert data.graph.x[:, 0].tolist() == list(range(6))
