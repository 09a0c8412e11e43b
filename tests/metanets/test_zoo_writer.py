"""Whole chunks or none: kills, full disks, two writers, resuming, shards."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from metanets.forked import start_forked
from metanets.zoo_cases import MODULE, asymmetric, gated, normed, plain, record, trained, write

from lightning_symmetry.metanets import Zoo, ZooError, ZooWriter, merge_zoos

resource = pytest.importorskip("resource", reason="limits and signals of POSIX")
CHUNK, TOTAL = 4, 40


def go_on(path, total=TOTAL, after_a_chunk=lambda: None):
    """Write what is missing of a zoo, in chunks."""
    with ZooWriter(path, wide()) as writer:
        todo = [i for i in range(total) if i not in writer.indices]
        for start in range(0, len(todo), CHUNK):
            part = todo[start : start + CHUNK]
            writer.append(torch.stack([row(i) for i in part]), [record(i) for i in part])
            after_a_chunk()


def wide():
    return torch.nn.Linear(4_999, 1)


def row(index):
    return torch.full((5_000,), float(index)) + torch.arange(5_000) / 5_000


def expected_prefix(zoo):
    """Check that a zoo holds whole chunks and nothing else."""
    assert len(zoo) % CHUNK == 0
    zoo.verify(progress=False)
    for i in range(len(zoo)):
        assert torch.equal(zoo.read([i])[0], row(i)) and zoo.records[i]["lr"] == record(i)["lr"]


def killed_after(path, seconds, from_the_start):
    """Kill this process so long after its start, or its first chunk; when it has written all, it waits for that."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once and unseen by it, as SIGKILL does

    def begin():
        if signal.getitimer(signal.ITIMER_REAL) == (0, 0):
            signal.setitimer(signal.ITIMER_REAL, seconds)

    if from_the_start:
        begin()
    go_on(path, after_a_chunk=begin)
    begin()
    signal.pause()


def test_killed_at_any_point(tmp_path):
    times = []
    go_on(tmp_path / "whole", after_a_chunk=lambda: times.append(time.process_time()))
    whole, counts = Zoo.open(tmp_path / "whole").checksum(progress=False), []
    for attempt in range(3):
        path, draw, before = tmp_path / str(attempt), np.random.default_rng(attempt), 0
        for kill in range(4):
            seconds = draw.uniform(1e-6, (times[-1] - times[0]) / 2)
            process = start_forked(killed_after, path, seconds, kill % 2 == 1)
            process.join(60)
            assert process.exitcode == -signal.SIGALRM
            zoo = Zoo.open(path)
            expected_prefix(zoo)
            assert len(zoo) >= max(before, CHUNK)
            before = len(zoo)
            counts.append(before)
        go_on(path)
        assert Zoo.open(path).checksum(progress=False) == whole
        assert (path / "weights.bin").read_bytes() == (tmp_path / "whole" / "weights.bin").read_bytes()
        assert (path / "manifest.jsonl").read_bytes() == (tmp_path / "whole" / "manifest.jsonl").read_bytes()
    assert any(count < TOTAL for count in counts)


def killed_at_line(path, number):
    """Kill this process when it has run so many lines of the module that writes the files."""
    ran = 0

    def trace(frame, event, _):
        nonlocal ran
        if not frame.f_code.co_filename.endswith("zoo_append.py"):
            return None
        if event == "line":
            ran += 1
            if ran == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    with ZooWriter(path, plain()) as writer:
        for part in ([0], [1, 2]):
            writer.append(torch.stack([torch.full((23,), float(i)) for i in part]), [record(i) for i in part])
    os._exit(0)


@pytest.mark.slow
def test_killed_at_every_line(tmp_path):
    counts, number, code = [], 0, None
    while code != 0:
        number += 1
        path = tmp_path / str(number)
        process = start_forked(killed_at_line, path, number)
        process.join()
        code = process.exitcode
        assert code in (0, -signal.SIGKILL)
        counts.append(0)
        if (path / "header.json").exists():
            zoo = Zoo.open(path)
            zoo.verify(progress=False)
            assert zoo.indices.tolist() == list(range(len(zoo))) and zoo.read()[:, 0].tolist() == zoo.indices.tolist()
            counts[-1] = len(zoo)
    assert counts == sorted(counts) and set(counts) == {0, 1, 3}


def test_what_a_stopped_writer_left_is_overwritten(tmp_path):
    path = write(tmp_path / "zoo", range(6), chunk=3)
    manifest = (path / "manifest.jsonl").read_bytes()
    (path / "manifest.jsonl").write_bytes(manifest[: manifest.rindex(b'{"chunk"') + 5])
    write(path, [3, 4], chunk=1)
    zoo = Zoo.open(path)
    assert zoo.checksum(False) == Zoo.open(write(tmp_path / "other", range(5))).checksum(False)
    assert (path / "weights.bin").stat().st_size == 5 * zoo.header.row_bytes
    assert zoo["accuracy"].tolist() == [record(i)["accuracy"] for i in range(5)]


