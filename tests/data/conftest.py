"""Small trees of class folders, and the folder of real data where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

TREE = {"train": {"cat": 6, "dog": 5, "emu": 4}, "test": {"cat": 2, "dog": 2, "emu": 2}}


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes random PNGs: `{split: {class: count}}`, (height, width) of each."""

    def make(tree: dict[str, dict[str, int]] = TREE, size: tuple[int, int] = (12, 12)) -> Path:
        draw = np.random.default_rng(0)
        for split, classes in tree.items():
            for name, count in classes.items():
                folder = tmp_path / split / name
                folder.mkdir(parents=True)
                for i in range(count):
                    pixels = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{i}.png")
        return tmp_path

    return make


@pytest.fixture
def real_data() -> Path:
    """Return the folder of real data, or skip."""
    folder = os.environ.get("LIGHTNING_SYMMETRY_DATA")
    if not folder:
        pytest.skip("LIGHTNING_SYMMETRY_DATA names no folder of real data")
    return Path(folder)
