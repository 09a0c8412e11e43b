"""Training of metanetworks: what is logged, when the input's standardisation is fitted, and the choice of a rate."""

from __future__ import annotations

import copy
import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from scipy.stats import kendalltau
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_symmetry.metanets import FlatMLP, StatNN
from lightning_symmetry.modules import LEARNING_RATES, WeightRegression, select_learning_rate

SHAPES = {"a": (3, 4), "b": (5,)}


def networks(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    rows = 3 + 2 * torch.randn(count, 17, generator=generator)
    return TensorDataset(rows, (rows[:, :12].mean(1) - rows[:, 12:].mean(1)).sigmoid())


def loader(data: TensorDataset, shuffle: bool = False) -> DataLoader:
    return DataLoader(data, 16, shuffle=shuffle)


def trainer(tmp_path, epochs: int = 2, **options) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return pl.Trainer(
        max_epochs=epochs, default_root_dir=tmp_path, **{"enable_checkpointing": False, **quiet, **options}
    )


def test_metrics_are_those_of_all_networks_together(tmp_path):
    module = WeightRegression(FlatMLP(SHAPES, (8,)))
    train, val, test = networks(40), networks(37, 1), networks(50, 2)
    run = trainer(tmp_path, check_val_every_n_epoch=1)
    run.fit(module, loader(train), loader(val))
    found = {"val": dict(run.callback_metrics), "test": run.test(module, loader(test), verbose=False)[0]}
    assert "train/loss" in found["val"] and "train/r2" not in found["val"]
    module.eval()
    for split, data in (("val", val), ("test", test)):
        rows, true = data.tensors
        with torch.no_grad():
            predicted = module(rows).double().numpy()
        true = true.double().numpy()
        residual = ((true - predicted) ** 2).sum()
        expected = {
            "loss": residual / len(true),
            "r2": 1 - residual / ((true - true.mean()) ** 2).sum(),
            "kendall": kendalltau(predicted, true).statistic,
        }
        for name, value in expected.items():
            assert float(found[split][f"{split}/{name}"]) == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_a_step_is_one_of_adamw_on_the_squared_error(tmp_path):
    data = networks(16)
    module = WeightRegression(FlatMLP(SHAPES, (8,)), learning_rate=0.02, weight_decay=0.3)
    reference = copy.deepcopy(module.net).fit_normalization(data.tensors[0])
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        (reference(data.tensors[0]) - data.tensors[1]).square().mean().backward()
        optimizer.step()
    trainer(tmp_path, 3).fit(module, loader(data))
    for ours, theirs in zip(module.net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [FlatMLP, StatNN])
def test_standardisation_is_fitted_to_all_training_networks(make, tmp_path):
    data = networks(50)
    module = WeightRegression(make(SHAPES, (8,)))
    trainer(tmp_path, 1, limit_train_batches=1).fit(module, loader(data, shuffle=True), loader(networks(20, 1)))
    found, expected = module.net.normalization, make(SHAPES, (8,)).fit_normalization(data.tensors[0]).normalization
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.std, expected.std)


def test_standardisation_moves_no_random_state(tmp_path):
    data = networks(48)
    fitted = FlatMLP(SHAPES, (8,)).fit_normalization(data.tensors[0])
    unfitted = copy.deepcopy(fitted)
    unfitted.normalization.fitted.fill_(False)
    ends = []
    for metanet in (fitted, unfitted):
        pl.seed_everything(3, verbose=False)
        trainer(tmp_path).fit(WeightRegression(metanet), loader(data, shuffle=True))
        ends.append(torch.cat([p.detach().flatten() for p in metanet.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_it_is_fitted_once(tmp_path):
    first, second = networks(32), networks(32, 1)
    module = WeightRegression(FlatMLP(SHAPES, (8,)))
    run = trainer(tmp_path)
    run.test(module, loader(second), verbose=False)
    assert not module.net.normalization.fitted
    run.fit(module, loader(first))
    mean = module.net.normalization.mean.clone()
    trainer(tmp_path).fit(module, loader(second))
    trainer(tmp_path).test(module, loader(second), verbose=False)
    assert torch.equal(module.net.normalization.mean, mean)
    other = FlatMLP(SHAPES, (8,)).fit_normalization(second.tensors[0])
    given = other.normalization.mean.clone()
    trainer(tmp_path).fit(WeightRegression(other), loader(first))
    assert torch.equal(other.normalization.mean, given)


def test_checkpoint_and_resume(tmp_path):
    data, file = networks(32), tmp_path / "half.ckpt"
    whole = WeightRegression(FlatMLP(SHAPES, (8,)), 0.01, 0.1)
    half, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    trainer(tmp_path, 4).fit(whole, loader(data))
    run = trainer(tmp_path, 2)
    run.fit(half, loader(data))
    run.save_checkpoint(file)
    # Other networks' statistics would be taken if they were taken on resume.
    resumed.net.normalization.mean.fill_(7)
    trainer(tmp_path, 4).fit(resumed, loader(data), ckpt_path=file)
    for ours, theirs in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    loaded = WeightRegression.load_from_checkpoint(file, metanetwork=FlatMLP(SHAPES, (8,)))
    assert loaded.hparams == {"learning_rate": 0.01, "weight_decay": 0.1}
    assert torch.equal(loaded(data.tensors[0]), half(data.tensors[0]))
    assert loaded.net.normalization.fitted


def test_another_loss_and_another_network(tmp_path):
    data = networks(32)
    bounded = WeightRegression(FlatMLP(SHAPES, (8,), bounded=True), 0.05, loss=nn.functional.binary_cross_entropy)
    trainer(tmp_path, 30).fit(bounded, loader(data))
    with torch.no_grad():
        assert (bounded(data.tensors[0]) - data.tensors[1]).square().mean() < data.tensors[1].var() / 4
    plain = nn.Sequential(nn.Linear(17, 1), nn.Flatten(0))
    trainer(tmp_path).fit(WeightRegression(plain), loader(data))


def test_predictions_of_another_shape_are_refused(tmp_path):
    module = WeightRegression(FlatMLP(SHAPES, (8,), outputs=1))
    with pytest.raises(ValueError, match=r"shape \(16,\) but got \(16, 1\)"):
        trainer(tmp_path).fit(module, loader(networks(32)))


def test_loaders_of_other_kinds(tmp_path):
    data = networks(32)
    batches = [(rows, true) for rows, true in loader(data)]
    module = WeightRegression(FlatMLP(SHAPES, (8,)))
    with pytest.raises(MisconfigurationException, match="fit_normalization"):
        trainer(tmp_path).fit(module, batches)
    trainer(tmp_path).fit(module, DataLoader(batches, batch_size=None))  # whose data set has batches
    expected = FlatMLP(SHAPES, (8,)).fit_normalization(data.tensors[0]).normalization
    torch.testing.assert_close(module.net.normalization.mean, expected.mean)


def test_choice_of_the_learning_rate():
    assert LEARNING_RATES == (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2)
    assert select_learning_rate({1e-4: -3.0, 1e-3: 0.5, 1e-2: 0.4}) == 1e-3
    assert select_learning_rate({1e-2: 0.5, 1e-4: math.nan, 1e-3: 0.5}) == 1e-3
    assert select_learning_rate({1e-2: -np.inf, 1e-4: np.nan, 1e-3: -1e9}) == 1e-3
    with pytest.raises(ValueError, match="at least one learning rate"):
        select_learning_rate({1e-3: math.nan})
