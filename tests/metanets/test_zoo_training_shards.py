"""Shards of a zoo, on one machine after the other or in the ranks of a launch."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from metanets.forked import needs_fork, run_forked, start_forked
from metanets.zoo_training_cases import NETWORKS, arm, mlp, train, trapped

from lightning_symmetry.metanets import Zoo, ZooError, merge_zoos
from lightning_symmetry.metanets.zoo_lock import WriteLock
from lightning_symmetry.metanets.zoo_plan import default_workers, launched_shard, parse_shard
from lightning_symmetry.metanets.zoo_shards import merge_shards, shard_folder


@pytest.fixture(scope="module")
def checksum(tmp_path_factory) -> str:
    return train(tmp_path_factory.mktemp("whole") / "zoo").checksum(False)


def test_shards_are_the_zoo(tmp_path, checksum):
    path = tmp_path / "zoo"
    shards = [train(path, shard=(i, 3)) for i in (2, 0)]
    assert [shard.path.name for shard in shards] == ["zoo.shard-2-of-3", "zoo.shard-0-of-3"]
    with pytest.raises(ZooError, match=r"zoo.shard-1-of-3 of 3 shards beside .* are not finished"):
        train(path)
    shards.append(train(path, shard=(1, 3)))
    assert sum(map(len, shards)) == NETWORKS and not path.exists()
    assert merge_zoos(shards, tmp_path / "by_hand", progress=False).checksum(False) == checksum
    assert merge_shards(path, remove=False, progress=False).checksum(False) == checksum
    assert shards[0].path.exists()
    assert train(path).checksum(False) == train(path, shard=(1, 3)).checksum(False) == checksum
    shutil.rmtree(path)
    assert train(path).checksum(False) == checksum  # a call without a shard puts them together
    assert [other.name for other in tmp_path.iterdir() if "zoo" in other.name] == ["zoo"]
    assert merge_shards(path).checksum(False) == checksum  # again does nothing


def test_more_shards_than_chunks(tmp_path, checksum):
    for i in range(6):
        assert len(train(tmp_path / "zoo", shard=(i, 6))) == (3 if i < 4 else 0)
    assert merge_shards(tmp_path / "zoo", progress=False).checksum(False) == checksum


def rank(path: Path, i: int, n: int, delay: float) -> None:
    os.environ |= {"RANK": str(i), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    time.sleep(delay)
    zoo = train(path, workers=1)
    good = zoo.path == path and len(zoo) == NETWORKS
    (path.parent / f"rank{i}").write_text(zoo.checksum(False) if good else "not the zoo")


@needs_fork
@pytest.mark.parametrize("delays", [(0, 0), (0.7, 0), (0, 0.7)])
def test_ranks_of_a_launch(tmp_path, checksum, delays):
    path = tmp_path / "zoo"
    ranks = [start_forked(rank, path, i, 2, delay) for i, delay in enumerate(delays)]
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [(tmp_path / f"rank{i}").read_text() for i in range(2)] == [checksum] * 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0", "rank1", "zoo"]


@needs_fork
def test_who_merges_was_killed(tmp_path, checksum):
    path = tmp_path / "zoo"
    for i in range(2):
        train(path, shard=(i, 2))
    for left in (".zoo.merging", "..zoo.merging.0123abcd", ".a.zoo.merging"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "weights.bin").write_bytes(b"half")
    lock = WriteLock(shard_folder(path, 0, 2))
    with pytest.raises(ZooError, match="being written"):
        merge_shards(path)
    lock.release()
    assert run_forked(rank, path, 1, 2, 0) == 0
    assert (tmp_path / "rank1").read_text() == checksum
    assert sorted(file.name for file in tmp_path.iterdir()) == [".a.zoo.merging", "rank1", "zoo"]


def test_divisions_do_not_mix(tmp_path):
    path = tmp_path / "zoo"
    train(path, shard=(0, 2))
    with pytest.raises(ZooError, match="shards of a division into 2, not 3"):
        train(path, shard=(0, 3))
    with pytest.raises(ZooError, match="another training: its seed is another"):
        train(path, shard=(1, 2), seed=8)
    other = train(tmp_path / "other", shard=(1, 2), seed=8)
    shutil.copytree(other.path, shard_folder(path, 1, 2))
    with pytest.raises(ZooError, match="another training: its seed is another"):
        merge_shards(path)
    shutil.rmtree(shard_folder(path, 1, 2))
    shutil.copytree(other.path, shard_folder(path, 1, 5))
    with pytest.raises(ZooError, match="divisions into 2 and 5"):
        train(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match=r"no shards beside .*nothing, such as nothing.shard-0-of-2"):
        merge_shards(tmp_path / "nothing")


def test_a_zoo_begun_whole_is_finished_whole(tmp_path, checksum):
    arm(tmp_path, "fail", 90)
    with pytest.raises(RuntimeError, match="failed"):
        trapped(tmp_path)
    with pytest.raises(ZooError, match="unfinished zoo that is not in shards"):
        trapped(tmp_path, shard=(0, 2))
    assert trapped(tmp_path).checksum(False) == checksum


def test_parse_shard():
    assert parse_shard("0/4") == (0, 4) and parse_shard(" 3 / 4 ") == (3, 4) and parse_shard(None) is None
    for text in ("4", "a/b", "1/2/3", "-1/2", ""):
        with pytest.raises(ValueError, match=r"'i/n', such as '0/4', but got"):
            parse_shard(text)
    for text in ("4/4", "0/0"):
        with pytest.raises(ValueError, match="i from 0 to n - 1"):
            parse_shard(text)
    with pytest.raises(ValueError, match="i from 0 to n - 1"):
        train(Path("nowhere"), shard=(2, 2))


def test_launches(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched_shard() is None
    alone = default_workers()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_workers() == alone  # what is left of another launch
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2000")
    assert launched_shard() == (1, 2000) and default_workers() == 1
    monkeypatch.setenv("RANK", "2000")
    with pytest.raises(ValueError, match="i = 2000, n = 2000"):
        launched_shard()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched_shard() is None


def test_a_process_group(monkeypatch, tmp_path, checksum):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert launched_shard() is None  # the group knows better
        assert train(tmp_path / "zoo", factory=mlp).checksum(False) == checksum
    finally:
        torch.distributed.destroy_process_group()


def test_a_damaged_shard(tmp_path):
    path = tmp_path / "zoo"
    shards = [train(path, shard=(i, 2)).path for i in range(2)]
    with (shards[1] / "weights.bin").open("r+b") as file:
        file.write(b"??")
    with pytest.raises(ZooError, match=r"shard-1-of-2.weights.bin is damaged"):
        merge_shards(path, progress=False)
    assert not path.exists() and all(shard.exists() for shard in shards)
    assert not list(tmp_path.glob(".*"))
    assert len(Zoo.open(shards[0])) == 6
