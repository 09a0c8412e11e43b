"""Worker processes of one thread each, which train the chunks of a zoo.

They come from multiprocessing's fork server where there is one: a process that imports this package once and never
starts a thread, so that forking it is safe, and later workers start at once. Elsewhere (Windows) each imports it anew.
Forking the caller instead would copy whatever threads, locks and devices it holds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
from typing_extensions import Self

from lightning_symmetry.metanets.zoo_chunk import Data, TrainedChunk, ZooJob, train_chunk
from lightning_symmetry.metanets.zoo_plan import Chunk
from lightning_symmetry.metanets.zoo_shared_data import SharedData

REPORT_EVERY = 0.1
"""Seconds between reports of progress."""
GUARD = (
    " If `factory` or `augment` are functions of the script, what the script does must stand under "
    "`if __name__ == '__main__':`; or give workers=1."
)


class Worker:
    """A process that trains one chunk at a time.

    Attributes:
        connection: Where it reports.
        chunk: What it is at; None if nothing.
        ready: Whether it has begun to work.
    """

    def __init__(self, context: Any, content: bytes) -> None:
        """Start it.

        Args:
            context: A context of multiprocessing.
            content: Pickled job, place of the data and state of torch.
        """
        self.connection, theirs = context.Pipe()
        self.chunk: Chunk | None = None
        self.ready = False
        self._process = context.Process(target=_work, args=(theirs, content), daemon=True, name="zoo worker")
        self._process.start()
        theirs.close()  # or its end would not be noticed

    def begin(self, chunk: Chunk | None) -> None:
        """Give it a chunk; None to end. What a process said before it ended, and that it did, is received later."""
        self.chunk = chunk
        with suppress(OSError):
            self.connection.send(chunk)

    def died(self) -> RuntimeError:
        """Return the error that says so."""
        self._process.join(10)
        code = self._process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        if not self.ready:
            return RuntimeError(f"A worker process {how} before it began.{GUARD}")
        memory = " Memory may have run out: take fewer workers." if code == -9 else ""
        return RuntimeError(f"The worker process {how} that trained {self.chunk}.{memory}")

    def stop(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.join()
        self.connection.close()


class WorkerPool:
    """Some workers, which end with the block: ``with WorkerPool(...) as pool``."""

    def __init__(self, job: ZooJob, data: SharedData, count: int) -> None:
        """Hold the settings; nothing is started.

        Args:
            job: What to train.
            data: Where the data is.
            count: Number of processes.

        Raises:
            ValueError: If the job cannot be sent to another process.
        """
        torch_state = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        self._content = pickled(job, (data, torch_state))
        self._count = count
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        try:
            context = _context()
            with _surroundings(self._content):
                for _ in range(self._count):
                    self._workers.append(Worker(context, self._content))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, chunks: Sequence[Chunk], on_epoch: Callable[[Chunk, int], None]) -> Iterator[tuple[Chunk, Any]]:
        """Train chunks.

        Args:
            chunks: Which ones, in the order of beginning.
            on_epoch: Called with a chunk and the number of its network-epochs just done.

        Yields:
            Each chunk with its :class:`TrainedChunk`, in the order of ending.

        Raises:
            ValueError: If a chunk cannot be trained.
            RuntimeError: If it fails otherwise, or a worker dies; the message names the chunk.
        """
        waiting = list(chunks)[::-1]
        for worker in self._workers:
            worker.begin(waiting.pop() if waiting else None)
        while busy := {worker.connection: worker for worker in self._workers if worker.chunk is not None}:
            for connection in wait([*busy]):
                worker = busy[connection]
                assert worker.chunk is not None
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    raise worker.died() from None
                worker.ready = True
                if kind == "epochs":
                    on_epoch(worker.chunk, content)
                elif kind == "failed":
                    raise failed(worker.chunk, *content)
                elif kind == "unable":
                    raise ValueError(
                        f"A worker process cannot load what it is to train: {content[0]}. Put the functions into a "
                        "module, or give workers=1."
                    ) from _Remote(content[1])
                elif kind == "trained":
                    finished = worker.chunk
                    worker.begin(waiting.pop() if waiting else None)
                    yield finished, content


class _Remote(Exception):
    """What a worker process would have printed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def failed(chunk: Chunk, message: str, is_value_error: bool, trace: str | None = None) -> Exception:
    """Return the error that a chunk failed.

    Args:
        chunk: The chunk.
        message: Why.
        is_value_error: Whether it would always fail.
        trace: Traceback of another process.
    """
    kind = ValueError if is_value_error else RuntimeError
    error = kind(f"Training of {chunk} failed: {message}")
    if trace is not None:
        error.__cause__ = _Remote(trace)
    return error


def pickled(job: ZooJob, more: Any = None) -> bytes:
    """Return a job as it is sent to another process.

    Args:
        job: The job.
        more: What goes with it.

    Raises:
        ValueError: If it cannot be sent, as a lambda cannot.
    """
    for name, value in (("factory", job.factory), ("factory_arguments", job.arguments), ("settings", job.settings)):
        try:
            pickle.dumps(value)
        except Exception as error:  # pickling raises errors of many types
            raise ValueError(
                f"Expected `{name}` to be what worker processes can import, functions of a module rather than lambdas "
                f"or functions in functions, but got {value!r}: {error}. Or give workers=1."
            ) from error
    return pickle.dumps((job, more))


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@contextmanager
def _surroundings(content: bytes) -> Iterator[None]:
    """Set what new processes take over: libraries start no threads; the caller's script is not run unless needed."""
    main, threads = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    if b"__main__" not in content:  # the name under which functions of the script are sent
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, as in a worker: with more, floating point numbers may round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _work(connection: Connection, content: bytes) -> None:
    """Train what comes in, until None comes or nobody is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.send(("ready", None))
    try:
        job, (shared, (dtype, precision)) = pickle.loads(content)
        torch.set_num_threads(1)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        data = shared.open()
    except Exception as error:  # as where the factory is in a notebook
        connection.send(("unable", (describe(error), traceback.format_exc())))
        return
    while (chunk := connection.recv()) is not None:
        connection.send(_answer(job, data, chunk, connection))


def _answer(job: ZooJob, data: Data, chunk: Chunk, connection: Connection) -> tuple[str, Any]:
    done, last = 0, time.monotonic()

    def on_epoch(epochs: int) -> None:
        nonlocal done, last
        done += epochs
        if time.monotonic() - last > REPORT_EVERY:
            connection.send(("epochs", done))
            done, last = 0, time.monotonic()

    try:
        trained: TrainedChunk = train_chunk(job, data, chunk, on_epoch)
    except Exception as error:
        return _failure(error)
    return "trained", trained


def _failure(error: Exception) -> tuple[str, Any]:
    return "failed", (describe(error), isinstance(error, ValueError), traceback.format_exc())


def describe(error: Exception) -> str:
    """Return what an error says, with its type where that says more."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