def test_every_cut_of_the_files(tmp_path):
    """What a kill can leave behind at each byte of the last chunk, in order of writing."""
    path = write(tmp_path / "zoo", range(4), chunk=2)
    weights, manifest = (path / "weights.bin").read_bytes(), (path / "manifest.jsonl").read_bytes()
    first = manifest.index(b"\n", manifest.index(b'{"chunk"')) + 1
    whole = Zoo.open(path).checksum(progress=False)
    cuts = [(size, first) for size in range(len(weights) // 2, len(weights), 61)]
    cuts += [(len(weights), size) for size in range(first, len(manifest))]
    for i, (weight_size, manifest_size) in enumerate(cuts):
        (path / "weights.bin").write_bytes(weights[:weight_size])
        (path / "manifest.jsonl").write_bytes(manifest[:manifest_size])
        zoo = Zoo.open(path)
        assert zoo.indices.tolist() == [0, 1]
        zoo.verify(progress=False)
        if i % 50 == 0:
            write(path, [2, 3], chunk=2)
            assert Zoo.open(path).checksum(progress=False) == whole
            assert (path / "manifest.jsonl").read_bytes() == manifest


def fill_disk(path, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        go_on(path)
    except OSError as error:
        message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        good = "was not written" in message and "keeps the 8 networks" in message and str(path) in message
        os._exit(11 if good else 12)
    os._exit(13)


def test_full_disk(tmp_path):
    path = tmp_path / "zoo"
    process = start_forked(fill_disk, path, 4 * 5_000 * (2 * CHUNK + 1) + 17)  # in the middle of the third chunk
    process.join()
    assert process.exitcode == 11
    expected_prefix(Zoo.open(path))
    assert (path / "weights.bin").stat().st_size == 4 * 5_000 * 2 * CHUNK
    go_on(path)
    go_on(tmp_path / "whole")
    assert Zoo.open(path).checksum(False) == Zoo.open(tmp_path / "whole").checksum(False)


def start_on_a_full_disk(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
    try:
        ZooWriter(path, asymmetric())
    except OSError as error:
        good = "the zoo cannot be opened for writing" in str(error) and str(path) in str(error)
        os._exit(11 if good else 12)
    os._exit(13)


def test_a_disk_that_is_full_from_the_start(tmp_path):
    path = tmp_path / "zoo"
    process = start_forked(start_on_a_full_disk, path)
    process.join()
    assert process.exitcode == 11
    assert [file.name for file in path.iterdir()] == [".lock"]
    write(path, range(3), asymmetric)
    Zoo.open(path).verify(progress=False)


def merge_on_a_full_disk(parts, out):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 5_000 * 3, resource.RLIM_INFINITY))
    try:
        merge_zoos(parts, out, progress=False)
    except OSError as error:
        os._exit(11 if "the merged zoo was not written" in str(error) and str(out) in str(error) else 12)
    os._exit(13)


def test_a_merge_on_a_full_disk_leaves_nothing(tmp_path):
    go_on(tmp_path / "zoo", 4)
    process = start_forked(merge_on_a_full_disk, [tmp_path / "zoo"], tmp_path / "out")
    process.join()
    assert process.exitcode == 11
    assert [path.name for path in tmp_path.iterdir()] == ["zoo"]


def test_constants_that_cannot_be_read_are_noticed_before_networks_are_trained(tmp_path):
    path = write(tmp_path / "zoo", range(2), asymmetric)
    (path / "constants.pt").write_bytes((path / "constants.pt").read_bytes()[:-40])
    with pytest.raises(ZooError, match=r"constants.pt cannot be read"):
        ZooWriter(path, asymmetric())


def append_until(line, writer, index, kill=False):
    """Append a network, interrupted or killed at so many lines; return how many were run, None if interrupted."""
    before, ran = sys.gettrace(), 0

    def trace(frame, event, _):
        nonlocal ran
        if not frame.f_code.co_filename.endswith("zoo_append.py"):
            return None
        if event == "line":
            ran += 1
            if ran == line and kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if ran == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        writer.append([trained(plain, index).state_dict()], [record(index)])
        return ran
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(before)


def test_a_writer_that_was_interrupted_at_any_line_goes_on(tmp_path):
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        lines = append_until(0, writer, 0)
        for line in range(1, lines + 1):
            assert append_until(line, writer, line) is None
            assert len(writer) == line and line not in writer.indices
            Zoo.open(writer.path).verify(progress=False)
            append_until(0, writer, line)
        # At the last line the chunk is on the disk, but the writer has not taken it in. Killed in the next chunk:
        for line in range(1, lines + 1):
            append_until(lines, writer, lines + line)
            assert len(Zoo.open(writer.path)) == len(writer) + 1
            process = start_forked(append_until, line, writer, 1_000, True)
            process.join()
            Zoo.open(writer.path).verify(progress=False)
            append_until(0, writer, lines + line)
    whole = Zoo.open(write(tmp_path / "whole", range(2 * lines + 1), chunk=9))
    assert Zoo.open(writer.path).checksum(progress=False) == whole.checksum(progress=False)


def test_writing_goes_on_after_an_error(tmp_path):
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        with pytest.raises(ValueError):
            writer.append(torch.zeros(2, 5), [{}, {}])
        writer.append(torch.zeros(2, 23), [{}, {}])
        assert len(writer) == 2 and writer.indices == {0, 1}
    assert len(Zoo.open(tmp_path / "zoo")) == 2


def test_two_writers(tmp_path):
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        with pytest.raises(ZooError, match=rf"being written by process {os.getpid()} on .*merge_zoos"):
            ZooWriter(tmp_path / "zoo", plain())
        writer.append(torch.ones(1, 23), [{}])
        assert len(Zoo.open(tmp_path / "zoo")) == 1  # readers are welcome
        reader = Zoo.open(tmp_path / "zoo")
        writer.append(torch.ones(1, 23), [{}])
        assert len(reader) == 1 and reader.weights.shape == (1, 23)
    writer.close()
    ZooWriter(tmp_path / "zoo", plain()).close()


def test_going_on_with_another_network_is_refused(tmp_path):
    path = write(tmp_path / "zoo", range(2), asymmetric)
    for network, options, message in (
        (plain(), {}, r"zoo.* the network to write|the network to write .*zoo"),
        (normed(), {}, "0.mask"),
        (asymmetric(seed=1), {}, "masks or constants"),
        (asymmetric(), {"dtype": "float16"}, "float32.*float16"),
        (asymmetric(), {"factory": f"{MODULE}:asymmetric"}, "factory None"),
    ):
        with pytest.raises(ValueError, match=message):
            ZooWriter(path, network, **options)
    write(path, [2], asymmetric)  # the lock was let go
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "weights.bin").write_bytes(b"mine")
    with pytest.raises(ZooError, match=r"weights.bin is there without header.json"):
        ZooWriter(foreign, plain())
    assert (foreign / "weights.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("make", [asymmetric, gated])
def test_other_constants_are_refused(tmp_path, make):
    with ZooWriter(tmp_path / "zoo", make()) as writer:
        good, other = trained(make, 0).state_dict(), trained(lambda: make(seed=1), 1).state_dict()
        with pytest.raises(ValueError, match=r"Network 1 .* other constants .*(mask|fixed) differs"):
            writer.append([good, other], [{}, {}])
        assert len(writer) == 0


def test_wrong_networks(tmp_path):
    good = trained(plain, 0).state_dict()
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        for networks, message in (
            (torch.zeros(1, 22), r"\(1, 23\).*\(1, 22\)"),
            ([good, good], "got 2 and 1"),
            ([{**good, "more": torch.zeros(1)}], "has more, which .* lacks"),
            ([{name: v for name, v in good.items() if name != "0.bias"}], "lacks 0.bias, which .* has"),
            ([{**good, "0.bias": torch.zeros(4)}], r"0.bias of shape \(4,\).*\(3,\)"),
            ({name: value.expand(2, *value.shape) for name, value in good.items()}, "stacked tensors of 1"),
        ):
            with pytest.raises(ValueError, match=message):
                writer.append(networks, [{}])
        for entry, message in (
            ({"index": -1}, "integer from 0"),
            ({"index": True}, "integer from 0"),
            ({"index": 2**63}, "integer from 0"),
            ({"losses": torch.zeros(2)}, "numbers, strings"),
            ({"losses": np.zeros(2)}, "numbers, strings"),
            ({"status": "fine"}, "fine"),
            ({"net": plain}, "strings"),
        ):
            with pytest.raises(ValueError, match=message):
                writer.append(torch.zeros(1, 23), [entry])
        with pytest.raises(ValueError, match=r"once.*\[7\]"):
            writer.append(torch.zeros(2, 23), [{"index": 7}] * 2)
        with pytest.raises(ValueError, match="'diverged', not 'ok'"):
            writer.append(torch.full((1, 23), torch.nan), [{"status": "ok"}])
        writer.append(torch.zeros(1, 23), [{"index": 7}])
        with pytest.raises(ValueError, match=r"once.*\[7\]"):
            writer.append(torch.zeros(1, 23), [{"index": 7}])
        assert len(writer) == 1
    with ZooWriter(tmp_path / "half", plain(), dtype="float16") as writer:
        rows = torch.stack([torch.zeros(23), torch.full((23,), 1e6)])
        with pytest.raises(ValueError, match=r"Networks \[9\] have weights beyond the range of float16.*float32"):
            writer.append(rows, [{"index": 8}, {"index": 9}])
        writer.append(rows, [{"index": 8}, {"index": 9, "status": "diverged"}])
    assert Zoo.open(tmp_path / "half")["status"].tolist() == ["ok", "diverged"]
    with pytest.raises(ValueError, match="no weights"):
        ZooWriter(tmp_path / "none", torch.nn.ReLU())
    with pytest.raises(ValueError, match="complex"):
        ZooWriter(tmp_path / "none", torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]))
    with pytest.raises(ValueError, match="bfloat16"):
        ZooWriter(tmp_path / "none", plain(), dtype="bfloat16")


