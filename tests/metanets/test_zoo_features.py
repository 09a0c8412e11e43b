"""Statistics of a zoo's weights are those of the weights, kept, and never those of another zoo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metanets.zoo_cases import asymmetric, plain, record, trained, write

from lightning_symmetry.data import ZooData
from lightning_symmetry.metanets import StatNN, Zoo, ZooWriter, weight_statistics, zoo_features
from lightning_symmetry.metanets.zoo_features import FEATURES, weights_digest, zoo_statistics


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "zoo", range(16))


@pytest.fixture
def computed(monkeypatch):
    """Count how often statistics are computed."""
    calls, compute = [], zoo_features._compute
    monkeypatch.setattr(zoo_features, "_compute", lambda *given: (calls.append(1), compute(*given))[1])
    return calls


@pytest.mark.parametrize("make", [plain, asymmetric])
@pytest.mark.parametrize("chunk", [1, 100, 2**24])
def test_they_are_those_of_the_weights(make, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo_features, "_CHUNK", chunk)
    zoo = Zoo.open(write(tmp_path / "zoo", range(7), make))
    found = zoo_statistics(zoo)
    expected = []
    free = ~zoo.fixed.numpy()
    for row in zoo.weights:
        at = 0
        expected.append([])
        for entry in zoo.layout.in_rows:
            size = int(np.prod(entry.shape))
            part = row[at : at + size][free[at : at + size]].astype(np.float64)
            at += size
            if len(part):
                expected[-1] += [part.mean(), part.var(), *np.quantile(part, [0, 0.25, 0.5, 0.75, 1])]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_they_are_computed_once(path, computed):
    first = zoo_statistics(Zoo.open(path))
    assert torch.equal(zoo_statistics(Zoo.open(path)), first)
    assert len(computed) == 1
    assert {file.name for file in path.glob("*stat*")} == {FEATURES}


def test_networks_that_came_later_are_in_them(path, computed):
    zoo_statistics(Zoo.open(path))
    write(path, range(16, 20))
    zoo = Zoo.open(path)
    found = zoo_statistics(zoo)
    assert len(computed) == 2 and len(found) == 20
    assert torch.equal(found, weight_statistics(zoo.read(), {e.name: e.shape for e in zoo.layout.in_rows}))


def test_another_zoo_in_the_same_place_has_its_own(path, tmp_path, computed):
    other = write(tmp_path / "other", range(1, 17))
    zoo_statistics(Zoo.open(path))
    kept = (path / FEATURES).read_bytes()
    (other / FEATURES).write_bytes(kept)
    found = zoo_statistics(Zoo.open(other))
    assert len(computed) == 2
    torch.testing.assert_close(found[:-1], zoo_statistics(Zoo.open(path))[1:])
    assert (other / FEATURES).read_bytes() != kept


@pytest.mark.parametrize("damage", ["cut off", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_computed_again(damage, path, computed):
    first = zoo_statistics(Zoo.open(path))
    file = path / FEATURES
    content = bytearray(file.read_bytes())
    if damage == "cut off":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 3] ^= 0xFF
    elif damage == "empty":
        content = b""
    else:
        content = b"no archive at all"
    file.write_bytes(bytes(content))
    assert torch.equal(zoo_statistics(Zoo.open(path)), first)
    assert len(computed) == 2
    assert torch.equal(zoo_statistics(Zoo.open(path)), first)
    assert len(computed) == 2


def test_a_folder_that_cannot_be_written(path, monkeypatch, computed):
    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(zoo_features, "replacing", full)
    first = zoo_statistics(Zoo.open(path))
    assert torch.equal(zoo_statistics(Zoo.open(path)), first) and len(computed) == 2
    assert not (path / FEATURES).exists()


def test_digests_tell_weights_and_their_order(path, tmp_path):
    zoo = Zoo.open(path)
    assert weights_digest(Zoo.open(path)) == weights_digest(zoo)
    assert weights_digest(zoo.select(range(15))) != weights_digest(zoo)
    assert weights_digest(zoo.select([1, 0, *range(2, 16)])) != weights_digest(zoo)
    assert weights_digest(Zoo.open(write(tmp_path / "same", range(16), chunk=5))) == weights_digest(zoo)


def test_batches_of_statistics_stand_beside_their_targets(tmp_path):
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        states = [trained(plain, index).state_dict() for index in range(20)]
        states[4]["0.weight"][0, 0] = torch.nan  # diverged, and left out
        writer.append(states, [record(index) for index in range(20)])
    weights = ZooData(str(tmp_path / "zoo"), batch_size=4)
    statistics = ZooData(str(tmp_path / "zoo"), batch_size=4, features="statistics")
    assert statistics.num_features == 28 and weights.num_features == 23
    for split in ("train", "val", "test"):
        for (rows, true), (found, same) in zip(
            weights.eval_dataloader(split), statistics.eval_dataloader(split), strict=True
        ):
            assert torch.equal(found, weight_statistics(rows, weights.layout)) and torch.equal(true, same)
    torch.manual_seed(0)
    direct = StatNN(weights.layout, (8,))
    cached = StatNN(statistics.layout, (8,), precomputed=True)
    cached.load_state_dict(direct.state_dict())
    a, b = next(iter(weights.eval_dataloader("test"))), next(iter(statistics.eval_dataloader("test")))
    assert torch.equal(direct(a[0]), cached(b[0]))
    with pytest.raises(ValueError, match="features"):
        ZooData(str(tmp_path / "zoo"), features="norms")
