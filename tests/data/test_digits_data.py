"""The digits: split, normalisation, loaders, and a fit."""

from __future__ import annotations

import pickle

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_symmetry.data import DigitsData


def gather(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


@pytest.mark.parametrize(
    ("val_fraction", "sizes"), [(0.0, (1437, 360, 360)), (0.1, (1257, 180, 360)), (0.3, (898, 539, 360))]
)
def test_sizes(val_fraction, sizes):
    data = DigitsData(val_fraction=val_fraction)
    splits = [data.eval_dataloader(name) for name in ("train", "val", "test")]
    assert tuple(len(loader.dataset) for loader in splits) == sizes


def test_splits_are_a_stratified_partition_of_the_digits():
    data = DigitsData(val_fraction=0.1)
    images, labels = zip(*(gather(data.eval_dataloader(s)) for s in ("train", "val", "test")), strict=True)
    train = data.eval_dataloader("train").dataset

    raw = torch.cat(images) * train.std + train.mean
    raw = (raw * 16).round().flatten(1).to(torch.int64)
    digits = load_digits()
    rows = torch.cat([raw, torch.cat(labels)[:, None]], dim=1)
    expected = torch.from_numpy(np.column_stack([digits.data, digits.target])).to(torch.int64)
    assert sorted(rows.tolist()) == sorted(expected.tolist())

    overall = np.bincount(digits.target) / 1797
    for part in labels:
        assert np.abs(part.bincount(minlength=10).numpy() - overall * len(part)).max() < 1.5


def test_split_depends_on_its_seed_only():
    torch.manual_seed(1)
    np.random.seed(1)
    first = gather(DigitsData(split_seed=3).test_dataloader())
    torch.manual_seed(2)
    np.random.seed(2)
    again = gather(DigitsData(split_seed=3).test_dataloader())
    other = gather(DigitsData(split_seed=4).test_dataloader())
    with_val = gather(DigitsData(split_seed=3, val_fraction=0.2).test_dataloader())
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[1], with_val[1])
    assert not torch.equal(first[0], other[0])


def test_setup_leaves_the_global_random_states():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    DigitsData(val_fraction=0.1).setup("fit")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_normalised_by_training_pixels():
    data = DigitsData()
    images, _ = gather(data.eval_dataloader("train"))
    assert images.shape == (1437, *data.input_shape)
    assert abs(images.double().mean()) < 1e-6
    assert abs(images.double().std(correction=0) - 1) < 1e-6


def test_flatten():
    flat, square = DigitsData(flatten=True), DigitsData()
    assert flat.input_shape == (64,)
    assert square.input_shape == (1, 8, 8)
    assert flat.num_features == square.num_features == 64
    assert flat.num_classes == 10
    assert torch.equal(gather(flat.test_dataloader())[0], gather(square.test_dataloader())[0].flatten(1))


def test_only_training_is_shuffled_and_nothing_is_dropped():
    data = DigitsData(batch_size=100, eval_batch_size=1000)
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert [len(y) for _, y in data.train_dataloader()] == [100] * 14 + [37]
    for loader in (data.val_dataloader(), data.test_dataloader(), data.eval_dataloader("train")):
        assert isinstance(loader.sampler, SequentialSampler)
    assert [len(y) for _, y in data.eval_dataloader("train")] == [1000, 437]


def test_loads_once():
    data = DigitsData()
    data.setup("fit")
    dataset = data.test_dataloader().dataset
    data.setup("test")
    assert data.test_dataloader().dataset is dataset


def test_loader_with_a_worker_pickles():
    loader = pickle.loads(pickle.dumps(DigitsData(num_workers=1).val_dataloader()))
    images, labels = gather(loader)
    expected = gather(DigitsData().val_dataloader())
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` to be an integer of at least 1, but got 0"),
        ({"num_workers": -1}, "`num_workers` to be an integer of at least 0, but got -1"),
        ({"test_fraction": 0.0}, r"`test_fraction` to be a fraction in \(0, 1\), but got 0.0"),
        ({"val_fraction": 1.0}, r"`val_fraction` to be a fraction in \[0, 1\), but got 1.0"),
        ({"test_fraction": 0.6, "val_fraction": 0.4}, "add up to less than 1, but got 0.6 and 0.4"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        DigitsData(**arguments)


def test_unknown_split():
    with pytest.raises(ValueError, match=r"`split` to be one of .*'train', 'val'.* but got 'valid'"):
        DigitsData().eval_dataloader("valid")


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(tmp_path, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet, **options)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_fit_test_and_checkpoint(tmp_path):
    pl.seed_everything(0)
    data = DigitsData(flatten=True)
    fitted = trainer(tmp_path, max_epochs=2)
    fitted.fit(Classifier(), datamodule=data)
    (result,) = fitted.test(ckpt_path="best", datamodule=data, verbose=False)
    assert fitted.global_step == 2 * 23
    assert result["accuracy"] > 0.9

    restored = DigitsData.load_from_checkpoint(fitted.checkpoint_callback.best_model_path)
    assert restored.hparams == data.hparams


@pytest.mark.filterwarnings("ignore")
def test_works_from_the_command_line(tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    cli = LightningCLI(
        Classifier,
        DigitsData,
        run=False,
        save_config_callback=None,
        trainer_defaults={"logger": False, "default_root_dir": str(tmp_path)},
        args=["--data.batch_size=32", "--data.flatten=true", "--trainer.accelerator=cpu"],
    )
    assert cli.datamodule.batch_size == 32
    assert cli.datamodule.input_shape == (64,)


def test_inputs_that_are_not_normalised_are_intensities() -> None:
    data, normalised = DigitsData(normalize=False), DigitsData()
    for module in (data, normalised):
        module.setup("fit")
    (images, _), (other, _) = (next(iter(module.eval_dataloader("train"))) for module in (data, normalised))
    assert images.min() == 0 and images.max() == 1
    scale = (other.max() - other.min()) / (images.max() - images.min())
    torch.testing.assert_close(images * scale + other.min(), other)
