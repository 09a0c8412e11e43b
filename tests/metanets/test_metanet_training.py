"""Metanetworks train with SupervisedModule on a small synthetic zoo."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import KendallRankCorrCoef, R2Score

from lightning_symmetry import MLP, SupervisedModule, trace_permutations
from lightning_symmetry.metanets import DMC, FlatMLP, GraphMetanetwork, StatNN, WeightDeepSets, WeightLayout

METANETS = {
    "statistics": (lambda layout, spec: StatNN(layout, (32,), bounded=True), 0.9),
    "flat": (lambda layout, spec: FlatMLP(layout, (32,), bounded=True), 0.0),
    "convolutions": (lambda layout, spec: DMC(layout, (4, 8), hidden=16, bounded=True), 0.0),
    "deep sets": (lambda layout, spec: WeightDeepSets(layout, 16, (16,), bounded=True), 0.0),
    "graph": (lambda layout, spec: GraphMetanetwork(layout, spec, hidden=8, layers=2, bounded=True), 0.0),
}


def synthetic_zoo(layout: WeightLayout, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights about a mean of their own in each tensor, and as "accuracy" a function of two tensors."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(n, len(layout.shapes), generator=generator)
    weights = means[:, layout.tensor_of] + 0.5 * torch.randn(n, layout.num_features, generator=generator)
    first, last = (layout.tensor_of == layout.names.index(f"linears.{k}.weight") for k in (0, 1))
    score = weights[:, first].mean(1) - weights[:, last].mean(1)
    return weights, score.sigmoid()


@pytest.mark.parametrize("name", METANETS)
def test_they_learn_to_predict_a_function_of_weights(name, tmp_path):
    pl.seed_everything(0)
    net = MLP(4, (6,), 2, norm=False)
    layout, spec = WeightLayout.of(net), trace_permutations(net)
    weights, accuracy = synthetic_zoo(layout, 384)
    make, least = METANETS[name]
    metanet = make(layout, spec).fit_normalization(weights[:256])
    module = SupervisedModule(
        metanet,
        loss=mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        metrics={"r2": R2Score(), "kendall": KendallRankCorrCoef()},
    )
    trainer = pl.Trainer(
        max_epochs=15,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=15,
        default_root_dir=tmp_path,
    )
    train = DataLoader(TensorDataset(weights[:256], accuracy[:256]), 32, shuffle=True)
    trainer.fit(module, train, DataLoader(TensorDataset(weights[256:], accuracy[256:]), 128))
    assert trainer.callback_metrics["val/r2"] > least
    assert trainer.callback_metrics["val/kendall"] > least / 2
    with torch.no_grad():
        predicted = module(weights)
    assert 0 <= predicted.min() <= predicted.max() <= 1
