"""Training that is killed, interrupted, fails or fills the disk, and goes on to the same zoo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from metanets.forked import run_forked
from metanets.zoo_training_cases import CHUNK, NETWORKS, arm, train, trapped

from lightning_symmetry.metanets import Zoo

resource = pytest.importorskip("resource", reason="limits and signals of POSIX")


@pytest.fixture(scope="module")
def checksum(tmp_path_factory) -> str:
    return train(tmp_path_factory.mktemp("whole") / "zoo").checksum(False)


def script(path: Path, workers: int) -> subprocess.Popen:
    """Train with a trap in a process, and a process group, of its own."""
    # Without `if __name__ == "__main__"`: workers do not run the script, which has none of the functions they need.
    code = "import signal; from pathlib import Path; from metanets.zoo_training_cases import trapped\n"
    # Who runs the tests in the background ignores SIGINT, and so would this.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (path / "train.py").write_text(f"{code}trapped(Path({str(path)!r}), workers={workers})\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, str(path / "train.py")],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def nobody_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_killed_in_the_middle_of_a_chunk(tmp_path, checksum):
    arm(tmp_path, "kill", 90)  # calls; the chunks have 80, 60, 36 and 16
    assert run_forked(trapped, tmp_path) == -signal.SIGKILL
    goes_on(tmp_path, CHUNK, checksum)


@pytest.mark.slow
def test_killed_with_workers(tmp_path, checksum):
    arm(tmp_path, "wait", 65)
    process = script(tmp_path, 2)
    # The other worker does all that is left.
    wait_until(lambda: (tmp_path / "went off").exists() and len(Zoo.open(tmp_path / "zoo")) == NETWORKS - CHUNK)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: nobody_left(process.pid), 20)  # workers follow, though they were not killed
    goes_on(tmp_path, NETWORKS - CHUNK, checksum)


def goes_on(path: Path, kept: int, checksum: str) -> None:
    """Check that a killed training has kept so many networks, and trains the others."""
    before = (path / "zoo" / "manifest.jsonl").read_bytes()
    assert len(Zoo.open(path / "zoo")) == kept
    assert trapped(path, workers=2).checksum(False) == checksum
    assert (path / "zoo" / "manifest.jsonl").read_bytes().startswith(before)  # nothing was trained twice


@pytest.mark.slow
def test_interrupted(tmp_path, checksum):
    arm(tmp_path, "wait", 65)
    process = script(tmp_path, 2)
    wait_until(lambda: (tmp_path / "went off").exists() and len(Zoo.open(tmp_path / "zoo")) == NETWORKS - CHUNK)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and error.count("Traceback") == 1 and error.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: nobody_left(process.pid), 20)
    # Readers see a chunk a moment before append returns; interrupted in between, the writer takes it back.
    assert len(Zoo.open(tmp_path / "zoo")) in (NETWORKS - CHUNK, NETWORKS - 2 * CHUNK)
    assert not [file for file in (tmp_path / "zoo").iterdir() if "data" in file.name]
    assert trapped(tmp_path).checksum(False) == checksum


def test_a_worker_is_killed(tmp_path, checksum):
    arm(tmp_path, "kill", 65)
    with pytest.raises(RuntimeError, match=r"killed by signal 9 that trained chunk \d \(3 networks, of index .*Memory"):
        trapped(tmp_path, workers=2)
    count = len(Zoo.open(tmp_path / "zoo"))
    assert count % CHUNK == 0
    assert trapped(tmp_path, workers=2).checksum(False) == checksum


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "action, kind, message", [("fail", RuntimeError, "RuntimeError: no more mem"), ("refuse", ValueError, "no such im")]
)
def test_a_chunk_fails(tmp_path, checksum, workers, action, kind, message):
    arm(tmp_path, action, {1: 90, 2: 65}[workers])
    with pytest.raises(kind, match=rf"Training of chunk \d \(3 networks, of index .*\) failed: {message}") as caught:
        trapped(tmp_path, workers=workers)
    assert type(caught.value) is kind and message.split(": ")[-1] in str(caught.value.__cause__)
    kept = len(Zoo.open(tmp_path / "zoo"))
    assert kept == CHUNK if workers == 1 else kept < NETWORKS and kept % CHUNK == 0
    assert trapped(tmp_path).checksum(False) == checksum


def fill_disk(path: Path, limit: int, workers: int, message: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        train(path, workers=workers)
    except OSError as error:
        os._exit(11 if message in str(error) else 12)


@pytest.mark.parametrize(
    "limit, workers, message, kept",
    [
        (2600, 1, "a chunk of 3 networks (0.0 MB) was not written. The zoo keeps the 3 networks", 3),
        (1700, 2, "no place for the data that worker processes share", 0),
        (900, 1, "cannot be opened for writing", None),
    ],
)
def test_full_disk(tmp_path, checksum, limit, workers, message, kept):
    path = tmp_path / "zoo"
    assert run_forked(fill_disk, path, limit, workers, message) == 11
    assert not list(path.glob(".*.*"))
    if kept is not None:
        assert len(Zoo.open(path)) == kept
    assert train(path).checksum(False) == checksum
