"""Corpora that are tokenised once and then mapped from a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from lightning_symmetry.data.text_corpus import Corpus, Text
from lightning_symmetry.data.text_tokens import Bytes, Words
from lightning_symmetry.metanets.zoo_files import replacing

FORMAT = 1


def on_disk(text: Text, cache_dir: Path, label: str) -> Corpus:
    """Map a corpus from a file, which is written if it is not there.

    There are two files: `LABEL-KEY.tokens` holds the tokens of all splits one after the other, and `LABEL-KEY.json`
    their numbers and the vocabulary. KEY depends on `text` and on names, sizes and times of change of its files. Both
    are written under other names, which are then changed, the second when the first is complete: of processes that
    write at once each leaves the same whole files. Files that are not whole, or foreign, are replaced.

    Args:
        text: What to read.
        cache_dir: Folder of the files, which is made if it is not there.
        label: Beginning of their names.

    Returns:
        The corpus, with mapped arrays.
    """
    identity = _identity(text)
    tokens_file, manifest_file = (cache_dir / f"{label}-{identity[:16]}.{end}" for end in ("tokens", "json"))
    manifest = _read_manifest(manifest_file, tokens_file, identity)
    if manifest is None:
        if manifest_file.exists() or tokens_file.exists():
            rank_zero_info(f"The cached tokens at {tokens_file} are not whole: they are written anew.")
        manifest = _write(text, tokens_file, manifest_file, identity)
    vocabulary = Bytes() if manifest["words"] is None else Words(manifest["words"])
    dtype, offset, tokens = np.dtype(manifest["dtype"]), 0, {}
    for split, count in manifest["counts"].items():
        # An empty file or region cannot be mapped.
        tokens[split] = np.memmap(tokens_file, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
        offset += count * dtype.itemsize
    return Corpus(vocabulary, tokens)


def _identity(text: Text) -> str:
    """Return a digest of whatever the tokens depend on."""
    spans = {split: [_describe(*span) for span in spans] for split, spans in text.spans.items()}
    described = [FORMAT, spans, text.kind, text.vocab_size, text.max_tokens]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _describe(path: Path, start: int, stop: int) -> list[Any]:
    status = path.stat()
    return [path.name, start, stop, status.st_size, status.st_mtime_ns]


def _read_manifest(manifest_file: Path, tokens_file: Path, identity: str) -> dict[str, Any] | None:
    """Return what was noted about the tokens; None if it is not there or does not fit them."""
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        size = tokens_file.stat().st_size
    except (FileNotFoundError, ValueError):  # ValueError: no UTF-8 or no JSON
        return None
    if not isinstance(manifest, dict) or manifest.get("identity") != identity:
        return None
    whole = size == sum(manifest["counts"].values()) * np.dtype(manifest["dtype"]).itemsize
    return manifest if whole else None


def _write(text: Text, tokens_file: Path, manifest_file: Path, identity: str) -> dict[str, Any]:
    tokens_file.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = text.vocabulary()
    counts = dict.fromkeys(text.spans, 0)
    with replacing(tokens_file) as file:
        for split in text.spans:
            for piece in text.pieces(split, vocabulary):
                file.write(piece.tobytes())
                counts[split] += len(piece)
    manifest = {"identity": identity, "dtype": vocabulary.dtype.str, "counts": counts, "words": vocabulary.words}
    with replacing(manifest_file) as file:
        file.write(json.dumps(manifest).encode())
    return manifest
