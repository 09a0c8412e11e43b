"""Shards of a zoo: parts of its chunks, each trained into a folder of its own beside that of the whole."""

from __future__ import annotations

import glob
import logging
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_files import HEADER, ZooError, flush_folder
from lightning_symmetry.metanets.zoo_lock import WriteLock, ZooBusyError
from lightning_symmetry.metanets.zoo_merge import merge_zoos
from lightning_symmetry.metanets.zoo_notes import TrainingNotes

POLL_SECONDS = 1.0
_log = logging.getLogger(__name__)


class ZooUnfinishedError(ZooError):
    """Networks of a shard are yet to be trained."""


def shard_folder(path: str | Path, i: int, n: int) -> Path:
    """Return the folder of shard i of n, ``PATH.shard-i-of-n``.

    Args:
        path: Folder of the whole zoo.
        i: Which shard, from 0.
        n: Number of shards.
    """
    path = Path(path)
    return path.with_name(f"{path.name}.shard-{i}-of-{n}")


def shard_folders(path: str | Path) -> list[Path]:
    """Return the folders of all shards of a zoo of which one is there, in order; some may not be there.

    Args:
        path: Folder of the whole zoo.

    Raises:
        ZooError: If there are shards of two divisions.
    """
    path = Path(path)
    pattern = re.compile(re.escape(path.name) + r"\.shard-(\d+)-of-(\d+)")
    found = [match for other in path.parent.glob("*") if (match := pattern.fullmatch(other.name)) and other.is_dir()]
    counts = sorted({int(match[2]) for match in found})
    if len(counts) > 1:
        raise ZooError(
            f"Beside {path} are shards of divisions into {' and '.join(map(str, counts))}: remove those that are not "
            "to be gone on with."
        )
    return [shard_folder(path, i, n) for n in counts for i in range(n)]


def is_finished(folder: Path) -> bool:
    """Return whether all networks of a zoo or of a shard have been trained.

    Args:
        folder: Its folder.

    Raises:
        ZooError: If what is there is damaged.
    """
    notes = TrainingNotes.read(folder)
    return notes is not None and (folder / HEADER).exists() and len(Zoo.open(folder)) == notes.here


def merge_shards(path: str | Path, remove: bool = True, progress: bool = True) -> Zoo:
    """Put the shards of a zoo together, when all are finished: ``PATH.shard-i-of-n`` become ``PATH``.

    The result has the checksum of a zoo that was trained in one piece. Several processes may call this at a time: one
    does it, the others raise or return what is there.

    Args:
        path: Folder of the whole zoo. Shards that were trained elsewhere are to be copied beside it first.
        remove: Whether to delete the shards when the whole is there.
        progress: Whether to show a progress bar.

    Returns:
        The whole zoo.

    Raises:
        FileNotFoundError: If there is no shard.
        ZooError: If one is not finished, is damaged or being written, or they are of different trainings.
        OSError: If the disk is full: both the shards and the whole are there for a while. The shards stay.
    """
    path = Path(path)
    folders = shard_folders(path)
    if is_finished(path):
        return Zoo.open(path)
    if not folders:
        raise FileNotFoundError(f"There are no shards beside {path}, such as {shard_folder(path, 0, 2).name}.")
    if missing := [folder.name for folder in folders if not is_finished(folder)]:
        raise ZooUnfinishedError(f"{', '.join(missing)} of {len(folders)} shards beside {path} are not finished.")
    lock = WriteLock(folders[0])
    try:
        if not is_finished(path):  # by another process, while this one looked
            _merge(path, folders, progress)
        if remove:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
    return Zoo.open(path)


def merge_when_finished(path: Path, progress: bool) -> Zoo:
    """Merge the shards of a launch when all are finished, or wait until another rank has.

    Args:
        path: Folder of the whole zoo.
        progress: Whether to show a progress bar.

    Returns:
        The whole zoo.

    Raises:
        ZooError: If the shards are damaged, or do not fit together.
    """
    waiting = False
    while True:
        try:
            return merge_shards(path, progress=progress)
        except (ZooUnfinishedError, ZooBusyError) as error:
            if not waiting:
                _log.info("Waiting for other ranks: %s", error)
            waiting = True
        except (ZooError, OSError):
            # Shards that another rank is just removing are in pieces, but then the whole is there.
            if not is_finished(path):
                raise
        time.sleep(POLL_SECONDS)


def _merge(path: Path, folders: list[Path], progress: bool) -> None:
    if path.exists():
        raise ZooError(f"{path} exists, and is no finished zoo: remove it, then merge the shards beside it.")
    first, *others = (TrainingNotes.read(folder) for folder in folders)
    assert first is not None
    for folder, other in zip(folders[1:], others, strict=True):
        assert other is not None
        other.check_same(first, folder)
    partial = path.with_name(f".{path.name}.merging")
    # Of processes that were killed, here or in `merge_zoos`:
    for left in [partial, *path.parent.glob(f".{glob.escape(partial.name)}.*")]:
        shutil.rmtree(left, ignore_errors=True)
    try:
        whole = merge_zoos(folders, partial, progress)
        if len(whole) != first.networks:
            raise ZooError(f"The shards beside {path} have {len(whole)} networks together, not {first.networks}.")
        replace(first, here=first.networks).write(partial)
        partial.rename(path)
        flush_folder(path.parent)  # before the shards go
    finally:
        shutil.rmtree(partial, ignore_errors=True)
