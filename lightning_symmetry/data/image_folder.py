"""Trees of class folders: found, checked and opened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_symmetry.data.progress import progress


def is_tree(folder: Path) -> bool:
    """Tell whether `folder` has train/ and also test/ or val/.

    Args:
        folder: Folder to look into.

    Returns:
        True if so.
    """
    return (folder / "train").is_dir() and ((folder / "test").is_dir() or (folder / "val").is_dir())


def class_names(tree: Path) -> list[str]:
    """List the classes of a tree without looking at its images.

    Args:
        tree: Folder with train/.

    Returns:
        The names of the class folders in the order of the labels.
    """
    return sorted(entry.name for entry in (tree / "train").iterdir() if entry.is_dir())


def open_tree(tree: Path) -> dict[str, Any]:
    """Open the splits of a tree and check that their classes agree.

    Args:
        tree: Folder with train/ and test/ or val/; each of them holds one folder of images a class.

    Returns:
        torchvision `ImageFolder`s under the names "train", "test" and, if there are both val/ and test/,
        "val". With val/ alone, that is the test set.

    Raises:
        ValueError: If there are no classes, the splits differ in them, or one has no images.
    """
    if not class_names(tree):
        raise ValueError(f"Found no class folders in {tree / 'train'}; expected train/CLASS/IMAGE.")
    folders = {name: tree / name for name in ("train", "val", "test") if (tree / name).is_dir()}
    if "test" not in folders:
        folders["test"] = folders.pop("val")
    splits = {name: _open_split(folder) for name, folder in folders.items()}
    for name, split in splits.items():
        missing = sorted(set(splits["train"].classes) - set(split.classes))
        unknown = sorted(set(split.classes) - set(splits["train"].classes))
        if missing or unknown:
            raise ValueError(
                f"Expected the same class folders in {folders['train']} and {folders[name]}, but the second "
                f"lacks {missing} and has {unknown} beside."
            )
    return splits


def _open_split(folder: Path) -> Any:
    from torchvision.datasets import ImageFolder

    if not any(entry.is_dir() for entry in folder.iterdir()):
        raise ValueError(f"Found no class folders in {folder}; expected {folder.name}/CLASS/IMAGE.")
    split = ImageFolder(str(folder), allow_empty=True)
    filled = set(split.targets)
    empty = [name for name, label in split.class_to_idx.items() if label not in filled]
    if empty:
        raise ValueError(f"Found no images in the class folders {empty} of {folder}; delete or fill them.")
    return split


def first_size(tree: Path) -> tuple[int, int]:
    """Read the size of one training image from its header.

    Args:
        tree: Folder with train/.

    Returns:
        Height and width in pixels.
    """
    return _size(_open_split(tree / "train").samples[0][0])


def common_size(splits: Iterable[Any]) -> tuple[int, int]:
    """Read every image's header and return the one size that all have.

    Args:
        splits: torchvision `ImageFolder`s.

    Returns:
        Height and width in pixels.

    Raises:
        ValueError: If two images differ in size.
    """
    paths = [path for split in splits for path, _ in split.samples]
    expected = _size(paths[0])
    for path in progress(paths, "reading image sizes"):
        if (size := _size(path)) != expected:
            raise ValueError(
                "Expected images of one size, but got (height, width) = "
                f"{expected} in {paths[0]} and {size} in {path}; pass `image_size` to resize them."
            )
    return expected


def _size(path: str) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as image:
        return image.height, image.width
