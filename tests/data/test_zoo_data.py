"""A zoo as a data module: the same fixed splits for everyone, the right weights beside the right targets."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from metanets.zoo_cases import asymmetric, plain, record, write

from lightning_symmetry.data.zoo import ZooData
from lightning_symmetry.metanets import Zoo, ZooError, ZooWriter

SPLITS = ("train", "val", "test")


@pytest.fixture
def path(tmp_path):
    """Forty networks; each fifth has diverged."""
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        rows = torch.randn(40, 23, generator=torch.Generator().manual_seed(0))
        rows[::5, 3] = torch.inf
        writer.append(rows, [record(i) for i in range(40)])
    return tmp_path / "zoo"


def indices(data, split):
    return data.zoo.indices[data.positions[split]].tolist()


def test_splits_are_disjoint_and_without_diverged_networks(path):
    data = ZooData(str(path))
    parts = {split: indices(data, split) for split in SPLITS}
    assert {split: len(part) for split, part in parts.items()} == {"train": 16, "val": 8, "test": 8}
    assert sorted(index for part in parts.values() for index in part) == [i for i in range(40) if i % 5]
    other = ZooData(str(path), split_seed=1)
    assert indices(other, "train") != parts["train"]
    assert sorted(p.name for p in path.glob("splits*")) == [
        "splits-0.5-0.25-0.25-seed0.json",
        "splits-0.5-0.25-0.25-seed1.json",
    ]
    part = ZooData(str(path), splits=(0.5, 0.1, 0.1))
    assert [len(part.positions[split]) for split in SPLITS] == [16, 3, 3]


def test_splits_do_not_depend_on_order_or_on_the_file(path, tmp_path):
    zoo = Zoo.open(path)
    order = np.random.default_rng(0).permutation(40)
    with ZooWriter(tmp_path / "other", plain()) as writer:
        writer.append(zoo.read(order), [zoo.records[i] for i in order])
    first, other = ZooData(str(path)), ZooData(str(tmp_path / "other"))
    for split in SPLITS:
        assert sorted(indices(first, split)) == sorted(indices(other, split))
    file = path / "splits-0.5-0.25-0.25-seed0.json"
    content = file.read_bytes()
    file.unlink()
    assert indices(ZooData(str(path)), "test") == indices(first, "test") and file.read_bytes() == content


def test_the_file_is_what_counts(path):
    first = ZooData(str(path)).positions
    file = path / "splits-0.5-0.25-0.25-seed0.json"
    content = json.loads(file.read_text())
    content["train"], content["test"] = content["test"], content["train"]
    file.write_text(json.dumps(content))
    assert np.array_equal(ZooData(str(path)).positions["train"], first["test"])
    with ZooWriter(path, plain()) as writer:
        writer.append(torch.zeros(1, 23), [record(40)])
    with pytest.raises(ZooError, match=r"seed0.json was drawn from other networks than the 33"):
        ZooData(str(path)).setup()
    file.write_text("{")
    with pytest.raises(ZooError, match=r"seed0.json is damaged"):
        ZooData(str(path)).setup()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["test"].append(content["train"][0]), "overlap"),
        (lambda content: content["test"].append(content["test"][0]), "overlap"),
        (lambda content: content["val"].clear(), "one is empty"),
        (lambda content: content["val"].append(99), "no network of index 99"),
        (lambda content: content["val"].append(5), "no network of index 5"),  # it has diverged
        (lambda content: content.pop("val"), "val"),
    ],
)
def test_damaged_splits_are_refused(path, change, message):
    ZooData(str(path)).setup()
    file = path / "splits-0.5-0.25-0.25-seed0.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ZooError, match=rf"seed0.json is damaged.*{message}"):
        ZooData(str(path)).setup()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_batches(tmp_path, dtype):
    folder = write(tmp_path / "zoo", range(23), asymmetric, dtype=dtype)
    data = ZooData(str(folder), batch_size=4, eval_batch_size=5)
    zoo = Zoo.open(folder)
    weights, accuracy = torch.from_numpy(np.array(zoo.weights)).float(), torch.from_numpy(zoo["accuracy"]).float()
    assert data.num_features == data.layout.num_features == weights.shape[1]
    assert torch.equal(data.layout.fixed, zoo.fixed) and zoo.fixed.any()
    seen = []
    for split in SPLITS:
        batches = list(data.eval_dataloader(split))
        positions = torch.from_numpy(data.positions[split])
        assert torch.equal(torch.cat([x for x, _ in batches]), weights[positions])
        assert torch.equal(torch.cat([y for _, y in batches]), accuracy[positions])
        assert torch.equal(data.targets(split), accuracy[positions])
        assert all(x.dtype == y.dtype == torch.float32 for x, y in batches)
        seen += positions.tolist()
    assert sorted(seen + sorted(set(range(23)) - set(seen))) == list(range(23)) and len(set(seen)) == len(seen)
    shuffled = list(data.train_dataloader())
    assert [len(x) for x, _ in shuffled] == [4, 4, 3]
    of = {tuple(row.tolist()): value for row, value in zip(weights, accuracy, strict=True)}
    for x, y in shuffled:
        assert torch.equal(torch.stack([of[tuple(row.tolist())] for row in x]), y)


def test_loading_moves_no_random_state(path):
    data = ZooData(str(path))
    state = torch.get_rng_state()
    data.setup()
    list(data.test_dataloader())
    assert torch.equal(torch.get_rng_state(), state)


def test_pickles_without_its_weights(path):
    data = ZooData(str(path))
    list(data.val_dataloader())
    again = pickle.loads(pickle.dumps(data.val_dataloader().dataset))
    assert torch.equal(again[2][0], data.val_dataloader().dataset[2][0])
    with pytest.raises(IndexError):
        again[8]


def test_refusals(path, tmp_path):
    with ZooWriter(tmp_path / "dead", plain()) as writer:
        writer.append(torch.full((9, 23), torch.nan), [record(i) for i in range(9)])
    with pytest.raises(ValueError, match="9 networks, of which 0 did not diverge"):
        ZooData(str(tmp_path / "dead")).setup()
    with pytest.raises(FileNotFoundError, match="There is no zoo"):
        ZooData(str(tmp_path / "none")).setup()
    with pytest.raises(ValueError, match=r"`target`.*'loss'; there are .*'accuracy'"):
        ZooData(str(path), target="loss").setup()
    with pytest.raises(ValueError, match="no finite number"):
        ZooData(str(path), target="status").setup()
    for splits in ((0.5, 0.5), (0.9, 0.1, 0.1), (1.0, 0.0, 0.0)):
        with pytest.raises(ValueError, match="sum of at most 1"):
            ZooData(str(path), splits=splits).setup()
    with pytest.raises(ValueError, match="batch_size"):
        ZooData(str(path), batch_size=0)


class Metanetwork(LightningModule):
    def __init__(self, features):
        super().__init__()
        self.net = torch.nn.Linear(features, 1)

    def training_step(self, batch):
        return (self.net(batch[0]).squeeze(1) - batch[1]).square().mean()

    def validation_step(self, batch):
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def test_in_a_trainer(path, tmp_path):
    data = ZooData(str(path), batch_size=8)
    trainer = Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, log_every_n_steps=1, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Metanetwork(data.num_features), datamodule=data)
    assert trainer.global_step == 4 and torch.isfinite(trainer.callback_metrics["val_loss"])
