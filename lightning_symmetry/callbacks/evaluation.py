"""What a callback needs to evaluate a module after training: its loaders, its loss and its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from lightning_symmetry.low_rank.layout import recomposed_state
from lightning_symmetry.surgery import uncompiled

Split = Literal["train", "val", "test"]


def split_loader(trainer: pl.Trainer, module: pl.LightningModule, split: Split) -> CombinedLoader:
    """Return batches of a whole split in fixed order, the same on every rank.

    A datamodule's ``eval_dataloader(split)`` is taken where there is one: it can leave the augmentation out. Otherwise
    the Trainer's own loaders are built anew, without shuffling and without a distributed sampler. Several loaders are
    combined as the Trainer does it: training batches side by side, those of other splits one loader after the other.

    Returns:
        A loader of ``(batch, batch_idx, dataloader_idx)``.

    Raises:
        MisconfigurationException: If there is no such loader.
    """
    datamodule = trainer.datamodule
    if datamodule is not None and hasattr(datamodule, "eval_dataloader"):
        return CombinedLoader(datamodule.eval_dataloader(split), "sequential")
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
    return CombinedLoader(tree_map(_in_order, loaders), "max_size_cycle" if split == "train" else "sequential")


def _in_order(loader: Any) -> Any:
    """Return a loader over the same samples in their own order."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return loader
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(sampler, DistributedSamplerWrapper):
        sampler = sampler.dataset._sampler
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, sorted(sampler.indices))
    return DataLoader(
        dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
    )


def evaluation_step(
    module: pl.LightningModule, split: Split, trainer: pl.Trainer
) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return how a module is evaluated: ``step`` and ``loss`` of :func:`~lightning_symmetry.landscape.evaluate_path`.

    A module with ``output_and_target(batch, split)`` and ``loss`` says it itself. Of any other the step of the split is
    called (its training step where that returns no loss) and weighted by the batch size.
    """
    if hasattr(module, "output_and_target") and callable(getattr(module, "loss", None)):
        return (lambda net, item: net.output_and_target(item[0], split)), module.loss
    names = {"train": [], "val": ["validation_step"], "test": ["test_step"]}[split]
    if module.automatic_optimization:  # else the training step would step the optimizers
        names.append("training_step")
    names = [name for name in names if is_overridden(name, module, pl.LightningModule)]
    quiet = QuietTrainer(trainer)

    def step(net: pl.LightningModule, item: tuple[Any, int, int]) -> tuple[Tensor, int]:
        net.trainer = quiet
        for name in names:
            loss = loss_in(call_step(getattr(net, name), *item))
            if loss is not None:
                return loss, extract_batch_size(item[0])
        raise MisconfigurationException(
            f"{type(net).__name__} returns no loss to evaluate from {' and '.join(names) or 'a step'}; return it, or "
            "give the module `output_and_target(batch, split)` and `loss`."
        )

    return step, None


def call_step(step: Callable[..., Any], batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
    """Call a step with those of its arguments that it takes."""
    arguments: list[Any] = [batch]
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        arguments.append(batch_idx)
    if is_param_in_hook_signature(step, "dataloader_idx", explicit=True):
        arguments.append(dataloader_idx)
    return step(*arguments)


def loss_in(output: Any) -> Tensor | None:
    """Return the loss that a step has returned, by itself or in a dictionary, detached; None where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


class QuietTrainer:
    """A trainer as the steps of a copy may see it: the real one, but what they log goes nowhere."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.loggers = [DummyLogger()]
        self.logger = self.loggers[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def quiet_copy(module: pl.LightningModule) -> pl.LightningModule:
    """Return a deep copy without trainer that is not compiled, synchronises nothing and whose ``log`` does nothing."""
    clone = copy.deepcopy(module, _detached(module))
    for part in clone.modules():
        if isinstance(part, pl.LightningModule):
            for name in ("log", "log_dict"):
                part.__dict__[name] = _ignore
            part._compiled_call_impl = None  # it would call the original, as would compiled steps
            if part._compiler_ctx is not None:
                to_uncompiled(part)
    if any(isinstance(part, nn.SyncBatchNorm) for part in clone.modules()):
        clone = TorchSyncBatchNorm().revert(clone)
    return clone


def _detached(module: nn.Module) -> dict[int, Tensor]:
    """Return what stands for results that the module keeps, which cannot be deep-copied with their history."""
    kept = (leaf for part in module.modules() for leaf in tree_leaves(vars(part)) if isinstance(leaf, Tensor))
    return {id(leaf): leaf.detach().clone() for leaf in kept if not leaf.is_leaf}


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""


@contextmanager
def evaluating(trainer: pl.Trainer) -> Iterator[None]:
    """Set the trainer's stage as in validation, so that hooks do not augment, and isolate the random state.

    Within, the random state is the same on every rank and in every run.
    """
    stage = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        with isolate_rng():
            torch.manual_seed(0)
            yield
    finally:
        trainer.state.stage = stage


def matching_state(state: dict[str, Tensor], target: nn.Module, source: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Find the part of ``target`` that a state dict belongs to: itself or one of its children.

    Args:
        state: The state dict; the prefix that ``torch.compile`` writes is ignored, and factors are multiplied.
        target: A module, in which no layer has factors.
        source: What the state dict is, for the error.

    Returns:
        The part and its state.

    Raises:
        MisconfigurationException: If it belongs to none.
    """
    for part in (target, *target.children()):
        try:
            ours, plain = part.state_dict(), recomposed_state(part, state)
        except ValueError as error:
            raise MisconfigurationException(f"The reference ({source}) differs in architecture: {error}") from error
        keys = {uncompiled(key): key for key in ours}
        if keys.keys() != plain.keys():
            continue
        plain = {keys[key]: value for key, value in plain.items()}
        for key, value in plain.items():
            if value.shape != ours[key].shape:
                raise MisconfigurationException(
                    f"The reference ({source}) differs in architecture: {key} has shape {tuple(value.shape)} in it and "
                    f"{tuple(ours[key].shape)} in the trained module."
                )
        return part, plain
    ours, wanted = ({uncompiled(key) for key in one} for one in (target.state_dict(), state))
    missing, extra = sorted(ours - wanted), sorted(wanted - ours)
    raise MisconfigurationException(
        f"The reference ({source}) is no {type(target).__name__}: it lacks {missing[:3]} ({len(missing)} entries) "
        f"and has {extra[:3]} ({len(extra)} entries) that the trained module does not."
    )
