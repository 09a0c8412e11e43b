"""The files of a zoo: what they are called, the header, and writing that is whole or not there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from lightning_symmetry.metanets.zoo_layout import ZooLayout

FORMAT = 1
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
HEADER, CONSTANTS, WEIGHTS, MANIFEST = "header.json", "constants.pt", "weights.bin", "manifest.jsonl"


class ZooError(ValueError):
    """A zoo's files are not whole, not those of a zoo, or in use."""


@dataclass(frozen=True)
class ZooHeader:
    """What is true of all networks of a zoo.

    Attributes:
        layout: How a network lies in a row.
        dtype: ``"float32"`` or ``"float16"``, of the stored weights.
        constants: Digest of the constants.
        factory: How to build the network: ``{"function": "module:name", "arguments": {...}}``, or None.
        versions: Versions of the libraries that began the zoo. They are for information: nothing is compared.
    """

    layout: ZooLayout
    dtype: str
    constants: str
    factory: dict[str, Any] | None
    versions: dict[str, str]

    @property
    def row_bytes(self) -> int:
        """Size of one network's weights."""
        return self.layout.num_features * DTYPES[self.dtype].itemsize

    def content(self) -> bytes:
        """Return what a zoo's checksum covers: layout, dtype and constants, but not how or by what they were made."""
        return canonical([self.layout.to_json(), self.dtype, self.constants])

    def check_same(self, other: ZooHeader, left: str, right: str) -> None:
        """Check that networks of both fit in one zoo.

        Args:
            other: The other header.
            left: What to call this one in the error.
            right: What to call the other.

        Raises:
            ValueError: If they do not; the message names both sides.
        """
        found = self.layout.difference(other.layout, left, right)
        if not found and self.constants != other.constants:
            found = f"the masks or constants of {left} and {right} differ (made asymmetric with other seeds?)"
        for field, what in (("dtype", "weights"), ("factory", "a factory")):
            mine, theirs = getattr(self, field), getattr(other, field)
            if not found and mine != theirs:
                found = f"{left} has {what} {mine}, {right} has {what} {theirs}"
        if found:
            raise ValueError(f"Networks of {left} and {right} do not fit in one zoo: {found}.")

    def write(self, folder: Path) -> None:
        """Write the header; the folder is a zoo from then on."""
        content = {"kind": "zoo of networks", "format": FORMAT, "dtype": self.dtype, "constants": self.constants}
        content |= {"factory": self.factory, "versions": self.versions, "entries": self.layout.to_json()}
        digest = hashlib.sha256(canonical(content)).hexdigest()
        with replacing(folder / HEADER) as file:
            file.write(json.dumps({**content, "sha256": digest}, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> ZooHeader:
        """Read the header of a zoo.

        Args:
            folder: Folder of the zoo.

        Raises:
            FileNotFoundError: If there is no zoo.
            ZooError: If the header is damaged, foreign or of another version.
        """
        file = folder / HEADER
        if not file.is_file():
            raise FileNotFoundError(f"There is no zoo at {folder}: {file} is missing. ZooWriter makes one.")
        try:
            content = json.loads(file.read_bytes())
            known = content["kind"] == "zoo of networks"
            stored = content["format"]
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ZooError(f"{file} is damaged, or no header of a zoo. Copy the zoo again, or choose another folder.")
        if stored != FORMAT:
            raise ZooError(
                f"{file} has format {stored}, but this version of lightning_symmetry reads format {FORMAT}. Open the "
                "zoo with the version that wrote it (noted in the header), or write it anew."
            )
        try:
            if content.pop("sha256") != hashlib.sha256(canonical(content)).hexdigest():
                raise ValueError("its digest is another")
            layout = ZooLayout.from_json(content["entries"])
            header = cls(layout, content["dtype"], content["constants"], content["factory"], content["versions"])
            DTYPES[header.dtype]
        except (KeyError, TypeError, ValueError) as error:
            raise ZooError(f"{file} is damaged ({error!r}). Copy the zoo again.") from error
        return header


def library_versions() -> dict[str, str]:
    """Return the versions of what a network's training depends on."""
    from lightning_symmetry import __version__  # not before the package is there

    versions = {name: version(name) for name in ("torch", "numpy", "lightning")}
    return {"lightning_symmetry": __version__, "python": platform.python_version(), **versions}


def canonical(content: Any) -> bytes:
    """Return JSON of one spelling, for digests."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_constants(folder: Path, constants: Mapping[str, Tensor], fixed: Tensor) -> None:
    """Write the tensors that all networks share, and which numbers of a row are such constants, booleans (P,)."""
    buffer = io.BytesIO()
    torch.save({"constants": dict(constants), "fixed": fixed}, buffer)
    with replacing(folder / CONSTANTS) as file:
        file.write(buffer.getvalue())


def read_constants(folder: Path, digest: str) -> tuple[dict[str, Tensor], Tensor]:
    """Read what :func:`write_constants` wrote.

    Raises:
        ZooError: If the file is not there, or not what the header says.
    """
    file = folder / CONSTANTS
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        constants, fixed = content["constants"], content["fixed"]
        whole = constants_digest(constants, fixed) == digest
    except Exception as error:  # whatever unpickling damaged bytes may raise
        raise ZooError(f"{file} cannot be read ({error!r}). Copy the zoo again.") from error
    if not whole:
        raise ZooError(f"{file} is damaged: it does not hold the constants that the header names. Copy the zoo again.")
    return constants, fixed


def constants_digest(constants: Mapping[str, Tensor], fixed: Tensor) -> str:
    """Return a digest of names, types, shapes and values; sparse tensors count as dense."""
    digest = hashlib.sha256()
    for name, value in {**constants, "": fixed}.items():
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        digest.update(canonical([name, str(value.dtype), list(value.shape), str(value.layout)]))
        digest.update(dense.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return digest.hexdigest()


def read_rows(file: Path, rows: np.ndarray, width: int, dtype: np.dtype | type) -> np.ndarray:
    """Read rows of a file of numbers into memory of their own.

    They are read rather than copied from a mapping of the file: each process faults the pages of its mapping in when it
    first touches them, which took half as long again as the copy.

    Args:
        file: Rows, one after the other.
        rows: Which, int64 of shape (k,).
        width: Numbers in a row.
        dtype: Their type.

    Returns:
        Shape (k, width).

    Raises:
        ZooError: If the file ends before.
    """
    found = np.empty((len(rows), width), dtype)
    if len(rows) == 0:  # there may be no file yet
        return found
    with file.open("rb", buffering=0) as stream:
        for row, place in zip(found, rows.tolist(), strict=True):
            stream.seek(place * row.nbytes)
            if stream.readinto(row) != row.nbytes:
                raise ZooError(f"{file} ends before row {place}: it was truncated since the zoo was opened.")
    return found


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the name ``path`` when it is complete and on the disk."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            yield file
            flush(file)
        os.replace(partial, path)
        flush_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def flush(file: BinaryIO) -> None:
    """Return when what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Return when the names of a folder's files are on the disk, where the operating system can tell."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
