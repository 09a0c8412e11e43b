"""Hand an optimizer over to the parameters of layers that take the place of others, in the middle of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_symmetry.surgery.optimizer_states import MomentMap, carried_states, fresh_states

Moments = Literal["project", "reset"]


@dataclass(frozen=True)
class Substitution:
    """New parameters in the place of an old one.

    Attributes:
        old: The parameter that is no more.
        new: Those that stand for it.
        moments: How what an optimizer knows of it becomes what it knows of them.
    """

    old: nn.Parameter
    new: tuple[nn.Parameter, ...]
    moments: MomentMap


@dataclass(frozen=True)
class Replacement:
    """A layer in the place of another one; parameters that both have stay in the optimizer as they are.

    Attributes:
        old: The layer that was replaced.
        new: The layer in its place.
        substitutions: The parameters that are new.
    """

    old: nn.Module
    new: nn.Module
    substitutions: tuple[Substitution, ...]


def hand_over(optimizers: Iterable[Optimizer], replacements: Sequence[Replacement], moments: Moments) -> None:
    r"""Make optimizers step on the parameters of new layers.

    New parameters go into the group of the one that they stand for, at its position, in the order of
    ``named_parameters()``: an optimizer that is built for the new network has the same order, and its
    ``load_state_dict``, which maps states by position, finds each its own. Groups stay the same objects with the same
    settings, so that schedulers go on. Of parameters that no optimizer has, the new ones have none either.

    Nothing is changed before all new states are there: an error leaves the optimizers as they were.

    Args:
        optimizers: The optimizers.
        replacements: The layers.
        moments: ``"project"`` carries an optimizer's states on, see
            :func:`~lightning_symmetry.surgery.optimizer_states.carried_states`. ``"reset"`` lets it see new
            parameters for the first time: their moments and numbers of steps begin anew, those of others go on.

    Raises:
        UnknownStateError: If there is a state that cannot be projected.
        ValueError: If ``moments`` is neither, or the optimizer keeps states of all parameters together (L-BFGS).
    """
    if moments not in ("project", "reset"):
        raise ValueError(f"Expected `moments` to be 'project' or 'reset' but got {moments!r}.")
    plans = [_plan(optimizer, replacements, moments) for optimizer in optimizers]
    for optimizer, groups, states, gone in plans:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        optimizer.state.update(states)


Plan = tuple[Optimizer, list[dict[str, Any]], dict[nn.Parameter, dict[str, Any]], list[nn.Parameter]]


def _plan(optimizer: Optimizer, replacements: Sequence[Replacement], moments: Moments) -> Plan:
    """Return what will be of an optimizer: entries of its groups, new states, parameters to forget."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS keeps its history of all parameters in one vector, which cannot be handed over.")
    groups: list[dict[str, Any]] = []
    states: dict[nn.Parameter, dict[str, Any]] = {}
    gone: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        held = {id(parameter) for parameter in group["params"]}
        names = group.get("param_names") or [""] * len(group["params"])
        entries = list(zip(group["params"], names, strict=True))
        for replacement in replacements:
            entries = _substituted(entries, replacement)
            for substitution in replacement.substitutions:
                old, new = substitution.old, substitution.new
                if id(old) not in held or any(old is other for other in gone):
                    continue
                gone.append(old)
                if moments == "project" and old in optimizer.state:
                    made = carried_states(optimizer, group, old, new, substitution.moments)
                else:
                    made = fresh_states(optimizer, group, new)
                states.update({parameter: state for parameter, state in zip(new, made, strict=True) if state})
        settings: dict[str, Any] = {"params": [parameter for parameter, _ in entries]}
        if "param_names" in group:
            settings["param_names"] = [name for _, name in entries]
        groups.append(settings)
    return optimizer, groups, states, gone


Entries = list[tuple[nn.Parameter, str]]


def _substituted(entries: Entries, replacement: Replacement) -> Entries:
    """Return the parameters of a group, and their names, with those of a new layer.

    All of the layer's parameters go to the place of the first one, in the layer's order: it need not have the same
    parameters first. Where the group had another order than the old layer, they go to the place of the one that they
    stand for.
    """
    old_names = {id(parameter): name for name, parameter in replacement.old.named_parameters()}
    new_names = {id(parameter): name for name, parameter in replacement.new.named_parameters()}
    origins = {id(new): id(one.old) for one in replacement.substitutions for new in one.new}
    here = [(index, *entry) for index, entry in enumerate(entries) if id(entry[0]) in old_names]
    wanted = {id(parameter) for _, parameter, _ in here}
    if not any(id(one.old) in wanted for one in replacement.substitutions):
        return entries
    prefixes = {id(p): name.removesuffix(old_names[id(p)]) for _, p, name in here}

    def of_new(parameters: Iterable[nn.Parameter], prefix: str) -> Entries:
        return [(p, prefix + new_names[id(p)] if names_kept else "") for p in parameters]

    names_kept = any(name for _, name in entries)
    order = list(old_names)
    ranks = [order.index(id(parameter)) for _, parameter, _ in here]
    if ranks != sorted(ranks):
        by_origin = {id(one.old): one.new for one in replacement.substitutions}
        result: Entries = []
        for parameter, name in entries:
            new = by_origin.get(id(parameter))
            result += [(parameter, name)] if new is None else of_new(new, prefixes[id(parameter)])
        return result
    first, places = here[0][0], {index for index, _, _ in here}
    prefix = prefixes[id(here[0][1])]
    block = [p for p in replacement.new.parameters() if origins.get(id(p), id(p)) in wanted]
    before = [entry for index, entry in enumerate(entries) if index < first and index not in places]
    after = [entry for index, entry in enumerate(entries) if index > first and index not in places]
    return [*before, *of_new(block, prefix), *after]


def rebuild_distributed(strategy: Any) -> None:
    """Wrap the module of a Lightning strategy anew where it is wrapped for data-parallel training.

    ``DistributedDataParallel`` notes the parameters when it is built: without this it would not reduce the gradients
    of new ones. Building it also gives all processes the parameters and buffers of the first.

    Args:
        strategy: The trainer's strategy.
    """
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Give all processes the tensors of the first one, in place; nothing where there is one process.

    Args:
        tensors: The tensors, in the same order in all processes.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)
