"""Run recipes as a user does, by their command lines."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


def run_recipe(
    name: str, *arguments: str, cwd: Path | None = None, timeout: int = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a recipe in a process of its own."""
    command = [sys.executable, str(RECIPES / f"{name}.py"), *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout, env=variables)


def refusal(name: str, *arguments: str) -> str:
    """Run a recipe that refuses what it is given and return the line that it ends with.

    It runs in this process, for a new one would import everything again.
    """
    with mock.patch.object(sys, "argv", [f"{name}.py", *arguments]), pytest.raises(SystemExit) as caught:
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    assert isinstance(caught.value.code, str)  # which Python prints, and exits with 1
    return caught.value.code
