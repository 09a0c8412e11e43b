"""Train the networks of a zoo: many at once, in worker processes, in shards, to be interrupted and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.metanets.population import suggested_chunk
from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_chunk import TrainedChunk, ZooJob, check_trainable, shared_digest, train_chunk
from lightning_symmetry.metanets.zoo_factory import described_factory, factory_name, seeded_network
from lightning_symmetry.metanets.zoo_files import DTYPES, HEADER, ZooError, ZooHeader, library_versions
from lightning_symmetry.metanets.zoo_layout import ZooLayout
from lightning_symmetry.metanets.zoo_notes import TrainingNotes
from lightning_symmetry.metanets.zoo_plan import (
    Chunk,
    check_shard,
    complete_hyperparameters,
    default_workers,
    launched_shard,
    plan_chunks,
)
from lightning_symmetry.metanets.zoo_shards import (
    is_finished,
    merge_shards,
    merge_when_finished,
    shard_folder,
    shard_folders,
)
from lightning_symmetry.metanets.zoo_shared_data import SharedData, checked_data
from lightning_symmetry.metanets.zoo_workers import WorkerPool, describe, failed, one_thread, pickled
from lightning_symmetry.metanets.zoo_writer import ZooWriter


class ZooTrainer:
    """Trains a zoo of networks; see :func:`train_zoo`, which is ``ZooTrainer(...).fit(path)``.

    Attributes:
        hyperparameters: Those of each network, seeds included.
        chunks: Which networks are trained together.
    """

    def __init__(
        self,
        factory: str | Callable[..., nn.Module],
        data: Mapping[str, tuple[Tensor, Tensor]],
        hyperparameters: Mapping[str, ArrayLike],
        settings: PopulationSettings | None = None,
        *,
        factory_arguments: Mapping[str, Any] | None = None,
        seed: int = 0,
        chunk_size: int | None = None,
        workers: int | None = None,
        dtype: Literal["float32", "float16"] = "float32",
        keep_history: bool = False,
        progress: bool = True,
    ) -> None:
        """Check what is to be trained; nothing is written. For the arguments see :func:`train_zoo`.

        Raises:
            ValueError: If networks cannot be trained with these arguments.
        """
        settings = PopulationSettings() if settings is None else settings
        settings.augmentation()  # can it be imported?
        self._data = checked_data(data)
        self.hyperparameters = complete_hyperparameters(hyperparameters, seed)
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"Expected `chunk_size` to be at least 1 but got {chunk_size}.")
        if workers is not None and workers < 0:
            raise ValueError(f"Expected `workers` to be at least 0 but got {workers}.")
        if dtype not in DTYPES:
            raise ValueError(f"Expected `dtype` to be one of {sorted(DTYPES)} but got {dtype!r}.")
        arguments = dict(factory_arguments or {})
        name = factory_name(factory)
        described = described_factory(name, arguments if name else None)
        seeds = self.hyperparameters["seed"]
        self._network = seeded_network(factory, int(seeds[0]), **arguments)
        layout = ZooLayout.of(self._network)
        header = ZooHeader(layout, dtype, shared_digest(self._network, layout), described, library_versions())
        self._job = ZooJob(factory, arguments, self.hyperparameters, settings, keep_history, header)
        check_trainable(self._job, self._data, [self._network, self._job.network(len(seeds) - 1)][: len(seeds)])
        if chunk_size is None:
            chunk_size = suggested_chunk(self._network, self._data["train"][0], settings.batch_size)
        self.chunks = plan_chunks(self.hyperparameters["epochs"], chunk_size)
        self._workers = default_workers() if workers is None else workers
        if self._workers > 1:
            pickled(self._job)
        self._progress = progress
        self._notes = TrainingNotes.of(settings, self.hyperparameters, self._data, chunk_size, keep_history)

    def fit(self, path: str | Path, shard: tuple[int, int] | None = None) -> Zoo:
        """Train the networks that are not there yet.

        Args:
            path: Folder of the zoo.
            shard: ``(i, n)`` trains part i of n.

        Returns:
            The zoo, or the shard if one was asked for.

        Raises:
            ZooError: If the folder holds something else, or all networks diverged.
            ValueError: If networks cannot be trained.
            RuntimeError: If a worker process dies.
            OSError: If the disk is full.
        """
        path = Path(path)
        launched = launched_shard() if shard is None else None
        i, n = check_shard(shard or launched or (0, 1))
        begun, folders = self._check(path), shard_folders(path)
        if is_finished(path):
            return self._opened(path)
        if n == 1 and not folders:
            self._train(path, self.chunks, self._progress)
            return self._opened(path)
        for folder in folders:
            self._check(folder)
        if n == 1:
            merge_shards(path, progress=self._progress)
            return self._opened(path)
        if begun:
            raise ZooError(f"{path} holds an unfinished zoo that is not in shards: finish it so, or remove it.")
        if folders and len(folders) != n:
            raise ZooError(
                f"Beside {path} are shards of a division into {len(folders)}, not {n}: go on with these or remove them."
            )
        mine = shard_folder(path, i, n)
        self._train(mine, self.chunks[i::n], self._progress and (launched is None or i == 0))
        if launched is None:
            return self._opened(mine, whole=False)
        merge_when_finished(path, self._progress and i == 0)
        return self._opened(path)

    def _check(self, folder: Path) -> bool:
        """Return whether a folder holds networks of this training; raise an error if it holds others."""
        notes = TrainingNotes.read(folder)
        if notes is not None:
            notes.check_same(self._notes, folder)
        if (folder / HEADER).exists():
            ZooHeader.read(folder).check_same(self._job.header, str(folder), "the network to train")
        return notes is not None

    def _opened(self, folder: Path, whole: bool = True) -> Zoo:
        own = None if self._job.header.factory else partial(self._job.factory, **self._job.arguments)
        zoo = Zoo.open(folder, own)
        if whole and not any(record["status"] == "ok" for record in zoo.records):
            raise ZooError(
                f"All {len(zoo)} networks of {folder} diverged. The zoo is kept as it is; for "
                "another, take lower learning rates or check the data."
            )
        return zoo

    def _train(self, folder: Path, chunks: list[Chunk], progress: bool) -> None:
        if is_finished(folder):
            return
        header = self._job.header
        factory = header.factory or {"function": None, "arguments": None}
        with ZooWriter(folder, self._network, header.dtype, factory["function"], factory["arguments"]) as writer:
            self._note(folder, writer, sum(len(chunk.indices) for chunk in chunks))
            todo = [chunk for chunk in chunks if not writer.indices.issuperset(chunk.indices)]
            diverged = sum(record["status"] != "ok" for record in Zoo.open(folder).records)
            total, left = (sum(chunk.epochs for chunk in which) for which in (chunks, todo))
            bar = tqdm(total=total, initial=total - left, desc=folder.name, unit="epoch", disable=not progress)
            shown = dict.fromkeys((chunk.number for chunk in chunks), 0)

            def on_epoch(chunk: Chunk, epochs: int) -> None:
                shown[chunk.number] += epochs
                bar.update(epochs)

            # Closing ends the workers at once, whatever goes wrong here.
            with bar, closing(self._trained(folder, todo, on_epoch)) as finished:
                for chunk, trained in finished:
                    states = {name: torch.from_numpy(value) for name, value in trained.states.items()}
                    writer.append(states, trained.records)
                    diverged += sum(record["status"] != "ok" for record in trained.records)
                    bar.set_postfix(networks=f"{len(writer)}", diverged=diverged, refresh=False)
                    bar.update(chunk.epochs - shown[chunk.number])  # those of networks that diverged are not to come

    def _note(self, folder: Path, writer: ZooWriter, networks: int) -> None:
        if self._check(folder):  # again: only now nobody else can write there
            return
        if len(writer):
            raise ZooError(f"{folder} holds a zoo that was not trained by train_zoo: choose another folder.")
        replace(self._notes, here=networks).write(folder)

    def _trained(
        self, folder: Path, chunks: list[Chunk], on_epoch: Callable[[Chunk, int], None]
    ) -> Generator[tuple[Chunk, TrainedChunk]]:
        count = min(self._workers, len(chunks))
        SharedData.remove(folder)
        if count <= 1:
            for chunk in chunks:
                try:
                    with one_thread():
                        trained = train_chunk(self._job, self._data, chunk, partial(on_epoch, chunk))
                except Exception as error:
                    raise failed(chunk, describe(error), isinstance(error, ValueError)) from error
                yield chunk, trained
            return
        shared = SharedData.write(folder, self._data)
        try:
            with WorkerPool(self._job, shared, count) as pool:
                yield from pool.run(chunks, on_epoch)
        finally:
            SharedData.remove(folder)


def train_zoo(
    factory: str | Callable[..., nn.Module],
    data: Mapping[str, tuple[Tensor, Tensor]],
    hyperparameters: Mapping[str, ArrayLike],
    path: str | Path,
    settings: PopulationSettings | None = None,
    *,
    factory_arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    chunk_size: int | None = None,
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    keep_history: bool = False,
    progress: bool = True,
) -> Zoo:
    """Train many networks of one architecture into a zoo, or go on where an earlier call was stopped.

    Networks are divided into chunks of about equal numbers of epochs, each of which is trained at once (see
    :func:`train_population`). A chunk counts when it is on the disk: a process that is interrupted or killed loses at
    most one chunk for each worker, and the next call with the same arguments goes on. The zoo, and its
    :meth:`Zoo.checksum`, depend neither on that nor on workers and shards; `chunk_size`, the version of torch and the
    kind of processor may change how floating point numbers round.

    Each record has `index` (the position in `hyperparameters`), `status`, the five hyper-parameters, `epochs_done`,
    and of the trained network in evaluation mode, without augmentation: `train_loss` (with its label smoothing, as
    minimised), `train_accuracy`, `val_loss`, `val_accuracy`, `test_loss` (both cross-entropy without smoothing) and
    `accuracy` (of "test"). A network that diverged has the weights at which it did; its losses and accuracies are None.

    **Shards.** ``shard=(i, n)`` trains part i of n into ``PATH.shard-i-of-n``; :func:`merge_shards`, or a call without
    a shard, puts them together when all are finished. Under ``torchrun``, or where torch.distributed is initialised,
    each rank trains one shard, and all return the whole zoo as soon as it has been merged; `path` is to be on a file
    system that all ranks see.

    With several workers, a script that is the home of the factory or the augmentation needs
    ``if __name__ == "__main__":``; functions of other modules do not.

    Args:
        factory: What builds an untrained network with torch's random numbers: ``"module:function"`` or a function.
        data: Inputs ``(N, *sample)`` and classes ``(N,)`` of "train", and maybe of "val" and "test".
        hyperparameters: ``learning_rate`` and ``epochs``, one value a network; ``weight_decay`` and
            ``label_smoothing``, by default 0; ``seed`` of each network's weights and order of samples, by default
            drawn from `seed`. :func:`sample_hyperparameters` draws the others.
        path: Folder of the zoo. A finished zoo is returned at once.
        settings: What all networks share: optimizer, batch size, warm-up, augmentation.
        factory_arguments: Keyword arguments of the factory.
        seed: Seed of the seeds.
        chunk_size: Networks in a chunk, at most; by default :func:`suggested_chunk`'s, from 1 to 64.
        workers: Processes of one thread each; 0 or 1 trains in this process. By default, one for each core that this
            process may use.
        shard: ``(i, n)``, with i from 0 to n - 1.
        dtype: Type of the stored weights. Weights beyond the range of half precision count as diverged.
        keep_history: Whether records have `train_accuracies`: the accuracy over each epoch, while the weights changed.
        progress: Whether to show a progress bar.

    Returns:
        The zoo, or the shard if one was asked for.

    Raises:
        ZooError: If the folder holds a zoo of another training (the message names what differs) or something else, is
            being written, or all networks diverged.
        ValueError: If networks cannot be trained with these arguments.
        RuntimeError: If a worker process dies; finished chunks are kept.
        OSError: If the disk is full; finished chunks are kept.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.1.
    """
    trainer = ZooTrainer(
        factory,
        data,
        hyperparameters,
        settings,
        factory_arguments=factory_arguments,
        seed=seed,
        chunk_size=chunk_size,
        workers=workers,
        dtype=dtype,
        keep_history=keep_history,
        progress=progress,
    )
    return trainer.fit(path, shard)
