"""One writer at a time in a folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from lightning_symmetry.metanets.zoo_files import ZooError

try:
    import fcntl
except ImportError:  # Windows: two writers are not noticed there
    fcntl = None

LOCK = ".lock"


class ZooBusyError(ZooError):
    """Another process is writing there."""


class WriteLock:
    """The lock of a folder, which the operating system lets go when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Args:
            folder: Folder to write to, which exists.

        Raises:
            ZooBusyError: If another writer has it.
        """
        self._file = (folder / LOCK).open("a+b")
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace") or "another writer"
            self._file.close()
            raise ZooBusyError(
                f"{folder} is being written by {holder}. Wait for it, or write another shard into a folder of its own "
                "and put them together with merge_zoos."
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file.flush()

    def release(self) -> None:
        """Let go; again does nothing."""
        if fcntl is not None and not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone would leave it to a forked child
        self._file.close()
