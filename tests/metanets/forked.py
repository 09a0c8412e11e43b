"""Run functions in forked processes, which need no imports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")


def start_forked(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a function in a forked process and return the process.

    It computes with one thread: the others of the parent are not in a forked child, which would wait for them.
    """

    def run() -> None:
        torch.set_num_threads(1)
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def run_forked(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Run a function in a forked process and return its exit code; None after a minute."""
    process = start_forked(function, *arguments)
    process.join(60)
    return process.exitcode
