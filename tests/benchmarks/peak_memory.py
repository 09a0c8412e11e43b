"""Peak memory of a call, in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch


def added_peak(make: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    """Return by how many KiB a call raises the peak memory of a fresh process, with 2 threads.

    Args:
        make: Returns the call, after anything that is not to be counted, such as loading libraries.
        arguments: Arguments of ``make``.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_added_peak, (make, *arguments))


def _added_peak(make: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    torch.set_num_threads(2)
    call = make(*arguments)
    before = _peak()
    call()
    return _peak() - before


def _peak() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
