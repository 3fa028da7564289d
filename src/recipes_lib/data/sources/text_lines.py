"""Bytes to lines of text, and text files to rows; an error has its line and byte offset."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from typing import Final, Literal

from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.errors import Problem

MAX_LINE_BYTES: Final = 1 << 28
"""Longest line read, 256 MiB; beyond it the file is not what its name says."""

MAX_DOCUMENT_BYTES: Final = 1 << 24
"""Longest document made of several lines, 16 MiB; what is longer becomes several documents, cut at line ends."""

TextDocuments = Literal["file", "paragraph", "line"]
"""What a row of a text file is: the whole file, what stands between blank lines, or a line."""


class BrokenFileError(Exception):
    """Nothing after this point of the file can be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def build_encoding_error(where: str, offset: int, first_bytes: bytes) -> BrokenFileError:
    """Say which byte of a file, counted from 0, is not UTF-8."""
    kind = "UTF-16" if first_bytes[:2] in (b"\xff\xfe", b"\xfe\xff") else "in another encoding"
    found = f"not UTF-8 at byte {offset:,}"
    return BrokenFileError(Problem(where, found, f"the file may be {kind}: convert it to UTF-8 (iconv, or re-save it)"))


def enumerate_lines(file: BufferedReader, name: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its 1-based number: decoded, line end kept, byte order mark removed.

    Raises:
        BrokenFileError: A line is not UTF-8, or longer than ``MAX_LINE_BYTES``.
    """
    number, offset = 0, 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            found = f"a line longer than {MAX_LINE_BYTES:,} bytes"
            raise BrokenFileError(Problem(f"{name}:{number}", found, "check that the file is what its suffix says"))
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise build_encoding_error(f"{name}:{number}", offset + error.start, raw if number == 1 else b"") from None
        yield number, line.removeprefix("\ufeff") if number == 1 else line
        offset += len(raw)


def read_text(file: BufferedReader, name: str, documents: TextDocuments = "line") -> Iterator[Entry]:
    r"""Read one row a document, named by its first line; documents of nothing but white space are left out.

    A line ends at ``\n`` or ``\r\n``, and at nothing else that Unicode calls a line break. A line and a paragraph come
    without the end of their last line; a file comes as it stands.

    Raises:
        BrokenFileError: What follows cannot be read.
    """
    lines = enumerate_lines(file, name)
    rows: Iterator[tuple[int, str]]
    if documents == "line":
        rows = ((number, line.rstrip("\r\n")) for number, line in lines)
    elif documents == "paragraph":
        rows = ((number, text.rstrip("\r\n")) for number, text in _join_lines(lines, ends_at_blank=True))
    else:
        rows = _join_lines(lines, ends_at_blank=False)
    for number, text in rows:
        if text and not text.isspace():
            yield RawRow(name, number, "line", {"text": text})


def _join_lines(lines: Iterator[tuple[int, str]], *, ends_at_blank: bool) -> Iterator[tuple[int, str]]:
    """Yield lines joined, with the number of the first: all of them, or up to the next blank line."""
    joined: list[str] = []
    first = size = 0
    for number, line in lines:
        is_end = ends_at_blank and line.isspace()
        num_bytes = len(line) if line.isascii() else len(line.encode())
        if joined and (is_end or size + num_bytes > MAX_DOCUMENT_BYTES):
            yield first, "".join(joined)
            joined, size = [], 0
        if not is_end:
            first = first if joined else number
            joined.append(line)
            size += num_bytes
    if joined:
        yield first, "".join(joined)
