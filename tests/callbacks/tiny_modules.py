"""Small modules, data and trainers, and the segment evaluated by hand."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from tiny_data import CLASSES, FEATURES, SIZES, loader, samples
from tiny_data import trainer as trainer  # for those who import these modules
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_symmetry import MLP, PathResult, SupervisedModule, evaluate_path


class TinyData(pl.LightningDataModule):
    """Loaders of three splits; the test split exists after ``setup("test")`` only."""

    def __init__(self, shuffle: bool = True) -> None:
        super().__init__()
        self.shuffle = shuffle

    def setup(self, stage: str) -> None:
        self.stages = {*getattr(self, "stages", ()), stage}

    def train_dataloader(self) -> DataLoader:
        return loader("train", self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return loader("val")

    def test_dataloader(self) -> DataLoader:
        assert "test" in self.stages
        return loader("test")


class Noisy(Dataset):
    """The training samples, augmented at random."""

    def __len__(self) -> int:
        return SIZES["train"]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = samples("train")[index]
        return x + torch.randn(FEATURES), y


class AugmentedData(TinyData):
    """Augments its training samples, but for evaluation."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(), batch_size=8, shuffle=True)

    def eval_dataloader(self, split: str) -> DataLoader:
        return loader(split)


def mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP(FEATURES, (6,), CLASSES)


def deep_mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def bn_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, CLASSES))


def supervised(net: nn.Module | None = None, lr: float = 0.1, **kwargs: Any) -> SupervisedModule:
    return SupervisedModule(mlp() if net is None else net, optimizer=partial(torch.optim.AdamW, lr=lr), **kwargs)


class Plain(pl.LightningModule):
    """A module that knows nothing of this package."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = mlp() if net is None else net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def by_hand(start: nn.Module, end: nn.Module, split: str, num_points: int = 5, **kwargs: Any) -> PathResult:
    """Evaluate the segment between two networks in one process."""
    return evaluate_path(start, end, loader(split), num_points, progress=False, **kwargs)


def assert_same(result: PathResult, expected: PathResult, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(result.alphas, expected.alphas, rtol=0, atol=0)
    torch.testing.assert_close(result.loss, expected.loss, rtol=tolerance, atol=tolerance)
    assert result.num_samples == expected.num_samples


def frozen(net: nn.Module) -> nn.Module:
    """A copy that training does not change."""
    return copy.deepcopy(net)