def test_killed_before_the_header(tmp_path):
    whole = write(tmp_path / "zoo", range(3), asymmetric)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "constants.pt").write_bytes((whole / "constants.pt").read_bytes()[:99])
    with pytest.raises(FileNotFoundError, match="There is no zoo"):
        Zoo.open(begun)
    write(begun, range(3), asymmetric)
    assert Zoo.open(begun).checksum(False) == Zoo.open(whole).checksum(False)


def test_a_lock_is_not_left_to_a_forked_child(tmp_path):
    writer = ZooWriter(tmp_path / "zoo", plain())
    child = start_forked(time.sleep, 60)
    with pytest.raises(ZooError, match="being written"):
        ZooWriter(tmp_path / "zoo", plain())
    writer.close()
    ZooWriter(tmp_path / "zoo", plain()).close()
    child.kill()
    child.join()


def test_networks_of_another_zoo(tmp_path, recwarn):
    zoo = Zoo.open(write(tmp_path / "a", range(4)))
    with ZooWriter(tmp_path / "b", plain()) as writer:
        writer.append(zoo.weights, zoo.records)
    assert Zoo.open(tmp_path / "b").checksum(False) == zoo.checksum(False)
    assert not recwarn.list


def test_what_is_given_is_not_changed(tmp_path):
    rows = torch.zeros(1, 5_000)
    net = asymmetric()
    rows = rows[:, : sum(value.numel() for value in (*net.parameters(), net[1].running_mean, net[1].running_var))]
    with ZooWriter(tmp_path / "zoo", net) as writer:
        writer.append(rows, [given := {"a": [1]}])
    assert not rows.any() and given == {"a": [1]}
    assert Zoo.open(tmp_path / "zoo").read().any()


