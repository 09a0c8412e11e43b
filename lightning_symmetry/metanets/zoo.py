"""A zoo: many trained networks of one architecture, as rows of an array on disk."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.metanets.zoo_append import check_size
from lightning_symmetry.metanets.zoo_factory import zoo_network
from lightning_symmetry.metanets.zoo_files import (
    DTYPES,
    WEIGHTS,
    ZooError,
    ZooHeader,
    canonical,
    read_constants,
    read_rows,
)
from lightning_symmetry.metanets.zoo_layout import ZooLayout
from lightning_symmetry.metanets.zoo_manifest import Manifest, checksummed, column


class StoredNetwork(NamedTuple):
    """What the files hold of one network: weights, record, integer buffers and the digest of the weights."""

    weights: np.ndarray
    record: dict[str, Any]
    counters: list[int]
    sha256: str


class Zoo:
    """Trained networks of one architecture, in a folder that :class:`ZooWriter` has written.

    Opening one reads what is known about the networks, not their weights, which stay in one file that is mapped to
    memory. It sees the networks that were there when it was opened, also while a writer adds others.

    Attributes:
        path: Folder of the zoo.
        header: What is true of all networks: layout, dtype, factory, versions of the libraries that trained them.
    """

    def __init__(
        self,
        path: Path,
        header: ZooHeader,
        manifest: Manifest,
        factory: Callable[[], nn.Module] | None,
        rows: np.ndarray | None = None,
    ) -> None:
        """Use :meth:`open` or :meth:`select`.

        Args:
            path: Folder of the zoo.
            header: Its header.
            manifest: Its manifest.
            factory: What builds the network, or None for the header's factory.
            rows: Places of the networks in the file; None for all.
        """
        self.path, self.header, self._manifest, self._factory = path, header, manifest, factory
        self._rows = np.arange(len(manifest)) if rows is None else rows
        self._map: np.ndarray | None = None
        self._template: nn.Module | None = None

    @classmethod
    def open(cls, path: str | Path, factory: Callable[[], nn.Module] | None = None) -> Zoo:
        """Open a zoo without reading its weights.

        Args:
            path: Its folder.
            factory: What builds its network, called without arguments; by default the factory in the header.

        Returns:
            The zoo.

        Raises:
            FileNotFoundError: If there is none.
            ZooError: If files are cut off, foreign, or of another version; the message names the file.
        """
        folder = Path(path)
        header, manifest = ZooHeader.read(folder), Manifest.read(folder)
        check_size(folder, header, len(manifest))
        return cls(folder, header, manifest, factory)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return (
            f"Zoo({str(self.path)!r}, {len(self)} networks of {self.layout.num_features} {self.header.dtype} weights)"
        )

    def __getitem__(self, name: str) -> np.ndarray:
        """Return one entry of all records.

        Integers, booleans and strings that every record has come as such; numbers of which some are floats, None or
        missing as float64 with nan for these; everything else as objects.

        Args:
            name: Name in the records.

        Raises:
            KeyError: If no record has it.
        """
        records = self.records
        if not any(name in record for record in records):
            known = sorted({key for record in records for key in record})
            raise KeyError(f"No record of {self.path} has {name!r}; there are {known}.")
        return column([record.get(name) for record in records])

    @property
    def layout(self) -> ZooLayout:
        """How a network lies in a row."""
        return self.header.layout

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was noted about each network, by position; not to be changed."""
        return [self._manifest.records[row] for row in self._rows]

    @property
    def indices(self) -> np.ndarray:
        """The `index` of each network, int64 of shape (n,)."""
        return np.array([record["index"] for record in self.records], dtype=np.int64)

    @property
    def weights(self) -> np.ndarray:
        """Weights, shape (n, P): mapped to memory; a copy where :meth:`select` chose scattered networks."""
        rows, everything = self._rows, self._mapped()
        if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return everything[rows[0] : rows[0] + len(rows)]
        return everything[rows]

    @property
    def fixed(self) -> Tensor:
        """Which numbers of a row are constants of asymmetric layers, which all networks share: booleans (P,)."""
        return self._shared[1]

    @cached_property
    def _shared(self) -> tuple[dict[str, Tensor], Tensor]:
        return read_constants(self.path, self.header.constants)

    def read(self, positions: Sequence[int] | np.ndarray | Tensor | None = None) -> Tensor:
        """Read weights as float32 into memory of their own.

        Args:
            positions: Which networks, in any order; None for all.

        Returns:
            Weights, shape (k, P), in the order of `positions`.

        Raises:
            IndexError: If there is no such position, or it is no integer.
            ZooError: If the file of weights was truncated meanwhile.
        """
        rows = self._rows if positions is None else self._rows[_chosen(positions)]
        dtype = DTYPES[self.header.dtype]
        found = read_rows(self.path / WEIGHTS, rows, self.layout.num_features, dtype)
        return torch.from_numpy(found.astype(np.float32, copy=False))

    def select(self, which: Callable[[dict[str, Any]], bool] | Sequence[int] | np.ndarray | Tensor) -> Zoo:
        """Return a view of some networks.

        Args:
            which: A predicate of records, positions in the order wanted, or booleans, one for each network.

        Returns:
            A zoo of the same files.

        Raises:
            IndexError: If there is no such position.
        """
        if callable(which):
            which = [bool(which(record)) for record in self.records]
        view = Zoo(self.path, self.header, self._manifest, self._factory, self._rows[_chosen(which)])
        view._map = self._map
        return view

    def stored(self, position: int) -> StoredNetwork:
        """Return what the files hold of one network.

        Args:
            position: Which one.

        Returns:
            Weights as stored, record, integer buffers and digest.

        Raises:
            IndexError: If there is no such position.
        """
        row, manifest = self._rows[position], self._manifest
        return StoredNetwork(self._mapped()[row], manifest.records[row], manifest.counters[row], manifest.digests[row])

    def network(self, position: int) -> nn.Module:
        """Build a network with its weights.

        Args:
            position: Which one.

        Returns:
            A module of its own on the CPU, in evaluation mode.

        Raises:
            ValueError: If it is not known how to build it, or what is built is another network.
            IndexError: If there is no such position.
        """
        stored = self.stored(position)
        if self._template is None:
            self._template = zoo_network(self.path, self.header, self._factory)
        network = copy.deepcopy(self._template)
        weights = torch.from_numpy(np.array(stored.weights, dtype=np.float32))
        state = dict(self.layout.unflatten(weights))
        state |= self._shared[0]
        counters = self.layout.having("counter")
        for entry, value in zip(counters, stored.counters, strict=True):
            state[entry.name] = torch.full(entry.shape, value, dtype=getattr(torch, entry.dtype))
        network.load_state_dict(state)
        return network

    def initial(self, position: int) -> nn.Module:
        """Build a network as it was before its training, from the seed in its record.

        Args:
            position: Which one.

        Returns:
            A module of its own on the CPU, in evaluation mode.

        Raises:
            ValueError: If no seed was noted, it is not known how to build it, or what is built is another network or
                has other constants.
            IndexError: If there is no such position.
        """
        seed = self.stored(position).record.get("seed")
        if seed is None:
            raise ValueError(f"{self.path} does not say how network {position} began: its record has no `seed`.")
        return zoo_network(self.path, self.header, self._factory, seed, self._shared[0])

    def checksum(self, progress: bool = True) -> str:
        """Read all networks and return a digest of what they are.

        It covers layout, weights and records (but not entries whose name begins with an underscore), by `index`: it
        does not depend on chunks, on the order of writing, on shards or on interruptions.

        Args:
            progress: Whether to show a progress bar.

        Returns:
            SHA-256, in hexadecimal.
        """
        digest = hashlib.sha256(self.header.content())
        order = np.argsort(self.indices, kind="stable")
        for position, sha256 in zip(order, self._digests(order, progress), strict=True):
            network = self.stored(position)
            digest.update(canonical([checksummed(network.record), network.counters, sha256]))
        return digest.hexdigest()

    def verify(self, progress: bool = True) -> None:
        """Read all networks and compare them with the digests that were noted when they were written.

        Args:
            progress: Whether to show a progress bar.

        Raises:
            ZooError: If any byte of weights or constants differs; the message names networks. Damaged records are
                noticed on opening.
        """
        read_constants(self.path, self.header.constants)
        found = self._digests(np.arange(len(self)), progress)
        damaged = [position for position, sha256 in enumerate(found) if sha256 != self.stored(position).sha256]
        if damaged:
            raise ZooError(
                f"{self.path / WEIGHTS} is damaged in {len(damaged)} networks of {len(self)}, the first at position "
                f"{damaged[0]} (index {self.indices[damaged[0]]}). Copy the zoo again, or select the others: positions "
                f"{damaged[:10]} are wrong."
            )

    def _digests(self, positions: np.ndarray, progress: bool) -> Iterable[str]:
        for position in tqdm(positions, "reading networks", disable=not progress, leave=False):
            yield hashlib.sha256(self.stored(position).weights).hexdigest()

    def _mapped(self) -> np.ndarray:
        if self._map is None:
            shape, dtype = (len(self._manifest), self.layout.num_features), DTYPES[self.header.dtype]
            # An empty file cannot be mapped.
            self._map = np.memmap(self.path / WEIGHTS, dtype, "r", 0, shape) if shape[0] else np.empty(shape, dtype)
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array pickles as a copy of what it holds; a worker process is to map the file itself.
        return {**self.__dict__, "_map": None}


def _chosen(which: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Return an index of rows; nothing at all is of integers, where numpy takes it for floats."""
    chosen = np.asarray(which)
    return chosen if chosen.size or chosen.dtype == bool else chosen.astype(np.int64)
