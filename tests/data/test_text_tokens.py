"""Bytes and words: round trips, and the vocabulary against counting by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_symmetry.data.text_corpus import first
from lightning_symmetry.data.text_files import Block
from lightning_symmetry.data.text_tokens import Bytes, Words, most_frequent, split_words


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_decode_to_the_text(text):
    tokens = Bytes().encode(text)
    assert tokens.dtype == np.uint8
    assert Bytes().decode(tokens) == text


def test_bytes_of_anything_are_tokens():
    data = bytes(range(256))
    assert Bytes().encode_block(Block(data, Path("x"), 0, last=True)).tolist() == list(data)
    assert Bytes().decode(np.array([0x61, 0xE9, 0x62])) == "a\ufffdb"


@given(st.lists(st.sampled_from(["<eos>", "<unk>", "a", "b", "x<eos>y"])))
def test_words_encode_what_they_decode(words):
    vocabulary = Words(["<unk>", "<eos>", "a", "b", "x<eos>y"])
    tokens = np.array([vocabulary.words.index(word) for word in words], dtype=np.int64)
    text = vocabulary.decode(tokens)
    assert vocabulary.encode(text).tolist() == tokens.tolist()
    assert text.count("\n") == words.count("<eos>")
    assert not any(double in text for double in ("  ", " \n", "\n "))


def test_words_are_between_white_space_and_lines_end():
    assert split_words(" a  b\tc\n\n d\r\n") == ["a", "b", "c", "<eos>", "<eos>", "d", "<eos>"]
    vocabulary = Words(["<unk>", "<eos>", "a"])
    assert vocabulary.encode("a b\n\na").tolist() == [2, 0, 1, 1, 2]
    assert vocabulary.encode("").tolist() == []
    assert vocabulary.decode(vocabulary.encode("a  b\n a\n")) == "a <unk>\na\n"


@pytest.mark.parametrize(
    ("data", "last", "expected"),
    [
        (b"a a", True, [2, 2, 1]),  # the end of a file is an end of a line
        (b"a a\n", True, [2, 2, 1]),
        (b"a a ", False, [2, 2]),
        (b"a a\n", False, [2, 2, 1]),
    ],
)
def test_words_of_blocks(data, last, expected):
    block = Block(data, Path("x"), 0, last)
    assert Words(["<unk>", "<eos>", "a"]).encode_block(block).tolist() == expected


@given(st.lists(st.lists(st.sampled_from([*"abcdefg", "<unk>", "<eos>"]))), st.integers(3, 10))
def test_vocabulary_is_the_most_frequent_words(pieces, size):
    chosen = most_frequent(pieces, size)
    counts = Counter(word for piece in pieces for word in piece if word not in ("<unk>", "<eos>"))
    assert chosen[:2] == ["<unk>", "<eos>"]
    assert len(chosen) == min(size, 2 + len(counts))
    keys = [(-counts[word], word) for word in chosen[2:]]
    assert keys == sorted(keys)
    left = [(-counts[word], word) for word in counts if word not in chosen]
    assert not left or not keys or max(keys) < min(left)


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.int32)])
def test_all_numbers_fit_their_type(size, dtype):
    words = ["<unk>", "<eos>", *map(str, range(size - 2))]
    vocabulary = Words(words)
    tokens = vocabulary.encode(" ".join(words))
    assert tokens.dtype == dtype
    assert np.array_equal(tokens, np.arange(size))


@given(st.lists(st.lists(st.integers(), max_size=5)), st.integers(1, 20))
def test_first_is_a_prefix(pieces, limit):
    whole = [item for piece in pieces for item in piece]
    assert [item for piece in first(pieces, limit) for item in piece] == whole[:limit]
    assert list(first(pieces, None)) == pieces


def test_first_reads_no_further():
    def endless():
        while True:
            yield [1, 2, 3]

    assert list(first(endless(), 6)) == [[1, 2, 3], [1, 2, 3]]
