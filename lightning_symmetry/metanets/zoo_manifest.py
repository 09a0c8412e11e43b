r"""The manifest of a zoo: one line of JSON for each network, and one for each chunk that makes its lines count.

The lines of a chunk are ``{"record": {...}, "counters": [...], "sha256": "..."}``, the digest being that of the
network's weights; after them comes ``{"chunk": k, "sha256": "..."}`` with the digest of the k lines. A chunk counts if
and only if this last line is there, which is written when the weights are on the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_symmetry.metanets.zoo_files import MANIFEST, ZooError, canonical

STATUSES = ("ok", "diverged")
_CHUNK = b'{"chunk":'


@dataclass
class Manifest:
    """What is known about the networks, by position.

    Attributes:
        records: What was noted about each network; each has an ``"index"`` and a ``"status"``.
        counters: Its integer buffers, in the order of the layout.
        digests: Digest of its stored weights.
        size: Bytes of the manifest that count.
        tail: Bytes after these: of a chunk that was being written.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    counters: list[list[int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    size: int = 0
    tail: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def extend(self, entries: list[dict[str, Any]], size: int) -> None:
        """Take in a chunk.

        Args:
            entries: Its lines.
            size: How many bytes they are, with the line of the chunk.
        """
        for entry in entries:
            self.records.append(entry["record"])
            self.counters.append(entry["counters"])
            self.digests.append(entry["sha256"])
        self.size += size

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a zoo; the part of a chunk that was not finished is left out.

        Args:
            folder: Folder of the zoo.

        Raises:
            ZooError: If a line that counts is damaged.
        """
        file, manifest, lines = folder / MANIFEST, cls(), []
        content = file.read_bytes() if file.exists() else b""
        *whole, _ = content.split(b"\n")
        for number, line in enumerate(whole, 1):
            if not line.startswith(_CHUNK):
                lines.append(line)
                continue
            entries = _chunk(lines, line)
            if entries is None:
                raise _damaged(file, number - len(lines), number, len(manifest))
            manifest.extend(entries, sum(map(len, lines)) + len(lines) + len(line) + 1)
            lines = []
        # A writer that was stopped leaves a line unfinished, never a whole one that is wrong.
        if lines and _entries(lines) is None:
            raise _damaged(file, len(whole) - len(lines) + 1, len(whole), len(manifest))
        manifest.tail = len(content) - manifest.size
        return manifest


def chunk_lines(entries: list[dict[str, Any]]) -> bytes:
    """Return the lines of a chunk of networks, the last of which makes the others count."""
    lines = b"".join(json.dumps(entry, allow_nan=False).encode() + b"\n" for entry in entries)
    last = {"chunk": len(entries), "sha256": hashlib.sha256(lines).hexdigest()}
    return lines + json.dumps(last).encode() + b"\n"


def plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as it is read back: numbers of NumPy and torch become Python's, not-finite ones None.

    Args:
        record: What is known about a network.

    Raises:
        ValueError: If something in it cannot be written as JSON.
    """
    try:
        plain = _plain(dict(record))
        canonical(plain)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from tensors of several numbers
        raise ValueError(
            f"Expected records to hold numbers, strings, booleans, None, lists and dictionaries, but got {record!r}."
        ) from error
    return plain


def checksummed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a record that belongs to a zoo's checksum: what does not begin with an underscore."""
    return {name: value for name, value in record.items() if not name.startswith("_")}


def column(values: Sequence[Any]) -> np.ndarray:
    """Return one entry of all records as an array of the narrowest kind; None among numbers is nan.

    Args:
        values: The entry of each record.
    """
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and kinds <= {int, bool, str}:
        return np.array(values)
    if kinds <= {int, float, type(None)}:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if (hasattr(value, "item") and not isinstance(value, numbers.Number)) or type(value).__module__ == "numpy":
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _entries(lines: list[bytes]) -> list[dict[str, Any]] | None:
    try:
        entries = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return None
    return entries if all(isinstance(entry, dict) and "record" in entry for entry in entries) else None


def _chunk(lines: list[bytes], last: bytes) -> list[dict[str, Any]] | None:
    """Return the entries of a chunk; None if its lines are not those that its last line speaks of."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line + b"\n")
    try:
        said = json.loads(last)
        same = said == {"chunk": len(lines), "sha256": digest.hexdigest()}
    except ValueError:
        return None
    return _entries(lines) if same else None


def _damaged(file: Path, first: int, last: int, networks: int) -> ZooError:
    return ZooError(
        f"{file} is damaged between lines {first} and {last}. Copy the zoo again; or delete the file from line {first} "
        f"on, which leaves the {networks} networks before, and write the others again."
    )
