"""Zoos that are trained: each network as by a plain loop, and the same zoo however the work is divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metanets.zoo_training_cases import (
    NETWORKS,
    asymmetric,
    batch_normed,
    data,
    hyperparameters,
    mlp,
    precise,
    train,
    trapped,
)
from torch.nn import functional as F

from lightning_symmetry.data.zoo import ZooData
from lightning_symmetry.metanets import Zoo, ZooError
from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.zoo_factory import seeded_network
from lightning_symmetry.metanets.zoo_training import ZooTrainer


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return train(tmp_path_factory.mktemp("zoo") / "zoo")


def plain_loop(network, inputs, targets, learning_rate, weight_decay, label_smoothing, epochs, seed, batch_size=16):
    """Train with torch.optim.SGD, linear warm-up over a fifth of the steps and linear decay to 0."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(int(seed))
    batches = -(-len(inputs) // batch_size)
    steps, t = epochs * batches, 0
    network.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=generator).split(batch_size):
            optimizer.param_groups[0]["lr"] = learning_rate * min(t / (0.2 * steps), (steps - t) / (0.8 * steps))
            optimizer.zero_grad()
            F.cross_entropy(network(inputs[chosen]), targets[chosen], label_smoothing=label_smoothing).backward()
            optimizer.step()
            t += 1
    return network.eval()


@pytest.mark.parametrize("factory", [precise, batch_normed, asymmetric])
def test_each_network_is_that_of_a_plain_loop(tmp_path, factory):
    given = data(torch.float64)
    zoo = train(tmp_path / "zoo", factory=factory, data=given)
    assert sorted(zoo.indices) == list(range(NETWORKS)) and set(zoo["status"]) == {"ok"}
    own = hyperparameters()
    for position, record in enumerate(zoo.records):
        settings = {name: values[record["index"]].item() for name, values in own.items()}
        assert {name: record[name] for name in own} == settings
        network = zoo.initial(position)
        expected = seeded_network(factory, record["seed"]).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in network.state_dict().items())
        plain_loop(network, *given["train"], **settings, seed=record["seed"])
        for (name, value), stored in zip(
            network.state_dict().items(), zoo.network(position).state_dict().values(), strict=True
        ):
            torch.testing.assert_close(stored, value, rtol=1e-6, atol=1e-7, msg=name)  # stored as float32
        for split, smoothing in (("train", settings["label_smoothing"]), ("val", 0.0), ("test", 0.0)):
            inputs, targets = given[split]
            logits = network(inputs)
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing).item()
            right = (logits.argmax(1) == targets).double().mean().item()
            assert record[f"{split}_loss"] == pytest.approx(loss, rel=1e-9)
            assert record["accuracy" if split == "test" else f"{split}_accuracy"] == pytest.approx(right)
        assert record["epochs_done"] == record["epochs"]


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_workers_make_no_difference(zoo, tmp_path, workers):
    other = train(tmp_path / "zoo", workers=workers)
    assert other.checksum(False) == zoo.checksum(False)
    assert not [file for file in (tmp_path / "zoo").iterdir() if "data" in file.name]


