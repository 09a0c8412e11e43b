"""Run a script that trains in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def launch(script: Path, *arguments: object, timeout: int = 180) -> None:
    """Run a script, which finds the modules of this folder; its processes have one thread each."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path[1:]])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
