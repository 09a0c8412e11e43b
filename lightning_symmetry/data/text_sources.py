"""Which files a text corpus consists of."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

TEXT_SUFFIXES = (".txt", ".text", ".tokens", ".raw", ".md", ".rst")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
}
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
LM1B_TRAIN = "training-monolingual.tokenized.shuffled"
LM1B_HELDOUT = "heldout-monolingual.tokenized.shuffled"


def text_files(source: str) -> dict[str, list[Path]]:
    """Find the files of a corpus.

    Args:
        source: "stdlib", a text file, or a folder.

    Returns:
        Files by split, each in ascending order. There is always "train"; what is to be held out from it is not there.

    Raises:
        FileNotFoundError: If there is no such file or folder, or no text in it.
    """
    if source == "stdlib":
        return {"train": _stdlib_files()}
    path = Path(source)
    if path.is_file():
        return {"train": [path]}
    if path.is_dir():
        return _lm1b_files(path) or _folder_files(path)
    raise FileNotFoundError(
        f'Found no text at {path}: looked for a text file or a folder there. Pass its path, or "stdlib" for the '
        "source text of Python's standard library."
    )


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    # The names known to Python leave out what an installation adds: sitecustomize, _sysconfigdata_...
    files = [path for path in sorted(folder.glob("*.py")) if path.stem in sys.stdlib_module_names]
    if not files:
        raise FileNotFoundError(
            f"This Python has no source text of its standard library: looked for {folder / '*.py'}. "
            "Pass a text file or folder as `source`."
        )
    return files


def _lm1b_files(folder: Path) -> dict[str, list[Path]] | None:
    """Return the files of the One Billion Word Benchmark if the folder has its layout."""
    root = next((root for root in (folder, folder / LM1B) if (root / LM1B_TRAIN).is_dir()), None)
    if root is None:
        return None
    files = {
        "train": sorted((root / LM1B_TRAIN).glob("news.en-*")),
        "val": sorted((root / LM1B_HELDOUT).glob("news.en.heldout-*")),
    }
    if not files["train"]:
        raise FileNotFoundError(f"Found no training text of LM1B: looked for {root / LM1B_TRAIN / 'news.en-*'}.")
    files["test"] = [path for path in files["val"] if path.name.startswith("news.en.heldout-00000")]
    files["val"] = [path for path in files["val"] if path not in files["test"]]
    return {split: found for split, found in files.items() if found}


def _folder_files(folder: Path) -> dict[str, list[Path]]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix.lower() in TEXT_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise FileNotFoundError(
            f"Found no text in {folder}: looked for files that end in {', '.join(TEXT_SUFFIXES)} there and in its "
            f"folders, and for LM1B's {LM1B_TRAIN}/news.en-*."
        )
    named: dict[str, list[Path]] = {}
    for path in files:
        if split := _split_named(path.relative_to(folder)):
            named.setdefault(split, []).append(path)
    if "train" in named:
        return named
    if named:
        rank_zero_info(f"{folder} has no training text by name: all its {len(files)} text files are divided anew.")
    return {"train": files}


def _split_named(path: Path) -> str | None:
    """Return the split in a file's name, as in wiki.train.tokens, or the one that its outermost folder is named by."""
    parts = [*re.split(r"[._-]", path.name.lower()), path.parts[0].lower()]
    return next((SPLIT_NAMES[part] for part in parts if part in SPLIT_NAMES), None)
