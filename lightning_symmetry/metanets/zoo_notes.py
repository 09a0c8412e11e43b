"""What a zoo was trained with, noted in its folder: who goes on with it does the same, or is told."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.zoo_factory import factory_name
from lightning_symmetry.metanets.zoo_files import ZooError, canonical, replacing
from lightning_symmetry.metanets.zoo_shared_data import tensor_bytes

TRAINING = "training.json"
KIND, FORMAT = "training of a zoo", 1


@dataclass(frozen=True)
class TrainingNotes:
    """What decides the networks of a zoo beside architecture and factory, which the header has.

    Attributes:
        content: Settings, digests of hyper-parameters and data; JSON.
        here: Number of networks of this folder, which are all or those of a shard.
    """

    content: dict[str, Any]
    here: int

    @classmethod
    def of(
        cls,
        settings: PopulationSettings,
        hyperparameters: Mapping[str, np.ndarray],
        data: Mapping[str, tuple[Tensor, Tensor]],
        chunk_size: int,
        keep_history: bool,
    ) -> TrainingNotes:
        """Note a training.

        Args:
            settings: What all networks share.
            hyperparameters: Those of each network.
            data: Inputs and targets by split.
            chunk_size: Networks that are trained together, at most: it decides how floating point numbers round.
            keep_history: Whether records have a history.
        """
        named = {field: getattr(settings, field) for field in settings.__dataclass_fields__}
        content = {
            "networks": len(hyperparameters["epochs"]),
            "chunk_size": chunk_size,
            "keep_history": keep_history,
            "settings": {**named, "betas": list(settings.betas), "augment": _described(settings.augment)},
            "hyperparameters": {name: _digest(memoryview(values)) for name, values in hyperparameters.items()},
            "data": {split: _digest(*map(_typed_bytes, tensors)) for split, tensors in data.items()},
        }
        return cls(json.loads(canonical(content)), content["networks"])

    @property
    def networks(self) -> int:
        """Number of networks of the whole zoo."""
        return self.content["networks"]

    def write(self, folder: Path) -> None:
        """Write the notes, whole or not at all.

        Args:
            folder: Folder of the zoo.
        """
        with replacing(folder / TRAINING) as file:
            file.write(
                json.dumps({"kind": KIND, "format": FORMAT, "here": self.here, **self.content}, indent=1).encode()
            )

    @classmethod
    def read(cls, folder: Path) -> TrainingNotes | None:
        """Read the notes of a folder.

        Args:
            folder: Folder of a zoo.

        Returns:
            The notes, or None if there are none.

        Raises:
            ZooError: If they are damaged, or of another version.
        """
        file = folder / TRAINING
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_bytes())
            known, stored = content.pop("kind") == KIND, content.pop("format")
            here = content.pop("here")
            for name in ("networks", "chunk_size", "keep_history", "settings", "hyperparameters", "data"):
                content[name]
        except (ValueError, KeyError, TypeError, AttributeError):
            known = False
        if not known:
            raise ZooError(f"{file} is damaged, or no note of a training. Choose another folder, or copy it again.")
        if stored != FORMAT:
            raise ZooError(
                f"{file} has format {stored}, but this version of lightning_symmetry goes on with format {FORMAT}. "
                "Finish the zoo with the version that began it, or train it in another folder."
            )
        return cls(content, here)

    def check_same(self, other: TrainingNotes, folder: Path) -> None:
        """Check that another training would give the same networks.

        Args:
            other: The other one.
            folder: Where these notes are.

        Raises:
            ZooError: If not; the message names what differs.
        """
        found = _differences(self.content, other.content, "")
        if self.networks != other.networks:  # then all digests differ too
            found = [f"it has {self.networks} networks, not {other.networks}"]
        if found:
            raise ZooError(
                f"{folder} holds a zoo of another training: {'; '.join(found)}. Go on with what it was begun with, or "
                "choose another folder."
            )


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], title: str) -> list[str]:
    found = []
    for name in {**mine, **theirs}:
        left, right = mine.get(name), theirs.get(name)
        if left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            found += _differences(left, right, name)
        elif title in ("hyperparameters", "data"):
            what = f"data of {name!r}" if title == "data" else name
            lacking = "not there" if left is None else "no longer given" if right is None else None
            found.append(f"{what} is {lacking}" if lacking else f"its {what} is another")
        else:
            found.append(f"its {name} is {left!r}, not {right!r}")
    return found


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _typed_bytes(tensor: Tensor) -> bytes:
    digest = hashlib.sha256(canonical([str(tensor.dtype), list(tensor.shape)]))
    digest.update(tensor_bytes(tensor))
    return digest.digest()


def _described(function: Callable[..., Any] | str | None) -> str | None:
    """Return a name that is the same in every process; for a function with arguments of its own, a digest too."""
    if function is None or (name := factory_name(function)) is not None:
        return function if function is None else name
    kind = function if hasattr(function, "__qualname__") else type(function)
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        return name if kind is function else f"{name} {_digest(pickle.dumps(function, protocol=4))}"
    except Exception:  # whatever pickling may raise: what cannot be sent cannot be told apart either
        return name
