"""What a callback needs to evaluate a module after training: its loaders, its loss and its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

Split = Literal["train", "val", "test"]


def split_loader(trainer: pl.Trainer, module: pl.LightningModule, split: Split) -> Iterable[Any]:
    """Return batches of a whole split in fixed order, the same on every rank.

    A datamodule's ``eval_dataloader(split)`` is taken where there is one: it can leave the augmentation out. Otherwise
    the Trainer's own loaders are built anew, without shuffling and without a distributed sampler.

    Raises:
        MisconfigurationException: If there is no such loader.
    """
    datamodule = trainer.datamodule
    if datamodule is not None and hasattr(datamodule, "eval_dataloader"):
        return datamodule.eval_dataloader(split)
    loaders: Any = {"train": trainer.train_dataloader, "val": trainer.val_dataloaders, "test": None}[split]
    hook = f"{split}_dataloader"
    if loaders is None and datamodule is not None and is_overridden(hook, datamodule, pl.LightningDataModule):
        if split == "test":
            datamodule.setup("test")
        loaders = getattr(datamodule, hook)()
    elif loaders is None and is_overridden(hook, module, pl.LightningModule):
        loaders = getattr(module, hook)()
    if loaders is None:
        raise MisconfigurationException(
            f"The split {split!r} has no dataloader: give `fit` a {hook}, or choose another `split`."
        )
    if isinstance(loaders, list | tuple):
        return chain.from_iterable(_in_order(loader) for loader in loaders)
    return _in_order(loaders)


def _in_order(loader: Any) -> Any:
    """Return a loader over the same data set in its own order."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
    )


def evaluation_step(module: pl.LightningModule, split: Split) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return how a module is evaluated: ``step`` and ``loss`` of :func:`~lightning_symmetry.landscape.evaluate_path`.

    A module with ``output_and_target(batch, split)`` and ``loss`` says it itself. Of any other the step of the split is
    called (its training step where that returns no loss) and weighted by the batch size.
    """
    if hasattr(module, "output_and_target") and callable(getattr(module, "loss", None)):
        return (lambda net, batch: net.output_and_target(batch, split)), module.loss
    names = {"train": ["training_step"], "val": ["validation_step"], "test": ["test_step"]}[split]
    names = [name for name in names if is_overridden(name, module, pl.LightningModule)]
    names += [] if split == "train" else ["training_step"]

    def step(net: pl.LightningModule, batch: Any) -> tuple[Tensor, int]:
        for name in names:
            loss = getattr(net, name)(batch, 0)
            if isinstance(loss, dict):
                loss = loss.get("loss")
            if isinstance(loss, Tensor):
                return loss.detach(), extract_batch_size(batch)
        raise MisconfigurationException(
            f"{type(net).__name__}.{' and '.join(names)} return no loss to evaluate; return it, or give the module "
            "`output_and_target(batch, split)` and `loss`."
        )

    return step, None


def quiet_copy(module: pl.LightningModule) -> pl.LightningModule:
    """Return a deep copy without trainer whose ``self.log`` does nothing."""
    clone = copy.deepcopy(module)
    for name in ("log", "log_dict"):
        clone.__dict__[name] = _ignore
    return clone


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""


def matching_state(state: dict[str, Tensor], target: nn.Module, source: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Find the part of ``target`` that a state dict belongs to: itself or one of its children.

    Args:
        state: The state dict; the prefix that ``torch.compile`` writes is ignored.
        target: A module.
        source: What the state dict is, for the error.

    Returns:
        The part and its state.

    Raises:
        MisconfigurationException: If it belongs to none.
    """
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}
    wanted = set(state)
    for _, part in chain([("", target)], target.named_children()):
        keys = {key.replace("_orig_mod.", ""): key for key in part.state_dict()}
        if set(keys) == wanted:
            return part, {keys[key]: value for key, value in state.items()}
    ours = {key.replace("_orig_mod.", "") for key in target.state_dict()}
    missing, extra = sorted(ours - wanted), sorted(wanted - ours)
    raise MisconfigurationException(
        f"The reference ({source}) is no {type(target).__name__}: it lacks {missing[:3]} ({len(missing)} entries) "
        f"and has {extra[:3]} ({len(extra)} entries) that the trained module does not."
    )
