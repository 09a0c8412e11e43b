"""Train one chunk of a zoo, in whatever process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.population import evaluate_population, train_population
from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.zoo_factory import seeded_network
from lightning_symmetry.metanets.zoo_files import DTYPES, ZooError, ZooHeader, constants_digest
from lightning_symmetry.metanets.zoo_layout import ZooLayout, fixed_entries
from lightning_symmetry.metanets.zoo_plan import Chunk

Data = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ZooJob:
    """What the training of every chunk needs but the data; it can be sent to another process.

    Attributes:
        factory: What builds a network, or its name.
        arguments: Its keyword arguments.
        hyperparameters: Of all networks, by `index`.
        settings: What all networks share.
        keep_history: Whether to note the training accuracy of every epoch.
        header: What is true of all networks.
    """

    factory: str | Callable[..., nn.Module]
    arguments: Mapping[str, Any]
    hyperparameters: Mapping[str, np.ndarray]
    settings: PopulationSettings
    keep_history: bool
    header: ZooHeader

    def network(self, index: int) -> nn.Module:
        """Build the untrained network of an index.

        Args:
            index: Which one.

        Raises:
            ZooError: If it is no network of this zoo.
        """
        seed = int(self.hyperparameters["seed"][index])
        network = seeded_network(self.factory, seed, **self.arguments)
        layout = ZooLayout.of(network)
        if found := self.header.layout.difference(layout, "the first network", f"that of seed {seed}"):
            raise ZooError(f"Expected `factory` to build one architecture for every seed, but {found}.")
        if shared_digest(network, layout) != self.header.constants:
            raise ZooError(
                "Expected `factory` to build the same masks and constants for every seed, but those of seed "
                f"{seed} are not those of the first network: make all networks asymmetric with one seed."
            )
        return network


@dataclass(frozen=True)
class TrainedChunk:
    """What came of a chunk of K networks.

    Attributes:
        states: What :class:`~lightning_symmetry.metanets.ZooWriter` writes, by name, each ``(K, *shape)``.
        records: What it notes.
    """

    states: dict[str, np.ndarray]
    records: list[dict[str, Any]]


def shared_digest(network: nn.Module, layout: ZooLayout) -> str:
    """Return the digest of what all networks of a zoo share, as its header has it.

    Args:
        network: A network.
        layout: Its layout.
    """
    state = network.state_dict()
    constants = {entry.name: state[entry.name] for entry in layout.having("constant")}
    return constants_digest(constants, fixed_entries(network, layout))


def check_trainable(job: ZooJob, data: Data, networks: Sequence[nn.Module]) -> None:
    """Train and evaluate some networks for one step, on two samples, so that what is wrong with all is said at once.

    Args:
        job: What to train.
        data: The data.
        networks: Some of its networks.

    Raises:
        ValueError: If that fails.
    """
    own = {name: values[: len(networks)] for name, values in job.hyperparameters.items()}
    own = {**own, "epochs": np.ones(len(networks), np.int64)}
    # The sample with the largest class is one that a network with too few outputs fails at.
    few = {name: tuple(v[[0, int(split[1].argmax())]] for v in split) for name, split in data.items()}
    try:
        result = train_population(networks, *few["train"], own, job.settings)
        for split in few.values():
            evaluate_population(networks[0], result.final, *split)
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"The networks of `factory` cannot be trained on `data` with these settings: {what}"
        ) from error


def train_chunk(job: ZooJob, data: Data, chunk: Chunk, on_epoch: Callable[[int], None]) -> TrainedChunk:
    """Train and evaluate the networks of a chunk, with one thread: the result does not depend on the process.

    Args:
        job: What to train.
        data: Data of "train" and maybe "val" and "test".
        chunk: Which networks.
        on_epoch: Called with the number of network-epochs just done.

    Returns:
        Weights and records.

    Raises:
        ValueError: If the networks cannot be trained as a population.
    """
    begun = time.perf_counter()
    rows = list(chunk.indices)
    own = {name: values[rows] for name, values in job.hyperparameters.items()}
    networks = [job.network(index) for index in rows]
    result = train_population(networks, *data["train"], own, job.settings, on_epoch=on_epoch)
    kept = {entry.name for entry in job.header.layout.having("parameter", "buffer", "counter")}
    states = {name: value for name, value in result.final.items() if name in kept}
    diverged = result.diverged.clone()
    if job.header.dtype == "float16":
        for value in states.values():
            if value.is_floating_point():
                diverged |= (value.flatten(1).abs() > float(np.finfo(DTYPES["float16"]).max)).any(1)
    columns: dict[str, Any] = dict(own) | {"epochs_done": result.epochs_done.numpy()}
    columns |= _evaluated(networks[0], result.final, data, torch.from_numpy(own["label_smoothing"]), diverged)
    seconds = (time.perf_counter() - begun) / len(rows)
    records = []
    for place, index in enumerate(rows):
        record = {"index": index, "status": "diverged" if diverged[place] else "ok"}
        record |= {name: values[place].item() for name, values in columns.items()}
        if job.keep_history:
            record["train_accuracies"] = result.history_accuracy[place, : result.epochs_done[place]].tolist()
        records.append({**record, "_seconds": seconds})
    return TrainedChunk({name: _array(value) for name, value in states.items()}, records)


def _evaluated(
    network: nn.Module, states: Mapping[str, Tensor], data: Data, smoothing: Tensor, diverged: Tensor
) -> dict[str, Tensor]:
    """Return losses and accuracies by name of the record, NaN where a network diverged."""
    found = {}
    for split in ("train", "val", "test"):
        if split in data:
            # The training loss is the one that was minimised; the others are to be compared between networks.
            loss, accuracy = evaluate_population(
                network, states, *data[split], label_smoothing=smoothing if split == "train" else 0.0
            )
            found[f"{split}_loss"] = loss.masked_fill(diverged, torch.nan)
            found["accuracy" if split == "test" else f"{split}_accuracy"] = accuracy.masked_fill(diverged, torch.nan)
    return found


def _array(value: Tensor) -> np.ndarray:
    return (value.float() if value.is_floating_point() else value).contiguous().numpy()
