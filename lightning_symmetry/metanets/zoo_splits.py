"""Training, validation and test networks of a zoo, the same for whoever asks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_files import ZooError, canonical, replacing

SPLITS = ("train", "val", "test")


def split_zoo(zoo: Zoo, fractions: Sequence[float] = (0.5, 0.25, 0.25), seed: int = 0) -> dict[str, np.ndarray]:
    """Divide the networks of a zoo that did not diverge.

    The division is drawn once for each `fractions` and `seed` and kept in a file of the zoo's folder, so that all
    metanetworks see the same. It depends on these two and on the `index` of the networks only: not on order, shards,
    or any library's random numbers. Where the folder cannot be written, it is drawn every time, and is the same.

    Args:
        zoo: The whole zoo.
        fractions: Shares of training, validation and test networks, all positive, with a sum of at most 1. What a
            sum below 1 leaves is in no part.
        seed: Seed of the division.

    Returns:
        Positions in the zoo, ascending, by the names "train", "val" and "test".

    Raises:
        ValueError: If the fractions are no fractions, or a part would be empty, as where all networks diverged.
        ZooError: If networks have come or gone since the division was drawn, or its file is damaged.
    """
    _check_fractions(fractions)
    position_of = {record["index"]: i for i, record in enumerate(zoo.records) if record["status"] == "ok"}
    drawn = _draw(sorted(position_of), fractions, seed)
    if empty := [name for name in SPLITS if not drawn[name]]:
        raise ValueError(
            f"{zoo.path} has {len(zoo)} networks, of which {len(position_of)} did not diverge: too few for a share "
            f"{tuple(fractions)} of {', '.join(empty)} networks. Train more, or check why they diverge."
        )
    name = "-".join(format(fraction, ".12g") for fraction in fractions)
    file = zoo.path / f"splits-{name}-seed{seed}.json"
    networks = hashlib.sha256(canonical(sorted(position_of))).hexdigest()
    content = {"networks": networks, "fractions": list(fractions), "seed": seed, **drawn}
    if file.exists():
        kept = _read(file)
        if kept["networks"] != networks:
            raise ZooError(
                f"{file} was drawn from other networks than the {len(position_of)} of the zoo that did not diverge. "
                "Delete it to draw anew (test networks may then have been training networks before), or give another "
                "seed."
            )
        drawn = kept
    else:
        # A folder for reading only, or a full disk: drawn again, it is the same.
        with suppress(OSError), replacing(file) as stream:
            stream.write(json.dumps(content).encode())
    try:
        return {part: np.sort(np.array([position_of[index] for index in drawn[part]], np.int64)) for part in SPLITS}
    except KeyError as error:
        raise ZooError(f"{file} is damaged: the zoo has no network of index {error}. Delete it.") from error


def _check_fractions(fractions: Sequence[float]) -> None:
    if len(fractions) != 3 or not all(0 < fraction < 1 for fraction in fractions) or sum(fractions) > 1 + 1e-9:
        raise ValueError(
            "Expected argument `splits` to be shares of training, validation and test networks, three positive numbers "
            f"with a sum of at most 1, but got {tuple(fractions)}."
        )


def _draw(indices: list[int], fractions: Sequence[float], seed: int) -> dict[str, list[int]]:
    """Divide indices, each part ascending; the order is that of a hash, which no library's next version changes."""
    shuffled = sorted(indices, key=lambda index: hashlib.sha256(f"{seed}:{index}".encode()).digest())
    ends = [math.floor(len(indices) * math.fsum(fractions[: part + 1]) + 1e-6) for part in range(len(SPLITS))]
    return {name: sorted(shuffled[i:j]) for name, i, j in zip(SPLITS, [0, *ends], ends, strict=False)}


def _read(file: Path) -> dict[str, list[int]]:
    try:
        content = json.loads(file.read_bytes())
        kept = {name: content[name] for name in ("networks", *SPLITS)}
        members = [index for name in SPLITS for index in kept[name]]
        if len(set(members)) < len(members) or not all(kept.values()):
            raise ValueError("parts overlap, or one is empty")
        return kept
    except (ValueError, KeyError, TypeError) as error:
        raise ZooError(f"{file} is damaged ({error!r}). Delete it: it is drawn again, the same.") from error