def test_the_default_number_of_workers_and_threads(zoo, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    assert train(tmp_path / "zoo").checksum(False) == zoo.checksum(False)
    assert set_to == [1, 3] * 4
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_chunks_and_seeds_are_part_of_the_zoo(zoo, tmp_path):
    seeds = zoo.select(np.argsort(zoo.indices))["seed"]
    assert len(set(seeds)) == NETWORKS
    given = train(tmp_path / "given", hyperparameters={**hyperparameters(), "seed": seeds}, seed=99)
    assert given.checksum(False) == zoo.checksum(False)
    fewer = ZooTrainer(mlp, data(), {name: values[:5] for name, values in hyperparameters().items()}, seed=3)
    assert (fewer.hyperparameters["seed"] == seeds[:5]).all()
    assert train(tmp_path / "other", seed=4).checksum(False) != zoo.checksum(False)


def test_a_finished_zoo_is_not_trained_again(zoo):
    before = {file.name: file.stat().st_mtime_ns for file in zoo.path.iterdir()}
    again = train(zoo.path, workers=2)
    assert again.checksum(False) == zoo.checksum(False)
    assert {file.name: file.stat().st_mtime_ns for file in zoo.path.iterdir()} == before


def test_optional_hyperparameters_splits_and_history(tmp_path):
    own = {name: hyperparameters()[name] for name in ("learning_rate", "epochs")}
    zoo = train(tmp_path / "zoo", hyperparameters=own, data={"train": data()["train"]}, keep_history=True)
    assert set(zoo["weight_decay"]) == set(zoo["label_smoothing"]) == {0.0}
    assert not {"accuracy", "test_loss", "val_loss"} & set(zoo.records[0])
    for record in zoo.records:
        history = record["train_accuracies"]
        assert len(history) == record["epochs"] and all(0 <= share <= 1 for share in history)
    longest = max(zoo.records, key=lambda record: (record["epochs"], record["learning_rate"]))
    assert longest["train_accuracies"][-1] > longest["train_accuracies"][0]


def test_half_precision(zoo, tmp_path):
    half = train(tmp_path / "zoo", dtype="float16")
    order = [half.indices.tolist().index(index) for index in zoo.indices]
    assert torch.equal(half.read(order), zoo.read().half().float())
    own = {**hyperparameters(2), "learning_rate": np.array([0.01, 1e4]), "epochs": np.array([1, 1])}
    wild = {**own, "weight_decay": np.zeros(2)}
    whole = train(tmp_path / "whole", hyperparameters=wild)
    large = whole.select(np.argsort(whole.indices)).read().abs().amax(1)
    assert large[0] < 10 and 65_504 < large[1] < 1e30  # finite, but not in half precision
    narrow = train(tmp_path / "narrow", hyperparameters=wild, dtype="float16")
    assert narrow.select(np.argsort(narrow.indices))["status"].tolist() == ["ok", "diverged"]


def test_networks_that_diverge(tmp_path, capsys):
    own = hyperparameters(6)
    own["learning_rate"][[1, 4]], own["epochs"][[1, 4]] = 1e38, 5
    zoo = train(tmp_path / "zoo", hyperparameters=own, factory=mlp, progress=True, seed=0)
    status = dict(zip(zoo.indices.tolist(), zoo["status"], strict=True))
    assert {index for index, value in status.items() if value == "diverged"} == {1, 4}
    shown = capsys.readouterr().err
    assert f"{sum(own['epochs'])}/{sum(own['epochs'])}" in shown and "diverged=2" in shown and "networks=6" in shown
    for record in zoo.records:
        assert (record["accuracy"] is None) == (record["train_loss"] is None) == (record["status"] == "diverged")
    position = zoo.indices.tolist().index(3)
    network = plain_loop(
        zoo.initial(position), *data()["train"], **{name: values[3].item() for name, values in own.items()},
        seed=zoo["seed"][position],
    )  # fmt: skip
    for value, stored in zip(network.parameters(), zoo.network(position).parameters(), strict=True):
        torch.testing.assert_close(stored, value, rtol=1e-4, atol=1e-5)


def test_no_survivors(tmp_path):
    own = {"learning_rate": np.full(8, 1e38), "epochs": np.full(8, 3)}
    for _ in range(2):  # a finished zoo says the same
        with pytest.raises(ZooError, match=r"All 8 networks of .*zoo diverged. The zoo is kept"):
            train(tmp_path / "zoo", hyperparameters=own)
    zoo = Zoo.open(tmp_path / "zoo")
    assert set(zoo["status"]) == {"diverged"}
    with pytest.raises(ValueError, match="8 networks, of which 0 did not diverge"):
        ZooData(str(zoo.path)).positions  # noqa: B018


def test_a_function_that_only_this_process_has(zoo, tmp_path):
    width = 5
    local = train(tmp_path / "local", factory=lambda: mlp(width))
    assert local.checksum(False) == zoo.checksum(False)
    assert local.header.factory is None and zoo.header.factory["function"] == "metanets.zoo_training_cases:mlp"
    position = local.indices.tolist().index(2)
    assert torch.equal(local.network(position)[0].weight, local.read([position])[0, :20].view(5, 4))
    expected = seeded_network(mlp, local["seed"][position])
    assert torch.equal(local.initial(position)[0].weight, expected[0].weight)
    wide = train(tmp_path / "wide", factory=mlp, factory_arguments={"width": 7}, workers=2)
    assert wide.header.factory["arguments"] == {"width": 7} and wide.network(0)[0].out_features == 7


def test_augmentation_in_workers(tmp_path):
    (tmp_path / "a").mkdir()
    assert trapped(tmp_path / "a", workers=2).checksum(False) == train(tmp_path / "b").checksum(False)


def test_adamw_is_another_zoo(zoo, tmp_path):
    other = train(tmp_path / "zoo", settings=PopulationSettings("adamw", batch_size=16))
    assert not np.array_equal(other["train_loss"], zoo["train_loss"])
