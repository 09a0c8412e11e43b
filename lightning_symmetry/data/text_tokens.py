"""Text as numbers: bytes, or words of a vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lightning_symmetry.data.text_files import Block

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"


class Bytes:
    """The 256 bytes of UTF-8 text."""

    size = 256
    dtype = np.dtype(np.uint8)
    words = None

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text.

        Args:
            text: Any text.

        Returns:
            Tokens, uint8 of shape (N,).
        """
        return np.frombuffer(text.encode(), np.uint8)

    def encode_block(self, block: Block) -> np.ndarray:
        """Return the bytes of a block, whatever they encode.

        Args:
            block: From a file.

        Returns:
            Tokens, uint8 of shape (N,).
        """
        return np.frombuffer(block.data, np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens; where they are not UTF-8 it has the replacement character.

        Args:
            tokens: Of shape (N,).

        Returns:
            The text.
        """
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")


class Words:
    """Words between white space, by frequency; line ends are `<eos>`, and all other words `<unk>`."""

    def __init__(self, words: Sequence[str]) -> None:
        """Number the words.

        Args:
            words: `<unk>`, `<eos>` and the other words.
        """
        self.words = list(words)
        self.size = len(self.words)
        self.dtype = np.dtype(np.uint16 if self.size <= 2**16 else np.int32)
        self._numbers = _Numbers(zip(self.words, range(self.size), strict=True))

    def encode(self, text: str) -> np.ndarray:
        """Return the words of a text.

        Args:
            text: Any text.

        Returns:
            Tokens, of shape (N,).
        """
        return self._number(split_words(text))

    def encode_block(self, block: Block) -> np.ndarray:
        """Return the words of a block; the last line of a file ends with `<eos>` like all others.

        Args:
            block: From a file.

        Returns:
            Tokens, of shape (N,).
        """
        return self._number(words_of(block))

    def _number(self, words: list[str]) -> np.ndarray:
        return np.fromiter(map(self._numbers.__getitem__, words), self.dtype, len(words))

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens, with one space between words.

        Args:
            tokens: Of shape (N,).

        Returns:
            The text.
        """
        words = (self.words[token] for token in tokens.tolist())
        text = " ".join("\n" if word == END_OF_LINE else word for word in words)
        return text.replace(" \n", "\n").replace("\n ", "\n")


Vocabulary = Bytes | Words


class _Numbers(dict[str, int]):
    """Numbers of words; 0 for those that have none."""

    def __missing__(self, word: str) -> int:
        return 0


def split_words(text: str) -> list[str]:
    """Split at white space, with `<eos>` for each end of a line.

    Args:
        text: Any text.

    Returns:
        The words.
    """
    return text.replace("\n", f" {END_OF_LINE} ").split()


def words_of(block: Block) -> list[str]:
    """Split a block; the last line of a file ends with `<eos>` like all others.

    Args:
        block: From a file.

    Returns:
        The words.
    """
    text = block.text()
    return split_words(f"{text}\n" if block.last and not text.endswith("\n") else text)


def most_frequent(words: Iterable[Sequence[str]], size: int) -> list[str]:
    """Choose a vocabulary.

    Args:
        words: Lists of words, which are counted.
        size: Most words to choose, with `<unk>` and `<eos>`.

    Returns:
        `<unk>`, `<eos>`, and the most frequent others, in descending frequency and those of the same frequency in
        alphabetical order.
    """
    counts: Counter[str] = Counter()
    for some in words:
        counts.update(some)
    special = [UNKNOWN, END_OF_LINE]
    for word in special:
        del counts[word]
    return [*special, *sorted(counts, key=lambda word: (-counts[word], word))[: size - len(special)]]