def test_merge_in_any_order_is_the_zoo_of_one_writer(tmp_path):
    whole = Zoo.open(write(tmp_path / "whole", range(11), asymmetric, chunk=5))
    shards = [write(tmp_path / f"shard{i}", range(i, 11, 3), asymmetric, chunk=2) for i in range(3)]
    for i, order in enumerate(([0, 1, 2], [2, 0, 1])):
        merged = merge_zoos([shards[j] for j in order], tmp_path / f"merged{i}", progress=False)
        assert merged.checksum(progress=False) == whole.checksum(progress=False)
        assert merged.records == whole.records
        assert (merged.path / "weights.bin").read_bytes() == (whole.path / "weights.bin").read_bytes()
        assert torch.equal(merged.fixed, whole.fixed)
    write(merged.path, [11], asymmetric)  # and goes on
    Zoo.open(merged.path).verify(progress=False)
    part = merge_zoos([whole.select([7, 2])], tmp_path / "part", progress=False)
    assert part.indices.tolist() == [2, 7] and torch.equal(part.read(), whole.read([2, 7]))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_merge_refuses(tmp_path):
    a = write(tmp_path / "a", range(2), asymmetric)
    for i, (path, message) in enumerate(
        (
            (write(tmp_path / "b", [2], plain), r"a has 0.mask|b has|/b"),
            (write(tmp_path / "c", [2], lambda: asymmetric(1)), "masks or constants of .*a and .*c differ"),
            (write(tmp_path / "d", [2], asymmetric, dtype="float16"), "a has weights float32, .*d has weights float16"),
            (write(tmp_path / "e", [1], asymmetric), r"a and .*e both have a network of index 1"),
        )
    ):
        with pytest.raises(ValueError, match=message):
            merge_zoos([a, path], tmp_path / f"out{i}", progress=False)
        assert not (tmp_path / f"out{i}").exists()
    with pytest.raises(FileExistsError):
        merge_zoos([a], tmp_path / "e", progress=False)
    with pytest.raises(ValueError, match="at least one"):
        merge_zoos([], tmp_path / "out", progress=False)
    with (a / "weights.bin").open("r+b") as file:
        file.write(b"??")
    with pytest.raises(ZooError, match=r"/a/weights.bin is damaged: the network of index 0 is not what was written"):
        merge_zoos([write(tmp_path / "f", [5], asymmetric), a], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
