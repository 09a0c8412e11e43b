"""Modules that know nothing of this package: which of their steps is evaluated, on which batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_modules import CLASSES, Plain, TinyData, assert_same, by_hand, frozen, loader, mlp, samples, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_symmetry import LinearInterpolation, evaluate_path


class WithoutIndex(Plain):
    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


class LossInDictionary(Plain):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": 1}

    def validation_step(self, batch, batch_idx):
        return {"loss": 2 * super().training_step(batch, batch_idx)}


class ValidationOfItsOwn(Plain):
    def validation_step(self, batch, batch_idx):
        return 2 * self.training_step(batch, batch_idx)


class ValidationLogsOnly(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))


class ValidationReturnsOutputs(Plain):
    def validation_step(self, batch, batch_idx):
        return self(batch[0])


class Logs(Plain):
    """Logs in each way, keeps metrics and hyper-parameters, and has a LightningModule within."""

    class Inner(pl.LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            assert self.trainer.max_epochs == 2
            return x

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.inner = self.Inner()
        self.metrics = {"loss": 0.0}
        self.save_hyperparameters(ignore=["net"])

    def validation_step(self, batch, batch_idx):
        output = self(self.inner(batch[0]))
        loss = F.cross_entropy(output, batch[1])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({"accuracy": self.accuracy(output, batch[1])})
        return loss


class UsesTrainer(Plain):
    """Asks the trainer, and writes to its logger."""

    def validation_step(self, batch, batch_idx):
        assert self.trainer.max_epochs == 2
        assert not self.trainer.training
        assert self.trainer.datamodule is not None
        assert self.current_epoch == self.trainer.current_epoch
        self.logger.experiment.add_scalar("images", 1.0, self.global_step)
        for logger in self.trainer.loggers:
            logger.log_metrics({"images": 1.0}, step=self.global_step)
        return self.training_step(batch, batch_idx)


class OtherLoss(Plain):
    """Has attributes by the names of a ``SupervisedModule``'s, of other kinds."""

    loss = 0.5
    metrics = nn.ModuleDict({"accuracy": MulticlassAccuracy(CLASSES)})


