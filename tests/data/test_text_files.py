"""Blocks of files, cuts between splits, and which files a source has."""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_symmetry.data.text_files import Blocks, Span, whole
from lightning_symmetry.data.text_sources import LM1B, LM1B_HELDOUT, LM1B_TRAIN, text_files
from lightning_symmetry.data.text_splits import SEARCH_BYTES, divide

texts = st.text(alphabet="ab é\n\t漢", max_size=60)


def read(spans):
    return b"".join(span.path.read_bytes()[span.start : span.stop] for span in spans)


def write(folder, contents):
    files = [Path(folder) / f"{i:02}.txt" for i in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content.encode())
    return files


def make(folder, names, content="some text\n"):
    """Write files that say where they are."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}: {content}")


def names(files, folder):
    return {split: [path.relative_to(folder).as_posix() for path in found] for split, found in files.items()}


@given(contents=st.lists(texts, max_size=4), size=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_blocks_are_the_bytes_cut_between_words(contents, size):
    with tempfile.TemporaryDirectory() as folder:
        files = write(folder, contents)
        blocks = Blocks([whole(file) for file in files], size)
        found = list(blocks)
        assert len(found) == len(blocks)
        for file in files:
            own = [block for block in found if block.path == file]
            assert b"".join(block.data for block in own) == file.read_bytes()
            assert [block.last for block in own] == [False] * (len(own) - 1) + [True] * bool(own)
            for block in own:
                assert file.read_bytes()[block.start :].startswith(block.data)
                assert block.last or not block.data or block.data[-1:] in b"\n "
        assert "".join(block.text() for block in found) == "".join(contents)


def test_blocks_of_a_part_of_a_file(tmp_path):
    (file,) = write(tmp_path, ["one two three four"])
    assert [block.data for block in Blocks([Span(file, 4, 13)], 5)] == [b"two ", b"three"]


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"fine words\ncaf\xe9 au lait\n")
    blocks = list(Blocks([whole(file)], 11))
    assert blocks[0].text() == "fine words\n"
    with pytest.raises(ValueError, match=r'latin.txt is not UTF-8: byte 0xe9 at 14. .* pass `tokens="byte"`'):
        blocks[1].text()


def test_file_that_shrinks_while_it_is_read(tmp_path):
    (file,) = write(tmp_path, ["short"])
    with pytest.raises(RuntimeError, match=r"00.txt became shorter"):
        list(Blocks([Span(file, 0, 9)]))


@given(
    contents=st.lists(texts, min_size=1, max_size=5),
    val=st.floats(0.01, 0.45),
    test=st.floats(0.01, 0.45),
    seed=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_splits_are_a_partition_cut_at_ends_of_lines(contents, val, test, seed):
    with tempfile.TemporaryDirectory() as folder:
        files = write(folder, contents)
        parts = divide(files, {"val": val, "test": test}, seed)
        assert list(parts) == ["train", "val", "test"]
        together = [span for spans in parts.values() for span in spans]
        # In the order of the files they are all bytes, each once.
        assert read(sorted(together)) == "".join(contents).encode()
        assert all(span.start < span.stop for span in together)
        for span in together:
            content = span.path.read_bytes()
            ends_line = content[span.stop - 1 : span.stop] == b"\n"
            ends_word = content[span.stop - 1 : span.stop] == b" " and b"\n" not in content[span.stop :]
            whitespace_less = not any(byte in content[span.stop :] for byte in (b"\n", b" "))
            assert span.stop == len(content) or ends_line or ends_word or whitespace_less


def test_parts_have_their_shares_in_an_order_by_the_seed_only(tmp_path):
    files = write(tmp_path, [f"{i}: a line of some words\n" * 40 for i in range(20)])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    parts = divide(files, {"val": 0.1, "test": 0.25}, 3)
    assert torch.equal(torch.get_rng_state(), state)
    total = sum(file.stat().st_size for file in files)
    assert len(read(parts["val"])) / total == pytest.approx(0.1, abs=0.003)  # 26 of 20,400 bytes to an end of line
    assert len(read(parts["test"])) / total == pytest.approx(0.25, abs=0.003)
    torch.manual_seed(1)
    assert divide(files, {"val": 0.1, "test": 0.25}, 3) == parts
    assert divide(files, {"val": 0.1, "test": 0.25}, 4)["test"] != parts["test"]
    assert divide(files, {}, 3).keys() == {"train"}
    assert divide(files, {"test": 0.25}, 3)["test"] == parts["test"]  # whatever the validation share


def test_a_file_is_divided_in_its_order_whatever_the_seed(tmp_path):
    (file,) = write(tmp_path, ["".join(f"line {i:04}\n" for i in range(1000))])
    for seed in (0, 1):
        parts = divide([file], {"val": 0.1, "test": 0.2}, seed)
        assert parts == {
            "train": [Span(file, 0, 7000)],
            "val": [Span(file, 7000, 8000)],
            "test": [Span(file, 8000, 10000)],
        }


def test_very_long_lines_are_cut_at_spaces(tmp_path):
    (file,) = write(tmp_path, ["word " * (SEARCH_BYTES // 2)])
    for spans in divide([file], {"val": 0.3, "test": 0.3}, 0).values():
        assert read(spans).startswith(b"word")
        assert read(spans).endswith(b"word ")


def test_stdlib_is_the_modules_of_python_itself():
    (files,) = text_files("stdlib").values()
    assert files == sorted(files)
    assert {"ast", "turtle", "typing"} <= {path.stem for path in files} <= sys.stdlib_module_names
    assert {path.parent for path in files} == {Path(sysconfig.get_path("stdlib"))}
    assert 2e6 < sum(path.stat().st_size for path in files) < 8e6


def test_python_without_source_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no source text of its standard library: looked for .*\*\.py"):
        text_files("stdlib")


def test_folder_of_texts(tmp_path):
    make(tmp_path, ["b.txt", "a.TXT", "deep/er/c.md", "image.png", ".hidden.txt", ".git/d.txt", "notes"])
    assert names(text_files(str(tmp_path)), tmp_path) == {"train": ["a.TXT", "b.txt", "deep/er/c.md"]}


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (
            ["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens", "README.md"],
            {"train": ["wiki.train.tokens"], "val": ["wiki.valid.tokens"], "test": ["wiki.test.tokens"]},
        ),
        (
            ["train.txt", "val-0.txt", "val-1.txt", "testament.txt"],
            {"train": ["train.txt"], "val": ["val-0.txt", "val-1.txt"]},
        ),
        (["ptb.train.txt", "ptb.test.txt"], {"train": ["ptb.train.txt"], "test": ["ptb.test.txt"]}),
        (
            ["train/a.txt", "train/b/c.txt", "test/a.txt", "dev/a.txt"],
            {"train": ["train/a.txt", "train/b/c.txt"], "test": ["test/a.txt"], "val": ["dev/a.txt"]},
        ),
    ],
)
def test_names_of_splits(tmp_path, present, expected):
    make(tmp_path, present)
    assert names(text_files(str(tmp_path)), tmp_path) == expected


def test_without_training_text_all_files_are_divided(tmp_path, caplog):
    make(tmp_path, ["wiki.valid.tokens", "wiki.test.tokens"])
    with caplog.at_level("INFO"):
        files = text_files(str(tmp_path))
    assert names(files, tmp_path) == {"train": ["wiki.test.tokens", "wiki.valid.tokens"]}
    assert "has no training text by name: all its 2 text files are divided anew" in caplog.text


@pytest.mark.parametrize("parent", ["", LM1B])
def test_lm1b(tmp_path, parent):
    train = [f"{LM1B_TRAIN}/news.en-0000{i}-of-00100" for i in (1, 2)]
    heldout = [f"{LM1B_HELDOUT}/news.en.heldout-0000{i}-of-00050" for i in (0, 1, 2)]
    root = tmp_path / parent
    make(root, [*train, *heldout, "README", "more.txt"])
    assert names(text_files(str(tmp_path)), root) == {"train": train, "test": heldout[:1], "val": heldout[1:]}
    for name in heldout:
        (root / name).unlink()
    assert names(text_files(str(tmp_path)), root) == {"train": train}
    for name in train:
        (root / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no training text of LM1B: looked for .*{LM1B_TRAIN}/news.en-\*"):
        text_files(str(tmp_path))


def test_missing_sources_say_what_was_looked_for(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r'no text at .*/nothing: looked for a text file or a folder .*"stdlib"'
    ):
        text_files(str(tmp_path / "nothing"))
    (tmp_path / "image.png").touch()
    with pytest.raises(FileNotFoundError, match=r"no text in .*: looked for files that end in \.txt, .*news\.en-\*"):
        text_files(str(tmp_path))
