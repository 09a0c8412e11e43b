"""The named image sets of torchvision: their constants, their files, their download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class NamedImages:
    """One of torchvision's image sets with the constants that go by its name.

    Mean and standard deviation are those of the training pixels on the scale [0, 1], as usually quoted.
    """

    class_name: str
    num_classes: int
    shape: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    crop_and_flip: bool

    @property
    def torchvision_class(self) -> Any:
        """The data set's class in `torchvision.datasets`."""
        from torchvision import datasets

        return getattr(datasets, self.class_name)

    def files(self, data_dir: Path) -> list[Path]:
        """List the files that a complete copy has below `data_dir`, whether they exist or not.

        Args:
            data_dir: Folder that torchvision calls `root`.

        Returns:
            Their paths.
        """
        dataset = self.torchvision_class
        if self.class_name.endswith("MNIST"):
            raw = data_dir / self.class_name / "raw"
            return [raw / Path(archive).stem for archive, _ in dataset.resources]
        return [data_dir / dataset.base_folder / name for name, _ in (*dataset.train_list, *dataset.test_list)]

    def is_complete(self, data_dir: Path) -> bool:
        """Tell whether all files exist.

        Args:
            data_dir: Folder that torchvision calls `root`.

        Returns:
            True if none is missing.
        """
        return all(file.is_file() for file in self.files(data_dir))

    def download(self, data_dir: Path) -> None:
        """Download the set into `data_dir`.

        Args:
            data_dir: Folder that torchvision calls `root`.

        Raises:
            RuntimeError: If that fails.
        """
        wanted = ", ".join(str(file) for file in self.files(data_dir))
        try:
            self.torchvision_class(data_dir, download=True)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"Could not download {self.class_name} into {data_dir}: {error}. "
                f"Without internet, copy these files there from elsewhere: {wanted}."
            ) from error

    def open(self, data_dir: Path) -> dict[str, Any]:
        """Open the files below `data_dir`, without any attempt at downloading.

        Args:
            data_dir: Folder that torchvision calls `root`.

        Returns:
            torchvision's data sets under the names "train" and "test".
        """
        return {
            "train": self.torchvision_class(data_dir, train=True),
            "test": self.torchvision_class(data_dir, train=False),
        }


NAMED_IMAGES = {
    "mnist": NamedImages("MNIST", 10, (1, 28, 28), (0.1307,), (0.3081,), crop_and_flip=False),
    "fashion_mnist": NamedImages("FashionMNIST", 10, (1, 28, 28), (0.2860,), (0.3530,), crop_and_flip=False),
    "cifar10": NamedImages(
        "CIFAR10", 10, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), crop_and_flip=True
    ),
    "cifar100": NamedImages(
        "CIFAR100", 100, (3, 32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), crop_and_flip=True
    ),
}
