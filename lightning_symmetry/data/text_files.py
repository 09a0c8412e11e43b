"""Text files as spans of bytes, read in blocks that end between words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK_BYTES = 2**22


class Span(NamedTuple):
    """The bytes from `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int


def whole(path: Path) -> Span:
    """Return all bytes of a file.

    Args:
        path: The file.

    Returns:
        Its span.
    """
    return Span(path, 0, path.stat().st_size)


class Block(NamedTuple):
    """Some bytes of a file."""

    data: bytes
    path: Path
    start: int
    """Where they begin in the file."""
    last: bool
    """Whether the span ends with them."""

    def text(self) -> str:
        """Decode the bytes.

        Returns:
            The text.

        Raises:
            ValueError: If they are not UTF-8.
        """
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8: byte {error.object[error.start]:#04x} at {self.start + error.start}. "
                'Words need text in UTF-8: convert the file, or pass `tokens="byte"`.'
            ) from error


class Blocks:
    """The blocks of spans, in order; none ends within a word, except where a word is cut by the end of its span."""

    def __init__(self, spans: Sequence[Span], size: int = BLOCK_BYTES) -> None:
        """Choose what to read; files are opened in iteration.

        Args:
            spans: What to read.
            size: Bytes read at a time.
        """
        self.spans, self.size = spans, size

    def __len__(self) -> int:
        return sum(-(-(span.stop - span.start) // self.size) for span in self.spans)

    def __iter__(self) -> Iterator[Block]:
        for span in self.spans:
            yield from self._blocks_of(span)

    def _blocks_of(self, span: Span) -> Iterator[Block]:
        start, left, carried = span.start, span.stop - span.start, b""
        with span.path.open("rb") as file:
            file.seek(start)
            while left:
                read = file.read(min(self.size, left))
                if not read:
                    raise RuntimeError(f"{span.path} became shorter while it was read.")
                left -= len(read)
                data = carried + read
                cut = max(data.rfind(b"\n"), data.rfind(b" ")) + 1 if left else len(data)
                yield Block(data[:cut], span.path, start, last=not left)
                start, carried = start + cut, data[cut:]
