"""What train_zoo refuses, before anything is written or without harm to what is there."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from metanets.zoo_training_cases import NETWORKS, Unloadable, changing, data, hyperparameters, mlp, samples, train
from torch import nn

from lightning_symmetry.metanets import Zoo, ZooError, ZooWriter
from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.zoo_factory import seeded_network
from lightning_symmetry.metanets.zoo_plan import plan_chunks
from lightning_symmetry.metanets.zoo_workers import Worker

CASES = "metanets.zoo_training_cases"


def with_hyperparameter(name: str, value, place: int | None = None) -> dict:
    own = hyperparameters()
    if place is None:
        return {"hyperparameters": {**own, name: value}}
    own[name] = own[name].astype(type(value))
    own[name][place] = value
    return {"hyperparameters": own}


def with_data(split: str, inputs, targets) -> dict:
    return {"data": {**data(), split: (inputs, targets)}}


INPUTS, CLASSES = samples(6, 0)
REFUSED = {
    "lambda with workers": ({"factory": lambda: mlp(), "workers": 2}, "`factory` .* workers=1"),
    "augmentation with workers": (
        {"settings": PopulationSettings(augment=lambda images, generator: images), "workers": 2},
        "`settings` .* workers=1",
    ),
    "no such factory": ({"factory": f"{CASES}:nothing"}, "'module:function'"),
    "no such augmentation": ({"settings": PopulationSettings(augment="nowhere:nothing")}, "`augment`"),
    "other architectures": ({"factory": changing}, "one architecture for every seed, but .*(shape|has)"),
    "other constants": (
        {"factory": f"{CASES}:other_constants"},
        "same masks and constants .* of seed .* are not those",
    ),
    "dropout": ({"factory": f"{CASES}:dropping"}, r"Dropout\) draws random numbers"),
    "nothing to train": ({"factory": nn.ReLU}, "no weights"),
    "unknown name": (with_hyperparameter("momentum", np.ones(NETWORKS)), r"but got \['momentum'\]"),
    "unequal lengths": (with_hyperparameter("epochs", [1, 2]), r"shapes .*\(12,\).*'epochs': \(2,\)"),
    "a number": (with_hyperparameter("epochs", 3), r"'epochs': \(\)"),
    "no networks": ({"hyperparameters": {"learning_rate": [], "epochs": []}}, "one value a network"),
    "no epochs": ({"hyperparameters": {"learning_rate": [0.1]}}, r"to have epochs but got \['learning_rate'\]"),
    "nothing": ({"hyperparameters": {}}, "to have learning_rate and epochs"),
    "rate nan": (with_hyperparameter("learning_rate", np.nan, 4), "`learning_rate` .*nan for network 4"),
    "rate below 0": (with_hyperparameter("learning_rate", -0.1, 2), "`learning_rate` .*-0.1 for network 2"),
    "smoothing above 1": (with_hyperparameter("label_smoothing", 1.5, 2), "`label_smoothing` .*1.5 for network 2"),
    "epochs 0": (with_hyperparameter("epochs", 0, 5), "`epochs` .*at least 1 but got 0 for network 5"),
    "epochs 1.5": (with_hyperparameter("epochs", 1.5, 5), "`epochs` .*integer.*1.5 for network 5"),
    "no training data": ({"data": {"test": data()["test"]}}, r"'train', .*but got \['test'\]"),
    "unknown split": (with_data("valid", INPUTS, CLASSES), "but got .*'valid'"),
    "empty data": (with_data("train", INPUTS[:0], CLASSES[:0]), r"data\['train'\].*\(0, 4\)"),
    "lengths of data": (with_data("test", INPUTS, CLASSES[:3]), r"data\['test'\].*\(6, 4\) and \(3,\)"),
    "other samples": (with_data("val", torch.zeros(6, 5), CLASSES), r"data\['val'\].*\(4,\), but got \(5,\)"),
    "bytes": (with_data("train", INPUTS.byte(), CLASSES), r"data\['train'\].*torch.uint8"),
    "targets": (with_data("train", INPUTS, CLASSES.float()), r"data\['train'\].*and torch.float32"),
    "data nan": (with_data("train", INPUTS * torch.nan, CLASSES), r"data\['train'\].*finite"),
    "too many classes": (with_data("train", INPUTS, CLASSES + 2), "cannot be trained on `data`"),
    "too many classes to test": (with_data("test", INPUTS, CLASSES + 2), "cannot be trained on `data`"),
    "images": ({"data": {"train": (torch.zeros(2, 1, 8, 8), torch.zeros(2).long())}}, "cannot be trained on `data`"),
    "double": ({"data": data(torch.float64)}, "`data` .* torch.float32 .* but got torch.float64"),
    "chunks": ({"chunk_size": 0}, "`chunk_size` .*got 0"),
    "workers": ({"workers": -1}, "`workers` .*got -1"),
    "dtype": ({"dtype": "bfloat16"}, "`dtype` .*bfloat16"),
    "arguments": ({"factory": lambda: mlp(), "factory_arguments": {"width": 3}}, "unexpected keyword|width"),
    "arguments that are no JSON": ({"factory": mlp, "factory_arguments": {"width": np.int64(3)}}, "JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(tmp_path, name):
    changes, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        train(tmp_path / "zoo", **changes)
    assert not list(tmp_path.iterdir())


DIFFERENT = {
    "its batch_size is 16, not 8": {"settings": PopulationSettings(batch_size=8)},
    "its optimizer is 'sgd', not 'adamw'": {"settings": PopulationSettings("adamw", batch_size=16)},
    "its betas is [0.9, 0.999], not [0.9, 0.99]": {
        "settings": PopulationSettings(batch_size=16, betas=(0.9, 0.99)),
    },
    f"its augment is None, not '{CASES}:unchanged'": {
        "settings": PopulationSettings(batch_size=16, augment=f"{CASES}:unchanged"),
    },
    "its learning_rate is another": with_hyperparameter("learning_rate", 0.5, 11),
    "its seed is another": {"seed": 4},
    "it has 12 networks, not 5": {"hyperparameters": hyperparameters(5)},
    "its chunk_size is 3, not 4": {"chunk_size": 4},
    "its keep_history is False, not True": {"keep_history": True},
    "its data of 'train' is another": with_data("train", *samples(50, 5)),
    "its data of 'test' is another": with_data("test", *samples(30, 5)),
    "data of 'val' is no longer given": {"data": {name: data()[name] for name in ("train", "test")}},
    "weights float32, the network to train has weights float16": {"dtype": "float16"},
    "0.weight has shape (5, 4)": {"factory_arguments": {"width": 6}},
    "the network to train has a factory None": {"factory": lambda: mlp()},
}


@pytest.mark.parametrize("finished", [False, True])
def test_going_on_with_something_else(tmp_path, finished):
    path = tmp_path / "zoo"
    checksum = train(path).checksum(False)
    if not finished:  # one chunk is there
        lines = (path / "manifest.jsonl").read_bytes().splitlines(keepends=True)
        (path / "manifest.jsonl").write_bytes(b"".join(lines[:4]))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for message, changes in DIFFERENT.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            train(path, **changes)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert len(Zoo.open(path)) == (NETWORKS if finished else 3)
    assert train(path).checksum(False) == checksum


def test_architectures_that_differ_in_the_middle(tmp_path):
    seeds = np.arange(100)
    widths = np.array([seeded_network(changing, seed)[0].out_features for seed in seeds])
    narrow, wide = seeds[widths == 4], seeds[widths == 5]
    own = {**hyperparameters(5), "seed": [*narrow[:2], wide[0], *narrow[2:4]], "epochs": [3, 2, 1, 3, 2]}
    factory = partial(changing)  # without a name, of which the writer would build another network
    for workers in (1, 2):
        with pytest.raises(ValueError, match=rf"chunk 2 .1 .*index 2.* failed: .*the first .* of seed {wide[0]}"):
            train(tmp_path / str(workers), factory=factory, hyperparameters=own, chunk_size=2, workers=workers)
        assert len(Zoo.open(tmp_path / str(workers))) in ((4,) if workers == 1 else (0, 2, 4))


def test_several_differences_are_named_together(tmp_path):
    train(tmp_path / "zoo")
    with pytest.raises(
        ZooError, match=r"zoo holds a zoo of another training: its batch_size is 16, not 128; its momentum is 0.9"
    ):
        train(tmp_path / "zoo", settings=PopulationSettings(momentum=0.8))


def test_zoos_of_others(tmp_path):
    with ZooWriter(tmp_path / "foreign", mlp(), factory=f"{CASES}:mlp") as writer:
        writer.append(torch.zeros(1, writer.layout.num_features), [{}])
    with pytest.raises(ZooError, match="not trained by train_zoo"):
        train(tmp_path / "foreign")
    zoo = train(tmp_path / "zoo")
    file = zoo.path / "training.json"
    content = json.loads(file.read_bytes())
    for text, message in (
        (json.dumps({**content, "format": 99}), r"training.json has format 99, .*format 1"),
        (json.dumps({**content, "kind": "other"}), "damaged, or no note"),
        (file.read_text()[:100], "damaged, or no note"),
        ("[]", "damaged, or no note"),
    ):
        file.write_text(text)
        with pytest.raises(ZooError, match=message):
            train(zoo.path)
    file.unlink()
    with pytest.raises(ZooError, match="not trained by train_zoo"):
        train(zoo.path)
    header = json.loads((zoo.path / "header.json").read_bytes())
    (zoo.path / "header.json").write_text(json.dumps({**header, "format": 7}))
    with pytest.raises(ZooError, match="has format 7"):
        train(zoo.path)


def test_another_process_is_at_it(tmp_path):
    with (
        ZooWriter(tmp_path / "zoo", mlp(), factory=f"{CASES}:mlp"),
        pytest.raises(ZooError, match="being written by process"),
    ):
        train(tmp_path / "zoo")
    assert len(train(tmp_path / "zoo")) == NETWORKS


def test_a_factory_that_workers_cannot_load(tmp_path):
    with pytest.raises(ValueError, match=r"cannot load what it is to train: ModuleNotFoundError: .*nowhere.*workers=1"):
        train(tmp_path / "zoo", factory=Unloadable(), workers=2)
    assert len(train(tmp_path / "zoo", factory=Unloadable())) == NETWORKS


def test_what_a_worker_says_before_it_ends_is_heard(tmp_path, monkeypatch):
    begin = Worker.begin

    def late(self, chunk):
        self._process.join(60)
        begin(self, chunk)

    monkeypatch.setattr(Worker, "begin", late)
    with pytest.raises(ValueError, match=r"cannot load what it is to train: ModuleNotFoundError: .*nowhere"):
        train(tmp_path / "zoo", factory=Unloadable(), workers=2)


@pytest.mark.parametrize("count, size", [(1, 1), (7, 3), (64, 8), (100, 64), (65, 64), (5, 99)])
def test_plan(count, size):
    epochs = np.random.default_rng(count).integers(1, 9, count)
    chunks = plan_chunks(epochs, size)
    assert sorted(index for chunk in chunks for index in chunk.indices) == list(range(count))
    sizes = [len(chunk.indices) for chunk in chunks]
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1 and len(sizes) == -(-count // size)
    order = [(-epochs[index], index) for chunk in chunks for index in chunk.indices]
    assert order == sorted(order)
    assert [chunk.epochs for chunk in chunks] == [epochs[list(chunk.indices)].sum() for chunk in chunks]
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
