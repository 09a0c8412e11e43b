"""Tokens in mapped files: the same as in memory, written once, and written again when anything is amiss."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lightning_symmetry.data import TextData
from lightning_symmetry.data.text_cache import on_disk
from lightning_symmetry.data.text_corpus import Text
from lightning_symmetry.data.text_files import whole
from lightning_symmetry.data.text_tokens import Words

LINES = "".join(f"line {i} of {i % 7} words\n" for i in range(400))


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "my.text.txt"
    file.write_text(LINES)
    return file


def build(source, cache_dir=None, **options):
    data = TextData(str(source), **({"tokens": "word", "context": 5} | options), cache_dir=cache_dir and str(cache_dir))
    data.prepare_data()
    data.setup()
    return data


def tokens_of(data):
    return {split: tokens.tolist() for split, tokens in data._corpus.tokens.items()}


def files_in(folder):
    return {path.suffix: path for path in folder.iterdir()}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options", [{}, {"tokens": "byte"}, {"vocab_size": 20}, {"max_tokens": 100}, {"val_fraction": 0.0}], ids=str
)
def test_equals_tokens_in_memory(source, tmp_path, options):
    plain, cached, again = (build(source, folder, **options) for folder in (None, tmp_path / "c", tmp_path / "c"))
    assert all(isinstance(tokens, np.memmap) for tokens in again._corpus.tokens.values())
    assert not any(isinstance(tokens, np.memmap) for tokens in plain._corpus.tokens.values())
    assert tokens_of(plain) == tokens_of(cached) == tokens_of(again)
    assert {data.vocab_size for data in (cached, again)} == {plain.vocab_size}
    some = next(iter(plain.val_dataloader()))[0][0]
    assert again.decode(some) == plain.decode(some)
    assert sorted(files_in(tmp_path / "c")) == [".json", ".tokens"]
    assert all(path.name.startswith("my.text-") for path in (tmp_path / "c").iterdir())


def test_bytes_and_words_of_one_label_have_other_files(source, tmp_path):
    texts = [Text({"train": [whole(source)]}, kind, 50, None) for kind in ("byte", "word")]
    sizes = [on_disk(text, tmp_path / "c", "x").vocabulary.size for text in (*texts, *texts)]
    assert sizes == [256, 50, 256, 50]


def test_is_written_once_and_by_prepare_data(source, tmp_path):
    data = TextData(str(source), context=5, cache_dir=str(tmp_path / "c"))
    data.prepare_data()
    assert data._corpus is None
    written = times(tmp_path / "c")
    assert len(written) == 2
    data.setup()
    build(source, tmp_path / "c", tokens="byte", context=9, batch_size=3)  # the tokens do not depend on these
    assert times(tmp_path / "c") == written


@pytest.mark.parametrize(
    "change",
    [
        lambda file: os.utime(file, ns=(0, 0)),
        lambda file: file.write_text(LINES.replace("of", "or")),
        lambda file: file.write_text(LINES * 2),
    ],
)
def test_changed_sources_are_read_again(source, tmp_path, change):
    build(source, tmp_path / "c")
    change(source)
    assert tokens_of(build(source, tmp_path / "c")) == tokens_of(build(source))
    assert len(times(tmp_path / "c")) == 4


@pytest.mark.parametrize("options", [{"vocab_size": 9}, {"max_tokens": 9}, {"val_fraction": 0.2}, {"tokens": "byte"}])
def test_other_settings_have_other_files(source, tmp_path, options):
    build(source, tmp_path / "c")
    assert tokens_of(build(source, tmp_path / "c", **options)) == tokens_of(build(source, **options))
    assert len(times(tmp_path / "c")) == 4


def test_other_texts_of_the_same_name_have_other_files(tmp_path):
    for folder, text in (("a", LINES), ("b", LINES[::-1])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(text)
        assert tokens_of(build(tmp_path / folder, tmp_path / "c")) == tokens_of(build(tmp_path / folder))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def claim_another_text(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": "another"}))


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".tokens", truncate),
        (".tokens", lambda path: path.write_bytes(path.read_bytes() + b"\0")),
        (".tokens", lambda path: path.unlink()),
        (".json", truncate),
        (".json", lambda path: path.write_bytes(b"\xff\xfe")),
        (".json", lambda path: path.write_text("[]")),
        (".json", claim_another_text),
        (".json", lambda path: path.unlink()),
    ],
)
def test_files_that_are_not_whole_are_written_anew(source, tmp_path, caplog, suffix, damage):
    build(source, tmp_path / "c")
    before = {suffix: path.read_bytes() for suffix, path in files_in(tmp_path / "c").items()}
    damage(files_in(tmp_path / "c")[suffix])
    with caplog.at_level("INFO"):
        assert tokens_of(build(source, tmp_path / "c")) == tokens_of(build(source))
    assert caplog.text.count("are not whole: they are written anew") == 1
    assert {suffix: path.read_bytes() for suffix, path in files_in(tmp_path / "c").items()} == before


def test_a_failure_leaves_no_file_behind(source, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Words, "encode_block", fail)
    with pytest.raises(KeyboardInterrupt):
        build(source, tmp_path / "c")
    assert not times(tmp_path / "c")


def test_several_may_write_at_once(source, tmp_path):
    text = Text({"train": [whole(source)]}, "word", 50, None)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: on_disk(text, tmp_path / "c", "x").tokens["train"].tolist(), range(8)))
    assert all(tokens == found[0] for tokens in found)
    assert len(times(tmp_path / "c")) == 2


def test_mapped_windows_pickle_as_the_name_of_their_file(source, tmp_path):
    for split in ("train", "val", "test"):
        dataset = build(source, tmp_path / "c").eval_dataloader(split).dataset
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 1000
        copied = pickle.loads(pickled)
        assert isinstance(copied.tokens, np.memmap)
        assert len(copied) == len(dataset)
        assert torch.equal(copied.__getitems__(range(len(copied)))[1], dataset.__getitems__(range(len(dataset)))[1])


def test_same_tokens_and_files_in_another_process(source, tmp_path):
    script = """
import sys
from lightning_symmetry.data import TextData
for folder in (None, sys.argv[2]):
    data = TextData(sys.argv[1], "word", context=5, cache_dir=folder)
    data.prepare_data()
    data.setup()
    print({split: tokens.tolist() for split, tokens in data._corpus.tokens.items()})
"""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "theirs")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ours = build(source, tmp_path / "ours")
    assert printed.splitlines() == [str(tokens_of(ours))] * 2
    theirs, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("theirs", "ours")
    )
    assert theirs == ours
