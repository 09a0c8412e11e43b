"""A zoo of trained networks as data for metanetworks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_symmetry.data._checks import check_choice
from lightning_symmetry.data.loaders import SPLITS, BatchedDataset, Split, SplitDataModule
from lightning_symmetry.metanets.stat_nn import STATISTICS
from lightning_symmetry.metanets.weight_layout import WeightLayout
from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_features import zoo_statistics
from lightning_symmetry.metanets.zoo_splits import split_zoo


class ZooNetworks(BatchedDataset):
    """Weights of networks and what is to be told from them, read from disk by the batch.

    The data set collates by itself, so a loader needs the identity as its collate function:
    `DataLoader(networks, batch_size=64, collate_fn=keep_batch)`.
    """

    def __init__(self, zoo: Zoo, targets: Tensor, features: Tensor | None = None) -> None:
        """Hold a zoo; nothing is read.

        Args:
            zoo: The networks, N of P weights.
            targets: What is to be told, float32 of shape (N,).
            features: What is known of the weights, float32 of shape (N, F), to be given in their place.
        """
        self.zoo, self.targets, self.features = zoo, targets, features

    def __len__(self) -> int:
        return len(self.zoo)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Fetch one network.

        Args:
            index: Position in the data set.

        Returns:
            Weights or features, float32 of shape (P,), and target, shape ().

        Raises:
            IndexError: If there is no such network.
        """
        weights, targets = self.__getitems__([range(len(self))[index]])
        return weights[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Fetch a batch; data loaders call this by themselves.

        Args:
            indices: Positions in the data set, from 0.

        Returns:
            Weights or features, float32 of shape (B, P), and targets, float32 of shape (B,).
        """
        chosen = torch.as_tensor(indices)
        read = self.zoo.read(indices) if self.features is None else self.features[chosen]
        return read, self.targets[chosen]


class ZooData(SplitDataModule):
    """Networks of a zoo, as flat weights, and a number that was noted about each, such as its test accuracy.

    Batches are `(weights, target)`, float32 of shapes (B, P) and (B,). Networks that diverged are left out. The
    division in training, validation and test networks is kept in the zoo's folder: whoever uses the same shares and
    seed sees the same networks. Weights are read from the mapped file by the batch, so a zoo may exceed memory.
    Weights are as trained, and targets as noted: neither is normalised (a metanetwork standardises its input). With
    `features="statistics"` batches have statistics of the weights in their place, which are computed once and kept in
    the zoo's folder: for `StatNN(data.layout, precomputed=True)`.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.3, App. E.3.
    """

    def __init__(
        self,
        path: str | Path,
        target: str = "accuracy",
        batch_size: int = 128,
        splits: tuple[float, float, float] = (0.5, 0.25, 0.25),
        split_seed: int = 0,
        num_workers: int = 0,
        eval_batch_size: int = 512,
        features: Literal["weights", "statistics"] = "weights",
    ) -> None:
        """Set the split and the loaders' arguments.

        Args:
            path: Folder of the zoo.
            target: Name in the records of what is to be told.
            batch_size: Networks in a training batch of one process.
            splits: Shares of training, validation and test networks, with a sum of at most 1.
            split_seed: Seed of the division.
            num_workers: Worker processes of each loader.
            eval_batch_size: Networks in a batch of the validation, test and evaluation loaders.
            features: What batches have of a network.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__(batch_size, eval_batch_size, num_workers)
        self.features = check_choice("features", features, ("weights", "statistics"))
        self.path, self.target = path, target
        self.splits, self.split_seed = splits, split_seed
        self.save_hyperparameters(logger=False)

    @cached_property
    def zoo(self) -> Zoo:
        """The zoo, with the networks that diverged."""
        return Zoo.open(self.path)

    @cached_property
    def layout(self) -> WeightLayout:
        """What stands where in a row, for a metanetwork: which entries are constants of asymmetric layers, too."""
        return WeightLayout.of_rows(self.zoo.layout, self.zoo.fixed)

    @property
    def num_features(self) -> int:
        """P, the numbers in one row of a batch, constants of asymmetric layers included among weights."""
        if self.features == "statistics":
            return len(STATISTICS) * len(self.layout.free_counts)
        return self.zoo.layout.num_features

    @cached_property
    def positions(self) -> dict[str, np.ndarray]:
        """Positions in the zoo of the networks of each split, ascending."""
        return split_zoo(self.zoo, self.splits, self.split_seed)

    def targets(self, split: Split) -> Tensor:
        """Return what is to be told of the networks of a split.

        Args:
            split: "train", "val" or "test".

        Returns:
            float32 of shape (N,), in the order of `eval_dataloader(split)`.

        Raises:
            ValueError: If there is no such split, nothing of the target's name was noted, or it is not a finite
                number for each network.
        """
        return self._datasets[check_choice("split", split, SPLITS)].targets

    def _dataset(self, split: Split, training: bool = False) -> ZooNetworks:
        return self._datasets[split]

    @cached_property
    def _datasets(self) -> dict[str, ZooNetworks]:
        found = {}
        statistics = zoo_statistics(self.zoo) if self.features == "statistics" else None
        for split, positions in self.positions.items():
            networks = self.zoo.select(positions)
            features = None if statistics is None else statistics[torch.from_numpy(positions)]
            found[split] = ZooNetworks(networks, self._targets(networks), features)
        return found

    def _targets(self, networks: Zoo) -> Tensor:
        try:
            values = networks[self.target]
        except KeyError as error:
            raise ValueError(
                f"Expected argument `target` to be in the records, but got another: {error.args[0]}"
            ) from error
        numeric = values.dtype != object and np.issubdtype(values.dtype, np.number)
        wrong = [] if not numeric else networks.indices[~np.isfinite(values)].tolist()
        if not numeric or wrong:
            where = f" for {len(wrong)} networks, such as those of index {wrong[:5]}" if wrong else ""
            raise ValueError(f"{self.target!r} is no finite number in the records of {self.path}{where}.")
        return torch.from_numpy(values.astype(np.float32))
