"""Bytes to lines of text; an error has its line and byte offset."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from typing import Final

from recipes_lib.data.source_rows import Entry, RawRow
from recipes_lib.errors import Problem

MAX_LINE_BYTES: Final = 1 << 28
"""Longest line read, 256 MiB; beyond it the file is not what its name says."""


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


def read_text(file: BufferedReader, name: str) -> Iterator[Entry]:
    r"""Read one row a line, as ``datasets`` does; blank lines, which it turns into empty rows, are left out.

    A line ends at ``\n`` or ``\r\n``, and at nothing else that Unicode calls a line break.

    Raises:
        BrokenFileError: What follows cannot be read.
    """
    for number, line in enumerate_lines(file, name):
        text = line.rstrip("\r\n")
        if text and not text.isspace():
            yield RawRow(name, number, "line", {"text": text})
