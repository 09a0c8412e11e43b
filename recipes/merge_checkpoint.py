"""The weights of one network in a Lightning checkpoint or a plain state dict."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared import UsageError
from torch import Tensor, nn

STALE = ("optimizer_states", "lr_schedulers", "callbacks")  # they belong to the weights that were trained


@dataclass(frozen=True)
class Checkpoint:
    """A file with a network's weights.

    Attributes:
        path: The file.
        content: What is in it.
        prefix: What the names of the network's tensors begin with, such as ``net.``.
        names: Names of the network's tensors, without prefix.
    """

    path: Path
    content: dict[str, Any]
    prefix: str
    names: tuple[str, ...]

    @classmethod
    def load(cls, path: str, net: nn.Module, prefix: str | None = None, weights_only: bool = True) -> Checkpoint:
        """Read a checkpoint and find a network in it.

        Args:
            path: A Lightning checkpoint or a plain state dict, as ``torch.save`` writes them.
            net: A network of the architecture; it is left as it is.
            prefix: Prefix of the network's names; by default it is found.
            weights_only: Refuse files with other Python objects, which could run any code.

        Raises:
            UsageError: If there is no such file, it is no checkpoint, or the network is not in it.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=weights_only)
        except FileNotFoundError as error:
            raise UsageError(f"There is no file {path} (in {os.getcwd()}).") from error
        except pickle.UnpicklingError as error:
            reason = str(error).partition("WeightsUnpickler error:")[2].partition("Please")[0].strip()
            raise UsageError(
                f"{path} does not hold tensors and plain values alone; if you trust where it comes from, add "
                f"`--weights_only false`. {reason}"
            ) from error
        except (EOFError, RuntimeError) as error:
            raise UsageError(f"{path} is no file of `torch.save`: {str(error).splitlines()[0]}") from error
        state = _state(content)
        if not state or not all(isinstance(name, str) for name in state):
            found = f"a dictionary of {list(content)[:5]}" if isinstance(content, Mapping) else type(content).__name__
            raise UsageError(
                f"{path} is neither a Lightning checkpoint (with 'state_dict') nor a state dict, but {found}."
            )
        wanted = {name: tensor for name, tensor in net.state_dict().items() if isinstance(tensor, Tensor)}
        if prefix is None:
            prefix = _find_prefix(path, wanted, state)
        _check(path, wanted, {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}, prefix)
        return cls(Path(path), content, prefix, tuple(wanted))

    def tensors(self) -> dict[str, Tensor]:
        """Return the network's state dict."""
        state = _state(self.content)
        return {name: state[self.prefix + name] for name in self.names}

    def save(self, net: nn.Module, path: Path) -> None:
        """Write a checkpoint of the same format with the weights of another network in their place.

        All else is kept but for the states of optimizers, schedulers and callbacks.
        """
        old, new = _state(self.content), net.state_dict()
        weights = {self.prefix + name: new[name].to("cpu", old[self.prefix + name].dtype) for name in self.names}
        state = {**old, **weights}
        content = {key: value for key, value in self.content.items() if key not in STALE}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**content, "state_dict": state} if "state_dict" in self.content else state, path)


def _state(content: Any) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint; none if it is something else."""
    found = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _find_prefix(path: str, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Return what stands before most of the network's names."""
    found: dict[str, int] = {}
    for name in wanted:
        for key in state:
            if key == name or key.endswith(f".{name}"):
                prefix = key[: len(key) - len(name)]
                found[prefix] = found.get(prefix, 0) + 1
    best = [prefix for prefix, count in found.items() if count == max(found.values())]
    if not best:
        raise UsageError(
            f"The network does not match {path}: it has {_some(list(wanted))}, and the file has {_some(list(state))}."
        )
    if len(best) > 1 and found[best[0]] == len(wanted):
        raise UsageError(
            f"{path} holds several networks of this architecture: choose one by `--prefix`, from {sorted(best)}."
        )
    return best[0]


def _check(path: str, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str) -> None:
    """Compare names and shapes."""
    differences = []
    if missing := [name for name in wanted if name not in state]:
        differences.append(f"the file lacks {_some(missing)}")
    if extra := [name for name in state if name not in wanted]:
        differences.append(f"the network lacks {_some(extra)}")
    shapes = [
        f"{name} ({tuple(tensor.shape)} in the network, {tuple(state[name].shape)} in the file)"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if shapes:
        differences.append(f"shapes differ: {_some(shapes)}")
    if differences:
        behind = f" behind the prefix {prefix!r}" * bool(prefix)
        raise UsageError(f"The network does not match {path}{behind}: {'; '.join(differences)}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
