"""Where callbacks draw."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_symmetry.callbacks.loggers import experiments_with


def test_experiments_that_have_a_method(tmp_path):
    board = TensorBoardLogger(tmp_path)
    trainer = pl.Trainer(logger=[CSVLogger(tmp_path), board], accelerator="cpu")
    assert experiments_with(trainer, "add_figure") == [board.experiment]
    assert experiments_with(trainer, "add_nothing") == []
    assert experiments_with(pl.Trainer(logger=False, accelerator="cpu"), "add_figure") == []


def test_the_logger_of_a_fast_dev_run_takes_nothing():
    assert experiments_with(pl.Trainer(fast_dev_run=True, accelerator="cpu"), "add_figure") == []
