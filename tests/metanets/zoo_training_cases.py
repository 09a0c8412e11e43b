"""Small zoos to train, and training that is stopped in the middle of a chunk."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.zoo_training import train_zoo

NETWORKS, CHUNK = 12, 3


def mlp(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3))


def precise() -> nn.Module:
    return mlp().double()


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def asymmetric() -> nn.Module:
    return asymmetrize(batch_normed(), method="w", n_fix=2, kappa=1.0, seed=0)


class Unloadable:
    """A factory that can be sent to another process, but not be received there."""

    def __call__(self) -> nn.Module:
        return mlp()

    def __reduce__(self) -> tuple:
        return __import__, ("nowhere",)


def changing() -> nn.Module:
    """A factory whose architecture depends on the seed."""
    return mlp(4 + int(torch.randint(2, ())))


def other_constants() -> nn.Module:
    """A factory whose constants depend on the seed."""
    return asymmetrize(mlp(), method="w", n_fix=2, kappa=1.0, seed=int(torch.randint(1000, ())))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1), nn.Linear(5, 3))


def samples(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), (inputs[:, :3].argmax(1) + (inputs[:, 3] > 1)) % 3


def unchanged(images: Tensor, generator: torch.Generator) -> Tensor:
    return images


def data(dtype: torch.dtype = torch.float32) -> dict[str, tuple[Tensor, Tensor]]:
    return {"train": samples(50, 0, dtype), "val": samples(20, 1, dtype), "test": samples(30, 2, dtype)}


def hyperparameters(count: int = NETWORKS) -> dict[str, np.ndarray]:
    place = np.arange(count)
    return {
        "learning_rate": 0.02 * 1.2**place,
        "weight_decay": 1e-3 * place,
        "label_smoothing": 0.01 * place,
        "epochs": 1 + place * 5 % 7,
    }


CALLS: Counter[str] = Counter()


@dataclass(frozen=True)
class Trap:
    """An augmentation that changes nothing, and in one process does what a file in a folder says, if there is one.

    The file says what to do, and in which call of a process.
    """

    folder: str

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        CALLS[self.folder] += 1
        file = Path(self.folder) / "armed"
        if file.exists():
            action, calls = file.read_text().split()
            if CALLS[self.folder] >= int(calls):
                with suppress(FileNotFoundError):  # another process was faster
                    file.rename(file.with_name("went off"))
                    getattr(self, action)()
        return images

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        raise RuntimeError("no more memory, say")

    def refuse(self) -> None:
        raise ValueError("no such image")

    def wait(self) -> None:
        time.sleep(600)  # longer than anybody waits for the others


def arm(folder: Path, action: str, calls: int) -> None:
    (folder / "armed").write_text(f"{action} {calls}")


def train(path: Path, **changes):
    """Train the zoo of this file, with changes."""
    arguments = {
        "factory": "metanets.zoo_training_cases:mlp",
        "data": data(),
        "hyperparameters": hyperparameters(),
        "path": path,
        "settings": PopulationSettings(batch_size=16),
        "chunk_size": CHUNK,
        "workers": 1,
        "progress": False,
        "seed": 3,
    }
    return train_zoo(**{**arguments, **changes})


def trapped(path: Path, **changes):
    """Train it in the folder `zoo` of a path, with a trap there."""
    settings = PopulationSettings(batch_size=16, augment=Trap(str(path)))
    return train(path / "zoo", settings=settings, **changes)
