"""What is read from a zoo is what was written, and everything else is refused by name."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metanets.zoo_cases import CASES, MODULE, Odd, asymmetric, normed, plain, record, trained, write
from torch import nn

from lightning_symmetry.metanets import Zoo, ZooError, ZooWriter
from lightning_symmetry.surgery import constants_of


def flat(net: nn.Module) -> torch.Tensor:
    """Return floating parameters and buffers but constants in the order of the state dict: what a row should be."""
    constants = constants_of(net)
    return torch.cat(
        [
            value.flatten().float()
            for name, value in net.state_dict().items()
            if name not in constants and value.is_floating_point() and value.layout == torch.strided
        ]
    )


def same_state(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value.to_dense(), right[name].to_dense()), name


@pytest.mark.parametrize("case", CASES)
def test_networks_come_back(tmp_path, case):
    make = CASES[case]
    zoo = Zoo.open(write(tmp_path / "zoo", range(5), make), factory=make)
    assert len(zoo) == 5 and zoo.indices.tolist() == list(range(5))
    assert isinstance(zoo.weights, np.memmap) and zoo.weights.shape == (5, zoo.layout.num_features)
    for i in (0, 4, -1):
        expected = trained(make, range(5)[i])
        assert torch.equal(torch.from_numpy(zoo.weights[i].copy()), flat(expected))
        state = torch.get_rng_state()
        net = zoo.network(i)
        assert torch.equal(torch.get_rng_state(), state)
        same_state(net, expected)
        assert not net.training
    if case != "odd":
        x = torch.randn(3, *({"normed": (1, 4, 4), "asymmetric": (1, 4, 4)}.get(case, (4,))))
        assert torch.equal(zoo.network(2)(x), trained(make, 2)(x))


@pytest.mark.parametrize("case", CASES)
def test_layout(tmp_path, case):
    make = CASES[case]
    zoo, net = Zoo.open(write(tmp_path / "zoo", range(2), make)), trained(make, 1)
    assert [entry.name for entry in zoo.layout.entries] == list(net.state_dict())
    named = zoo.layout.unflatten(zoo.read())
    for name, value in named.items():
        assert torch.equal(value[1], net.state_dict()[name].float())
    parameters = {name for name, _ in net.named_parameters()}
    assert {entry.name for entry in zoo.layout.having("parameter")} == parameters
    # an entry is a constant if and only if no gradient reaches it
    expected = torch.zeros(zoo.layout.num_features, dtype=torch.bool)
    for entry in zoo.layout.having("parameter"):
        module_name, _, name = entry.name.rpartition(".")
        module, parameter = net.get_submodule(module_name), net.get_parameter(entry.name)
        if name == "weight" and hasattr(module, "canonical_weight"):
            (gradient,) = torch.autograd.grad(module.canonical_weight().sum(), parameter)
            expected[entry.place] = gradient.flatten() == 0
    assert torch.equal(zoo.fixed, expected) and expected.any() == (case == "asymmetric")


def test_roles():
    from lightning_symmetry.metanets import ZooLayout

    roles = {entry.name: entry.role for entry in ZooLayout.of(Odd()).entries}
    assert roles == {
        "scale": "parameter",
        "frozen": "parameter",
        "rough": "parameter",
        "table": "constant",
        "sparse": "constant",
        "flags": "constant",
        "steps": "counter",
    }
    roles = {entry.name: entry.role for entry in ZooLayout.of(asymmetric()).entries}
    assert roles["0.mask"] == roles["0.fixed"] == "constant"
    assert roles["1.running_var"] == "buffer" and roles["1.num_batches_tracked"] == "counter"


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float16"]),
    chunks=st.lists(st.integers(1, 3), max_size=3),
    seed=st.integers(0, 99),
)
def test_round_trip_of_any_shapes(tmp_path_factory, shapes, dtype, chunks, seed):
    path = tmp_path_factory.mktemp("zoo") / "zoo"
    net = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)})
    drawn = torch.randn(
        sum(chunks), sum(p.numel() for p in net.values()), generator=torch.Generator().manual_seed(seed)
    )
    with ZooWriter(path, net, dtype) as writer:
        for chunk in drawn.split(chunks) if chunks else ():
            writer.append(chunk, [{}] * len(chunk))
    zoo = Zoo.open(path)
    assert zoo.weights.dtype == dtype
    assert torch.equal(zoo.read(), drawn.to(getattr(torch, dtype)).float())
    assert zoo.indices.tolist() == list(range(len(drawn)))
    zoo.verify(progress=False)


def test_forms_of_networks_are_the_same(tmp_path):
    nets = [trained(asymmetric, i) for i in range(3)]
    parameters, buffers = torch.func.stack_module_state(nets)
    free = {name: v for name, v in (parameters | buffers).items() if not name.endswith(("mask", "fixed"))}
    states = [net.state_dict() for net in nets]
    checksums = set()
    for i, networks in enumerate((states, parameters | buffers, free)):
        with ZooWriter(tmp_path / str(i), asymmetric()) as writer:
            writer.append(networks, [record(index) for index in range(3)])
        checksums.add(Zoo.open(tmp_path / str(i)).checksum(progress=False))
    assert len(checksums) == 1
    with ZooWriter(tmp_path / "rows", asymmetric()) as writer:
        writer.append(torch.stack([flat(net) for net in nets]), [record(index) for index in range(3)])
    assert np.array_equal(Zoo.open(tmp_path / "rows").weights, Zoo.open(tmp_path / "0").weights)


def test_constants_that_weight_decay_has_moved_are_written(tmp_path):
    with ZooWriter(tmp_path / "zoo", asymmetric()) as writer:
        writer.append(torch.stack([0.5 * flat(trained(asymmetric, 0))]), [{}])
    zoo = Zoo.open(tmp_path / "zoo", factory=lambda: asymmetric(seed=5))
    fixed = ~asymmetric()[0].trainable_entries()
    weight = zoo.layout.unflatten(zoo.read())["0.weight"][0]
    assert torch.equal(weight[fixed], asymmetric()[0].canonical_weight()[fixed])
    assert torch.equal(zoo.network(0)[0].mask, asymmetric()[0].mask)  # the zoo's, not those of the factory's seed


def test_a_network_before_its_training(tmp_path):
    with ZooWriter(tmp_path / "zoo", asymmetric()) as writer:
        writer.append([trained(asymmetric, 0).state_dict()], [{"seed": 7}])
    torch.manual_seed(7)
    expected, state = asymmetric(), torch.get_rng_state()
    same_state(Zoo.open(tmp_path / "zoo", factory=asymmetric).initial(0), expected)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"other constants .*(mask|fixed) differs"):
        Zoo.open(tmp_path / "zoo", factory=lambda: asymmetric(seed=5)).initial(0)


def test_factory(tmp_path):
    path = tmp_path / "zoo"
    write(path, range(2), lambda: plain(5), factory=f"{MODULE}:plain", factory_arguments={"width": 5})
    same_state(Zoo.open(path).network(1), trained(lambda: plain(5), 1))
    with pytest.raises(ValueError, match="shape"):
        Zoo.open(path, factory=plain).network(0)
    with pytest.raises(ValueError, match="builds another network"):
        ZooWriter(tmp_path / "b", plain(5), factory=f"{MODULE}:plain")
    for wrong in ("plain", "no_such_module:plain", f"{MODULE}:no_such"):
        with pytest.raises(ValueError, match="module:function"):
            ZooWriter(tmp_path / "b", plain(), factory=wrong)
    with pytest.raises(ValueError, match="JSON"):
        ZooWriter(tmp_path / "b", plain(), factory=f"{MODULE}:plain", factory_arguments={"width": plain})
    with pytest.raises(ValueError, match="how to build"):
        Zoo.open(write(tmp_path / "c", range(1))).network(0)


def sized(widths: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(widths)))


def test_arguments_that_are_tuples_do_not_keep_a_zoo_from_going_on(tmp_path):
    """JSON gives lists back, which differ from the tuples that were given."""
    how = {"factory": f"{__name__}:sized", "factory_arguments": {"widths": (4, 3, 2)}}
    path = write(tmp_path / "zoo", [0], lambda: sized((4, 3, 2)), **how)
    write(path, [1], lambda: sized((4, 3, 2)), **how)
    assert len(Zoo.open(path)) == 2 and Zoo.open(path).header.factory["arguments"] == {"widths": [4, 3, 2]}
    same_state(Zoo.open(path).network(1), trained(lambda: sized((4, 3, 2)), 1))


def test_records(tmp_path):
    rows = torch.zeros(3, 23)
    rows[2, 0] = torch.nan
    given = [
        {"a": np.float32(0.5), "loss": float("nan"), "name": "x", "n": 1, "only": 3, "mixed": True},
        {"a": torch.tensor(0.25), "loss": 1, "name": "ü", "n": np.int64(2), "mixed": "t"},
        {"a": 0.125, "loss": 2.5, "name": "z", "n": 3, "mixed": [(1, 2)]},
    ]
    with ZooWriter(tmp_path, plain()) as writer:
        writer.append(rows, given)
    zoo = Zoo.open(tmp_path)
    assert zoo.records[1] == {"index": 1, "status": "ok", "a": 0.25, "loss": 1, "name": "ü", "n": 2, "mixed": "t"}
    assert zoo["a"].tolist() == [0.5, 0.25, 0.125] and zoo["n"].dtype == np.int64
    assert np.array_equal(zoo["loss"], [np.nan, 1, 2.5], equal_nan=True)
    assert zoo["mixed"].tolist() == [True, "t", [[1, 2]]]
    assert np.array_equal(zoo["only"], [3, np.nan, np.nan], equal_nan=True)
    assert zoo["status"].tolist() == ["ok", "ok", "diverged"]
    with pytest.raises(KeyError, match=r"accuracy.*'loss'"):
        zoo["accuracy"]


def test_select(tmp_path):
    zoo = Zoo.open(write(tmp_path / "zoo", range(8)))
    everything = zoo.read()
    view = zoo.select(lambda record: record["accuracy"] > 0.5)
    kept = [i for i in range(8) if record(i)["accuracy"] > 0.5]
    assert 0 < len(kept) < 8 and view.indices.tolist() == kept
    assert torch.equal(view.read(), everything[kept])
    assert np.array_equal(view.weights, zoo.weights[kept])
    assert np.shares_memory(zoo.select([2, 3, 4]).weights, zoo.weights)
    assert zoo.select([5, 1]).select([1]).indices.tolist() == [1]
    assert torch.equal(zoo.select([5, 1, 3]).read([2, 0]), everything[[3, 5]])
    assert zoo.select(torch.arange(8) < 2).indices.tolist() == [0, 1]
    assert len(zoo.select([])) == 0 and zoo.select([]).read().shape == (0, 23)
    assert torch.equal(zoo.read([True, False] * 4), everything[::2]) and zoo.read([]).shape == (0, 23)
    for wrong in ([8], [0.5], [True]):
        for take in (zoo.select, zoo.read):
            with pytest.raises(IndexError):
                take(wrong)
    again = pickle.loads(pickle.dumps(view))
    assert len(pickle.dumps(zoo)) < 10_000 and torch.equal(again.read(), view.read())


def test_checksum_and_what_it_covers(tmp_path):
    first = Zoo.open(write(tmp_path / "a", range(6))).checksum(progress=False)
    assert Zoo.open(write(tmp_path / "b", [3, 0, 5, 1, 4, 2], chunk=4)).checksum(progress=False) == first
    others = {Zoo.open(write(tmp_path / "c", range(5))).checksum(progress=False)}
    others.add(Zoo.open(write(tmp_path / "d", range(6), dtype="float16")).checksum(progress=False))
    rows = Zoo.open(tmp_path / "a").read()
    for i, change in enumerate(({"lr": 3.0}, {"_seconds": 9.0})):
        with ZooWriter(tmp_path / f"e{i}", plain()) as writer:
            writer.append(rows, [record(index) | change for index in range(6)])
        others.add(Zoo.open(tmp_path / f"e{i}").checksum(progress=False))
    assert others - {first} and len(others) == 4 and first in others  # the underscore's alone is the same


@pytest.mark.parametrize("empty", [True, False])
def test_nothing_but_a_header(tmp_path, empty):
    with ZooWriter(tmp_path / "zoo", plain()) as writer:
        if empty:
            writer.append([], [])
    zoo = Zoo.open(tmp_path / "zoo")
    assert len(zoo) == 0 and zoo.weights.shape == (0, 23) and zoo.read().shape == (0, 23)
    zoo.verify(progress=False)
    assert len(zoo.checksum(progress=False)) == 64


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("written") / "zoo", range(4), asymmetric, chunk=2)


def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "zoo"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_detected(written, tmp_path_factory, data):
    folder = copied(written, tmp_path_factory.mktemp("changed"))
    name = data.draw(st.sampled_from(["header.json", "weights.bin", "manifest.jsonl", "constants.pt"]))
    content = bytearray((folder / name).read_bytes())
    position, other = data.draw(st.integers(0, len(content) - 2)), data.draw(st.integers(1, 255))
    content[position] ^= other
    (folder / name).write_bytes(content)
    before = Zoo.open(written)
    try:
        zoo = Zoo.open(folder)
        zoo.verify(progress=False)
    except ZooError as error:
        assert name in str(error)
    else:  # white space of the header, and bytes of the archive's padding and of its times, carry nothing
        assert name in ("header.json", "constants.pt") and zoo.header == before.header
        assert zoo.checksum(progress=False) == before.checksum(progress=False) and torch.equal(zoo.fixed, before.fixed)


def test_verify_says_which_network(written, tmp_path):
    folder = copied(written, tmp_path)
    size = Zoo.open(folder).header.row_bytes
    with (folder / "weights.bin").open("r+b") as file:
        file.seek(2 * size + 5)
        file.write(b"?")
    with pytest.raises(ZooError, match=r"weights.bin is damaged in 1 networks of 4, the first at position 2"):
        Zoo.open(folder).verify(progress=False)
    Zoo.open(folder).select([0, 1, 3]).verify(progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["entries"][0].update(shape=[2, 4]), "its digest is another"),
        (lambda header: header["entries"][-1].update(offset=1), "its digest is another"),
        (lambda header: header.update(dtype="float16"), "its digest is another"),
        (lambda header: header.pop("sha256"), "sha256"),
        (lambda header: header["versions"].clear(), "its digest is another"),
    ],
)
def test_a_changed_header_is_refused(written, tmp_path, change, message):
    """Also where the file of weights would be long enough for what it says."""
    file = copied(written, tmp_path) / "header.json"
    header = json.loads(file.read_text())
    change(header)
    file.write_text(json.dumps(header))
    with pytest.raises(ZooError, match=f"header.json is damaged.*{message}"):
        Zoo.open(file.parent)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("header.json", None, "There is no zoo at .*ZooWriter"),
        ("header.json", b"{}", "header.json is damaged, or no header"),
        ("header.json", b"[1]", "header.json is damaged, or no header"),
        ("header.json", b"\x80", "header.json is damaged, or no header"),
        ("header.json", b'{"kind": "zoo of networks", "format": 9}', "format 9.*reads format 1.*write it anew"),
        ("header.json", b'{"kind": "zoo of networks", "format": 1}', "header.json is damaged"),
        ("weights.bin", None, "weights.bin is cut off: 4 networks.*Copy the zoo again"),
        ("weights.bin", b"123", "weights.bin is cut off.*it has 3"),
        ("manifest.jsonl", b"hello\n", "manifest.jsonl is damaged between lines 1 and 1"),
        ("constants.pt", b"hello", "constants.pt cannot be read"),
        ("constants.pt", None, "constants.pt cannot be read"),
    ],
)
def test_foreign_files(written, tmp_path, name, content, message):
    folder = copied(written, tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises((ZooError, FileNotFoundError), match=message):
        Zoo.open(folder).verify(progress=False)


def test_files_are_what_their_documentation_says(written):
    """An independent reading of the format, without the package."""
    header = json.loads((written / "header.json").read_text())
    lines = [json.loads(line) for line in (written / "manifest.jsonl").read_text().splitlines()]
    networks = [line for line in lines if "record" in line]
    assert [line["chunk"] for line in lines if "chunk" in line] == [2, 2]
    length = sum(np.prod(entry["shape"], dtype=int) for entry in header["entries"] if entry["offset"] is not None)
    weights = np.fromfile(written / "weights.bin", "<f4").reshape(len(networks), length)
    for i, line in enumerate(networks):
        assert line["sha256"] == hashlib.sha256(weights[i].tobytes()).hexdigest()
        assert np.array_equal(weights[i], flat(trained(asymmetric, i)).numpy())
        assert line["counters"] == [i]  # num_batches_tracked
    assert set(header["versions"]) >= {"torch", "numpy", "python", "lightning_symmetry"}


def test_normed_has_no_constants():
    assert not constants_of(normed())


def test_a_file_that_is_truncated_later_is_noticed(tmp_path):
    zoo = Zoo.open(write(tmp_path / "zoo", range(5)))
    file = zoo.path / "weights.bin"
    file.write_bytes(file.read_bytes()[: zoo.header.row_bytes + 1])
    torch.testing.assert_close(zoo.read([0]), zoo.read([0, 0])[1:])
    with pytest.raises(ZooError, match="ends before row 1: it was truncated"):
        zoo.read([1])
