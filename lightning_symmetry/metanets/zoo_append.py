"""Add whole chunks of networks to the files of a zoo."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_symmetry.metanets.zoo_files import (
    DTYPES,
    HEADER,
    MANIFEST,
    WEIGHTS,
    ZooError,
    ZooHeader,
    flush,
    flush_folder,
    read_constants,
    write_constants,
)
from lightning_symmetry.metanets.zoo_lock import WriteLock
from lightning_symmetry.metanets.zoo_manifest import Manifest, chunk_lines


class Appender:
    """The files of a zoo, open for writing: new ones, or those of a zoo that goes on.

    The weights of a chunk are written, and on the disk, before the lines of the manifest that make them count. What a
    stopped writer has left after the last whole chunk is overwritten.

    Attributes:
        manifest: What is known about the networks that are there.
    """

    def __init__(self, folder: Path, header: ZooHeader, constants: dict[str, Tensor], fixed: Tensor) -> None:
        """Open the files, which are made if they are not there.

        Args:
            folder: Folder of the zoo.
            header: What is true of all networks.
            constants: The tensors that they share.
            fixed: Which numbers of a row are such constants, shape (P,).

        Raises:
            ValueError: If there is a zoo of other networks.
            ZooError: If what is there is damaged, foreign or being written.
            OSError: If the folder cannot be made or written, as on a full disk.
        """
        self.folder, self.header = folder, header
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriteLock(folder)
            try:
                self._start(constants, fixed)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}: the zoo cannot be opened for writing", str(folder)
            ) from error

    def _start(self, constants: dict[str, Tensor], fixed: Tensor) -> None:
        files = (self.folder / WEIGHTS, self.folder / MANIFEST)
        if (self.folder / HEADER).exists():
            ZooHeader.read(self.folder).check_same(self.header, str(self.folder), "the network to write")
            read_constants(self.folder, self.header.constants)  # no networks for a zoo that cannot be read
        elif found := [file for file in files if file.exists()]:
            raise ZooError(f"{found[0]} is there without {HEADER}: it belongs to no zoo. Choose another folder.")
        else:
            write_constants(self.folder, constants, fixed)
            self.header.write(self.folder)
        self.manifest = Manifest.read(self.folder)
        check_size(self.folder, self.header, len(self.manifest))
        for file in files:
            file.touch()
        flush_folder(self.folder)
        flush_folder(self.folder.parent)
        self._weights, self._lines = (file.open("r+b", buffering=0) for file in files)

    def append(self, rows: np.ndarray, records: Sequence[dict[str, Any]], counters: Sequence[list[int]]) -> None:
        """Add a chunk, whole or, if an error is raised, not at all.

        Args:
            rows: Weights, shape (k, P), of the header's dtype.
            records: What is known about each network.
            counters: Integer buffers of each.

        Raises:
            OSError: If the disk is full or fails; the zoo is left as it was.
        """
        assert rows.dtype == DTYPES[self.header.dtype]
        digests = [hashlib.sha256(row).hexdigest() for row in rows]
        entries = [
            {"record": record, "counters": list(numbers), "sha256": digest}
            for record, numbers, digest in zip(records, counters, digests, strict=True)
        ]
        lines = chunk_lines(entries)
        try:
            self._lines.truncate(self.manifest.size)  # before the weights that a chunk cut short speaks of
            self._write(self._weights, len(self.manifest) * self.header.row_bytes, rows)
            self._write(self._lines, self.manifest.size, lines)
        except OSError as error:
            self._forget()
            raise OSError(
                error.errno,
                f"{error.strerror}: a chunk of {len(rows)} networks ({rows.nbytes / 1e6:.1f} MB) was not written. The "
                f"zoo keeps the {len(self.manifest)} networks that it had; go on after making room",
                str(self.folder),
            ) from error
        except BaseException:
            self._forget()
            raise
        self.manifest.extend(entries, len(lines))

    @staticmethod
    def _write(file: Any, offset: int, content: Any) -> None:
        file.truncate(offset)
        file.seek(offset)
        left = memoryview(content).cast("B")
        while left:
            left = left[file.write(left) :]
        flush(file)

    def _forget(self) -> None:
        """Cut off what does not count. Where even that fails, readers pass it over and the next chunk covers it."""
        with suppress(OSError):
            self._lines.truncate(self.manifest.size)
            self._weights.truncate(len(self.manifest) * self.header.row_bytes)

    def close(self) -> None:
        """Close the files and let other writers in; again does nothing."""
        self._weights.close()
        self._lines.close()
        self._lock.release()


def check_size(folder: Path, header: ZooHeader, networks: int) -> None:
    """Check that the file of weights holds all networks of the manifest.

    Args:
        folder: Folder of the zoo.
        header: Its header.
        networks: How many networks the manifest has.

    Raises:
        ZooError: If it does not.
    """
    file = folder / WEIGHTS
    size, needed = file.stat().st_size if file.exists() else 0, networks * header.row_bytes
    if size < needed:
        raise ZooError(
            f"{file} is cut off: {networks} networks of {header.layout.num_features} {header.dtype} weights need "
            f"{needed} bytes, it has {size}. Copy the zoo again."
        )