class SaysOutputs(Plain):
    """Gives output and target by itself, with metrics in an order of its own."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.loss = nn.CrossEntropyLoss()
        self.metrics = nn.ModuleDict({"accuracy": MulticlassAccuracy(CLASSES)})

    def output_and_target(self, batch, split):
        return self(batch[0]), batch[1]


# module, and the factor on its validation loss
MODULES = {
    "training step": (Plain, 1),
    "without batch_idx": (WithoutIndex, 1),
    "dictionary": (LossInDictionary, 2),
    "validation step": (ValidationOfItsOwn, 2),
    "validation step without loss": (ValidationLogsOnly, 1),
    "validation step with outputs": (ValidationReturnsOutputs, 1),
    "logging": (Logs, 1),
    "trainer": (UsesTrainer, 1),
    "loss of another kind": (OtherLoss, 1),
    "output and target": (SaysOutputs, 1),
}


def callback(**kwargs: Any) -> LinearInterpolation:
    return LinearInterpolation(**{"num_points": 5, "progress": False, "split": "val", **kwargs})


@pytest.mark.parametrize("case", MODULES.values(), ids=MODULES)
def test_any_module(case, tmp_path):
    build, factor = case
    module = build(mlp())
    start = frozen(module.net)
    interpolation = callback()
    run = trainer(interpolation, logger=TensorBoardLogger(tmp_path), log_every_n_steps=1)
    run.fit(module, datamodule=TinyData())
    expected = by_hand(start, module.net, "val", loss=lambda output, target: factor * F.cross_entropy(output, target))
    assert_same(interpolation.result, expected)
    assert interpolation.result.loss[0] > interpolation.result.loss[-1]
    assert interpolation.result.metrics == {}


def test_nothing_that_a_step_logs_is_written(tmp_path):
    counts = []
    for callbacks in ([], [callback()]):
        run = trainer(*callbacks, logger=TensorBoardLogger(tmp_path))
        run.fit(UsesTrainer(mlp()), datamodule=TinyData())
        events = EventAccumulator(run.logger.log_dir)
        events.Reload()
        counts.append(len(events.Scalars("images")))
    assert counts[0] == counts[1]


def test_the_step_of_the_split_is_taken():
    class Steps(Plain):
        def validation_step(self, batch, batch_idx):
            return 2 * self.training_step(batch, batch_idx)

        def test_step(self, batch, batch_idx):
            return 3 * self.training_step(batch, batch_idx)

    for split, factor in (("train", 1), ("val", 2), ("test", 3)):
        module = Steps(mlp())
        start = frozen(module.net)
        interpolation = callback(split=split)
        trainer(interpolation).fit(module, datamodule=TinyData())
        expected = by_hand(start, module.net, split)
        torch.testing.assert_close(interpolation.result.loss, factor * expected.loss, rtol=1e-6, atol=1e-6)


def test_a_step_sees_the_index_of_each_batch():
    seen = []

    class Indices(Plain):
        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking:
                seen.append(batch_idx)
            return self.training_step(batch, batch_idx)

    trainer(callback(num_points=3), max_epochs=1).fit(Indices(), datamodule=TinyData())
    assert seen == [0, 1] * 4  # one validation epoch, three positions


def test_a_module_without_a_loss_says_so():
    class Silent(Plain):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def validation_step(self, batch, batch_idx):
            return None

    module = Silent()
    with pytest.raises(MisconfigurationException, match="Silent returns no loss to evaluate from validation_step"):
        trainer(callback()).fit(module, datamodule=TinyData())


def test_manual_optimization_is_evaluated_by_its_validation_step():
    class Manual(Plain):
        def __init__(self, net):
            super().__init__(net)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

        def validation_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    module = Manual(mlp())
    start = frozen(module.net)
    interpolation = callback()
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(start, module.net, "val"))


class TwoLoaders(Plain):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        return (1 + dataloader_idx) * F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("form", [list, lambda loaders: dict(zip("ab", loaders, strict=True))], ids=["list", "dict"])
def test_several_validation_loaders_follow_each_other(form):
    module = TwoLoaders(mlp())
    start = frozen(module.net)
    interpolation = callback()
    loaders = form([loader("val"), loader("test", batch_size=4)])
    trainer(interpolation).fit(module, loader("train"), loaders)
    val, test = by_hand(start, module.net, "val"), by_hand(start, module.net, "test")
    expected = (14 * val.loss + 2 * 11 * test.loss) / 25
    torch.testing.assert_close(interpolation.result.loss, expected, rtol=1e-6, atol=1e-6)
    assert interpolation.result.num_samples == 25


@pytest.mark.parametrize("form", [list, lambda loaders: dict(zip("ab", loaders, strict=True))], ids=["list", "dict"])
def test_several_training_loaders_stand_side_by_side(form):
    class Sides(Plain):
        def training_step(self, batch, batch_idx):
            parts = list(batch.values()) if isinstance(batch, dict) else batch
            assert len(parts) == 2
            return sum(F.cross_entropy(self(x), y) for x, y in parts)

    module = Sides(mlp())
    start = frozen(module.net)
    interpolation = callback(split="train")
    trainer(interpolation).fit(module, form([loader("train", shuffle=True), loader("train")]))
    expected = by_hand(start, module.net, "train")
    torch.testing.assert_close(interpolation.result.loss, 2 * expected.loss, rtol=1e-6, atol=1e-6)


SAMPLERS = {
    "subset": (SubsetRandomSampler([1, 3, 5, 7, 20]), [1, 3, 5, 7, 20]),
    "weighted": (WeightedRandomSampler(torch.ones(26), 50), list(range(26))),
}


@pytest.mark.parametrize("case", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_that_selects_is_respected_and_one_that_weighs_is_not(case):
    sampler, indices = case
    data = samples("train")
    module = Plain(mlp())
    start = frozen(module.net)
    interpolation = callback(split="train")
    trainer(interpolation).fit(module, DataLoader(data, batch_size=4, sampler=sampler))
    expected = evaluate_path(start, module.net, [data[indices]], 5, progress=False)
    assert_same(interpolation.result, expected)


def test_hooks_that_augment_in_training_do_not():
    class Augments(Plain):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, y = batch
            return (x + 1 if self.trainer.training else x), y

    module = Augments(mlp())
    start = frozen(module.net)
    interpolation = callback(split="train")
    trainer(interpolation).fit(module, datamodule=TinyData())
    assert_same(interpolation.result, by_hand(start, module.net, "train"))


def test_loaders_of_the_module_itself():
    class Loads(Plain):
        def train_dataloader(self):
            return loader("train", shuffle=True)

        def val_dataloader(self):
            return loader("val")

        def test_dataloader(self):
            return loader("test")

    for split in ("train", "val", "test"):
        module = Loads(mlp())
        start = frozen(module.net)
        interpolation = callback(split=split)
        trainer(interpolation, limit_val_batches=0).fit(module)
        assert_same(interpolation.result, by_hand(start, module.net, split))


def test_loaders_without_batches_or_of_batches_are_taken_as_they_are():
    data = samples("train")
    whole = TensorDataset(data.tensors[0][None], data.tensors[1][None])

    class Batches:
        def __iter__(self):
            yield data.tensors

    for batches in (DataLoader(whole, batch_size=None), Batches()):
        module = Plain(mlp())
        start = frozen(module.net)
        interpolation = callback(split="train")
        trainer(interpolation).fit(module, batches)
        assert_same(interpolation.result, evaluate_path(start, module.net, [data.tensors], 5, progress=False))
