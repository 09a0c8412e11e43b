"""Data folders that a loader cannot write beside."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_writable(folder: Path) -> bool:
    """Tell whether files may be created in `folder`.

    Args:
        folder: An existing folder.

    Returns:
        True if so.
    """
    # A superuser may write into any folder; one without a single write permission is meant to stay as it is
    # even so.
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


@contextmanager
def writable_root(root: Path, folder: str, needed: tuple[str, ...], cache_dir: Path | None) -> Iterator[Path]:
    """Give a root below which `folder` can be written.

    That is `root` itself, unless `root/folder` exists and cannot be written: then what is `needed` of it is
    copied below `cache_dir`, or below a temporary folder that is deleted on leaving the context.

    Args:
        root: Folder that holds `folder`, or will.
        folder: Name of the data set's folder.
        needed: Names of the files and folders in it that the loader reads.
        cache_dir: Where to keep the copy; None for a temporary folder.

    Yields:
        The root to hand to the loader.
    """
    if not (root / folder).is_dir() or is_writable(root / folder):
        yield root
    elif cache_dir is not None:
        _copy(root / folder, cache_dir / folder, needed)
        yield cache_dir
    else:
        with tempfile.TemporaryDirectory(prefix="lightning_symmetry_") as temporary:
            _copy(root / folder, Path(temporary) / folder, needed)
            yield Path(temporary)


def _copy(source: Path, target: Path, needed: tuple[str, ...]) -> None:
    # File by file: shutil.copytree would copy the read-only mode of the folders too.
    for name in needed:
        top = source / name
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            copied = target / file.relative_to(source)
            if file.is_file() and not (copied.is_file() and copied.stat().st_size == file.stat().st_size):
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)
