"""Put shards of a zoo together."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_append import Appender
from lightning_symmetry.metanets.zoo_files import WEIGHTS, ZooError, flush_folder, read_constants

CHUNK_BYTES = 64 * 2**20


def merge_zoos(zoos: Sequence[str | Path | Zoo], out: str | Path, progress: bool = True) -> Zoo:
    """Write the networks of several zoos into one, in the order of their `index`.

    The result does not depend on the order of `zoos`, and is that of one writer who wrote all networks in order.
    Weights are compared with their digests on the way. A merge that is killed leaves a hidden folder beside `out`,
    ``.NAME.*``, which can be removed.

    Args:
        zoos: Folders, or open zoos such as a view that :meth:`Zoo.select` gave.
        out: Folder of the new zoo, which must not exist; it is there when it is complete.
        progress: Whether to show a progress bar.

    Returns:
        The new zoo.

    Raises:
        FileExistsError: If `out` exists.
        ValueError: If architectures, constants, dtypes or factories differ, or an index is in two zoos; the message
            names both sides.
        ZooError: If a zoo is damaged.
        OSError: If the disk is full; nothing is left behind.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another folder for the merged zoo, or remove it.")
    opened = [zoo if isinstance(zoo, Zoo) else Zoo.open(zoo) for zoo in zoos]
    if not opened:
        raise ValueError("Expected at least one zoo to merge, but got none.")
    first = opened[0]
    for other in opened[1:]:
        first.header.check_same(other.header, str(first.path), str(other.path))
    places = _in_order(opened)
    constants, fixed = read_constants(first.path, first.header.constants)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        files = Appender(partial, first.header, constants, fixed)
        try:
            step = max(1, CHUNK_BYTES // first.header.row_bytes)
            for start in tqdm(range(0, len(places), step), "merging", disable=not progress, leave=False):
                chunk = [opened[which].stored(position) for which, position in places[start : start + step]]
                files.append(
                    np.stack([network.weights for network in chunk]),
                    [network.record for network in chunk],
                    [network.counters for network in chunk],
                )
                written = files.manifest.digests[start:]
                for (which, _), network, sha256 in zip(places[start : start + step], chunk, written, strict=True):
                    if network.sha256 != sha256:
                        raise ZooError(
                            f"{opened[which].path / WEIGHTS} is damaged: the network of index "
                            f"{network.record['index']} is not what was written. Copy the zoo again; Zoo.verify() "
                            "names all that are damaged."
                        )
        finally:
            files.close()
        partial.rename(out)
        flush_folder(out.parent)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: the merged zoo was not written", str(out)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Zoo.open(out)


def _in_order(zoos: list[Zoo]) -> list[tuple[int, int]]:
    """Return number of the zoo and position in it of each network, by index."""
    found: dict[int, tuple[int, int]] = {}
    for which, zoo in enumerate(zoos):
        for position, index in enumerate(zoo.indices.tolist()):
            if index in found:
                raise ValueError(
                    f"{zoos[found[index][0]].path} and {zoo.path} both have a network of index {index}: give each "
                    "network of all shards an `index` of its own."
                )
            found[index] = (which, position)
    return [found[index] for index in sorted(found)]
