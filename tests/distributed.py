"""Train in several processes, which end as they should.

A process that leaves with its gloo group in place may abort while the interpreter shuts down ("terminate called
without an active exception", pytorch/pytorch#190489): threads of the group still hold tensors. Lightning destroys
groups of NCCL only. So all processes here destroy theirs while the interpreter is whole.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

PREAMBLE = "from distributed import leave_group_at_exit\n\nleave_group_at_exit()\n"


def leave_group_at_exit() -> None:
    """Destroy the process group, if there is one then, before the interpreter shuts down."""
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


class SpawnedProcesses(DDPStrategy):
    """`ddp_spawn`, whose processes leave their group."""

    def __init__(self) -> None:
        super().__init__(start_method="spawn")

    def setup_environment(self) -> None:
        super().setup_environment()
        leave_group_at_exit()


def launch(source: str, folder: Path, timeout: int = 180) -> None:
    """Run a script, which finds the modules of the tests of callbacks and is given the folder.

    Args:
        source: Text of the script. Each of the processes that its Trainers start runs it, with one thread.
        folder: Where it is written, and its argument.
        timeout: Seconds that it may take.
    """
    script = folder / "train.py"
    script.write_text(PREAMBLE + source)
    here = Path(__file__).parent
    paths = [str(here), str(here / "callbacks"), os.environ.get("PYTHONPATH", ""), *sys.path[1:]]
    path = os.pathsep.join(filter(None, paths))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
