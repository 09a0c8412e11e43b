"""Statistics of the weights of a zoo, computed once and kept beside them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_symmetry.metanets.stat_nn import STATISTICS, weight_statistics
from lightning_symmetry.metanets.weight_layout import WeightLayout
from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_files import replacing

FEATURES = "statistics.npz"
_VERSION = 1  # of what the numbers mean
_CHUNK = 2**24  # weights that are read at a time


def zoo_statistics(zoo: Zoo, progress: bool = True) -> Tensor:
    """Return the statistics of each tensor of each network (:func:`~lightning_symmetry.weight_statistics`).

    They are computed once and kept in a file of the zoo's folder, with a digest of the networks that they are of:
    where networks were added, written anew or merged in another order, or the file is damaged, they are computed again.
    Where the folder cannot be written, they are computed every time.

    Args:
        zoo: The zoo; of a selection, its networks. Those that diverged have statistics that are not finite.
        progress: Whether to show a progress bar when they are computed.

    Returns:
        float32 of shape ``(N, 7 T)``, by position.
    """
    file, digest = zoo.path / FEATURES, f"{_VERSION}-{weights_digest(zoo)}"
    kept = _read(file, digest)
    if kept is None:
        kept = _compute(zoo, progress)
        # A folder for reading only, or a full disk: computed again, it is the same.
        with suppress(OSError), replacing(file) as stream:
            stream.write(_packed(kept, digest))
    return torch.from_numpy(kept)


def _compute(zoo: Zoo, progress: bool) -> np.ndarray:
    layout = WeightLayout.of_rows(zoo.layout, zoo.fixed)
    size = max(1, _CHUNK // layout.num_features)
    found = np.empty((len(zoo), len(STATISTICS) * len(layout.free_counts)), np.float32)
    with tqdm(total=len(zoo), desc="statistics of weights", unit="network", disable=not progress, leave=False) as bar:
        for start in range(0, len(zoo), size):
            positions = range(start, min(start + size, len(zoo)))
            found[start : start + size] = weight_statistics(zoo.read(positions), layout).numpy()
            bar.update(len(positions))
    return found


def weights_digest(zoo: Zoo) -> str:
    """Return a digest of the weights of a zoo, by position, without reading them: each has one in the manifest."""
    digest = hashlib.sha256(zoo.header.content())
    for position in range(len(zoo)):
        digest.update(zoo.stored(position).sha256.encode())
    return digest.hexdigest()


def _packed(values: np.ndarray, digest: str) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, values=values, networks=np.array(digest))
    return buffer.getvalue()


def _read(file: Path, digest: str) -> np.ndarray | None:
    """Read the statistics of the networks of that digest; None if the file has others, or is not whole."""
    # The archive has a checksum of its own, which is compared when it is read.
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as content:
        if content["networks"].item() == digest:
            return content["values"]
    return None
