"""A corpus: what to read and how, and the tokens that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from lightning_symmetry.data.progress import progress
from lightning_symmetry.data.text_files import Blocks, Span
from lightning_symmetry.data.text_tokens import Bytes, Vocabulary, Words, most_frequent, words_of

SequenceT = TypeVar("SequenceT", bound=Sequence[Any] | np.ndarray)


class Corpus(NamedTuple):
    """The tokens of a corpus."""

    vocabulary: Vocabulary
    tokens: dict[str, np.ndarray]
    """Tokens of each split, of shape (N,)."""


class Text(NamedTuple):
    """What to read and how: whatever the tokens depend on."""

    spans: Mapping[str, Sequence[Span]]
    """What each split consists of."""
    kind: Literal["byte", "word"]
    vocab_size: int
    """Most words of a vocabulary of words."""
    max_tokens: int | None
    """Most tokens of the training split."""

    def vocabulary(self) -> Vocabulary:
        """Choose the words by the training split, or take the bytes.

        Returns:
            The vocabulary.

        Raises:
            ValueError: If words are asked for and the text is not UTF-8.
        """
        if self.kind == "byte":
            return Bytes()
        blocks = progress(Blocks(self.spans["train"]), "counting words")
        return Words(most_frequent(first(map(words_of, blocks), self.max_tokens), self.vocab_size))

    def pieces(self, split: str, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
        """Read a split.

        Args:
            split: Its name.
            vocabulary: What to turn the text into.

        Returns:
            Its tokens piece by piece.
        """
        pieces = map(vocabulary.encode_block, progress(Blocks(self.spans[split]), f"tokenising {split}"))
        return first(pieces, self.max_tokens if split == "train" else None)


def first(pieces: Iterable[SequenceT], limit: int | None) -> Iterator[SequenceT]:
    """Cut off what comes after the first `limit` items.

    Args:
        pieces: Lists or arrays of items.
        limit: Most items to let through; None for all.

    Yields:
        The pieces, up to the limit.
    """
    left = limit
    for piece in pieces:
        yield piece if left is None else piece[:left]
        if left is not None:
            left -= min(left, len(piece))
            if not left:
                return


def in_memory(text: Text) -> Corpus:
    """Read a corpus into memory.

    Args:
        text: What to read.

    Returns:
        The corpus.
    """
    vocabulary = text.vocabulary()
    empty = np.empty(0, vocabulary.dtype)  # for a split of nothing
    return Corpus(vocabulary, {name: np.concatenate([empty, *text.pieces(name, vocabulary)]) for name in text.spans})
