"""The data that networks of a zoo are trained on: checked, and mapped by worker processes, which hold no copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "val", "test")
FILE = ".training_data.bin"
ALIGNMENT = 64


def checked_data(data: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return data that networks can be trained on, on the CPU.

    Args:
        data: Inputs ``(N, *sample)``, floating point, and classes ``(N,)``, integers, by "train", "val" and "test".

    Raises:
        ValueError: If it is something else; the message names the split.
    """
    if "train" not in data or not {*data} <= {*SPLITS}:
        raise ValueError(f"Expected `data` to have 'train', and maybe 'val' and 'test', but got {[*data]}.")
    checked = {}
    for split in SPLITS:
        if split not in data:
            continue
        inputs, targets = (torch.as_tensor(value).detach().cpu() for value in data[split])
        title = f"Expected `data[{split!r}]` to be inputs (N, *sample) and classes (N,)"
        if len(inputs.shape) < 2 or inputs.shape[:1] != targets.shape or not inputs.numel():
            raise ValueError(f"{title}, N at least 1, but got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}.")
        if not inputs.is_floating_point() or targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"{title}, floating point and integers, but got {inputs.dtype} and {targets.dtype}.")
        if inputs.shape[1:] != (expected := checked.get("train", (inputs,))[0].shape[1:]):
            raise ValueError(f"{title}, samples of 'train' being {tuple(expected)}, but got {tuple(inputs.shape[1:])}.")
        if not inputs.isfinite().all() or targets.min() < 0:
            raise ValueError(f"{title}, finite and not negative, but some are not.")
        checked[split] = inputs, targets.long()
    return checked


@dataclass(frozen=True)
class SharedData:
    """Tensors in a file; an object of this class is small, and can be sent to another process.

    Shared memory, which torch would take, ends at 64 MB in many containers.

    Attributes:
        file: The file.
        places: Name of the split, dtype, shape and offset of each tensor.
    """

    file: Path
    places: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]

    @classmethod
    def write(cls, folder: Path, data: Mapping[str, tuple[Tensor, Tensor]]) -> SharedData:
        """Write data into a folder.

        Args:
            folder: The folder; what another process has left there is replaced.
            data: Inputs and targets by split.

        Returns:
            Where they are.

        Raises:
            OSError: If the disk is full; nothing is left.
        """
        path, places, end = folder / FILE, [], 0
        path.unlink(missing_ok=True)
        try:
            with path.open("wb") as file:
                for split, tensors in data.items():
                    for tensor in tensors:
                        offset = -(-end // ALIGNMENT) * ALIGNMENT
                        file.write(bytes(offset - end))
                        file.write(tensor_bytes(tensor))
                        end = offset + tensor.numel() * tensor.element_size()
                        places.append((split, tensor.dtype, tuple(tensor.shape), offset))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(
                error.errno, f"{error.strerror}: no place for the data that worker processes share", str(folder)
            ) from error
        return cls(path, tuple(places))

    def open(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Map the file to memory.

        Returns:
            What was written.
        """
        content = torch.from_numpy(np.memmap(self.file, np.uint8, "c"))
        found: dict[str, list[Tensor]] = {}
        for split, dtype, shape, offset in self.places:
            size = math.prod(shape) * dtype.itemsize
            found.setdefault(split, []).append(content[offset : offset + size].view(dtype).view(shape))
        return {split: (inputs, targets) for split, (inputs, targets) in found.items()}

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete the file, also that of a process that was killed.

        Args:
            folder: Its folder.
        """
        (folder / FILE).unlink(missing_ok=True)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy where it is contiguous.

    Args:
        tensor: The tensor, which has elements.
    """
    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
