"""Two processes under the Trainer: one network, and losses over the samples of both."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from distributed import SpawnedProcesses
from torch.utils.data import DataLoader, TensorDataset

from lightning_symmetry import MLP, AsymmetricModule
from lightning_symmetry.asymmetry import AsymmetricLayer


@pytest.mark.filterwarnings("ignore:.*number of training batches")
def test_ddp(tmp_path):
    torch.manual_seed(0)
    module = AsymmetricModule(MLP(8, (16,), 4), n_fix=3)
    constants = {n: (m.mask.clone(), m.fixed.clone()) for n, m in module.net.named_modules() if hasattr(m, "mask")}
    x = torch.randn(24, 8) * torch.linspace(0.1, 3, 24)[:, None]
    target = torch.arange(24) % 4
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SpawnedProcesses(),
        max_epochs=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(TensorDataset(x, target), 5)  # batches of 5, 5 and 2 samples in each process
    trainer.fit(module, loader, loader)
    assert sum(isinstance(m, AsymmetricLayer) for m in module.modules()) == len(constants) == 2
    for name, (mask, fixed) in constants.items():
        layer = module.net.get_submodule(name)
        assert torch.equal(layer.mask, mask)
        assert torch.equal(layer.state_dict()["weight"][~mask].view_as(fixed), fixed)
    output = module(x)
    assert trainer.callback_metrics["val/loss"] == pytest.approx(F.cross_entropy(output, target).item(), rel=1e-5)
    hits = (output.argmax(1) == target).double().mean().item()
    assert trainer.callback_metrics["val/accuracy"] == pytest.approx(hits, rel=1e-6)
