"""JSON files to rows: one object a line, an array, or a single object; an error has its line and column."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import chain
from typing import Any, Final, NoReturn

from recipes_lib.data.sources.messages import describe
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.data.sources.text_lines import BrokenFileError, build_encoding_error, enumerate_lines
from recipes_lib.errors import Problem

WRAPPERS: Final = ("data", "rows", "examples", "instances")
"""Keys under which the single object of a file may hold its rows."""

_CHUNK_BYTES: Final = 1 << 20
_LONGEST_TOKEN: Final = 16  # no literal or escape is longer: an error further than this from the end is one
_BLANK: Final = re.compile(r"[ \t\r\n]*")

Line = tuple[int, str]


def read_json(file: BufferedReader, name: str, *, may_be_document: bool) -> Iterator[Entry]:
    """Read the rows of a JSON file, laid out as its beginning says.

    Args:
        file: The opened file.
        name: Its name, for errors.
        may_be_document: Whether a file that begins with ``{`` may be one object over several lines (a ``.json`` file),
            which is read whole; otherwise it has one object a line.

    Raises:
        BrokenFileError: What follows cannot be read.
    """
    if file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _read_array(file, name)
        return
    lines: Iterator[Line] = enumerate_lines(file, name)
    if may_be_document:
        head = _take_two(lines)
        lines = chain(head, lines)
        if _is_document(head):
            yield from _read_document(lines, name)
            return
    yield from _read_lines(lines, name)


def _read_lines(lines: Iterable[Line], name: str) -> Iterator[Entry]:
    for number, line in lines:
        if not line or line.isspace():
            continue
        try:
            value = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            yield Problem(f"{name}:{number}", f"invalid JSON{column}: {_explain(error)}", _LINE_REMEDY)
        else:
            yield _to_entry(value, name, number, "line")


def _read_document(lines: Iterable[Line], name: str) -> Iterator[Entry]:
    text = "".join(line for _, line in lines)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        where = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        found = f"invalid JSON{column}: {_explain(error)}"
        raise BrokenFileError(Problem(where, found, _DOCUMENT_REMEDY)) from None
    wrapped = [key for key in WRAPPERS if isinstance(value, dict) and isinstance(value.get(key), list)]
    rows = value[wrapped[0]] if len(wrapped) == 1 else [value]
    for index, row in enumerate(rows):
        yield _to_entry(row, name, index, "row")


def _read_array(file: BufferedReader, name: str) -> Iterator[Entry]:
    window = _Window(file, name)
    window.take()
    index = 0
    while window.peek() != "]" or index:
        yield _to_entry(window.take_value(), name, index, "row")
        index += 1
        if window.peek() == "]":
            break
        if window.peek() != ",":
            window.fail("the array is not closed" if not window.peek() else "expected `,` or `]`")
        window.take()
    window.take()
    if window.peek():
        window.fail("text after the array")


class _Window:
    """The stretch of a JSON text being parsed, refilled from the file as it is consumed."""

    def __init__(self, file: BufferedReader, name: str) -> None:
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._line, self._column, self._offset = 1, 1, 0  # of the first character of the text; of the next byte read

    def peek(self) -> str:
        """Return the next character that is not blank, empty at the end of the file."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._refill(_CHUNK_BYTES):
                return ""

    def take(self) -> None:
        """Consume the next character that is not blank."""
        self.peek()
        self._at += 1

    def take_value(self) -> object:
        """Consume and return the next value.

        Raises:
            BrokenFileError: There is none.
        """
        self.peek()
        size = _CHUNK_BYTES
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                ahead = error.pos - self._at
                if self._is_certain(error) or not self._refill(size):
                    self.fail(f"invalid JSON: {_explain(error)}", ahead)
            except (ValueError, RecursionError) as error:
                self.fail(f"invalid JSON: {_explain(error)}")
            else:
                if end < len(self._text) or not self._refill(size):
                    self._at = end
                    return value
            size *= 2

    def fail(self, found: str, ahead: int = 0) -> NoReturn:
        """Raise, naming the line and column of the character so far ahead of the next one."""
        line, column = self._place(self._at + ahead)
        raise BrokenFileError(Problem(f"{self._name}:{line}", f"{found} (column {column})", _DOCUMENT_REMEDY))

    def _is_certain(self, error: json.JSONDecodeError) -> bool:
        """Whether more text cannot mend the error."""
        return not error.msg.startswith("Unterminated") and error.pos < len(self._text) - _LONGEST_TOKEN

    def _place(self, position: int) -> tuple[int, int]:
        newlines = self._text.count("\n", 0, position)
        if newlines:
            return self._line + newlines, position - self._text.rindex("\n", 0, position)
        return self._line, self._column + position

    def _refill(self, size: int) -> bool:
        """Drop what is consumed and append the file's next bytes; false when there are none."""
        raw = self._file.read(size)
        pending = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            line, _ = self._place(len(self._text))
            where = f"{self._name}:{line + raw.count(bytes([10]), 0, max(error.start - pending, 0))}"
            raise build_encoding_error(where, self._offset - pending + error.start, b"") from None
        self._offset += len(raw)
        self._line, self._column = self._place(self._at)
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(raw)


def _take_two(lines: Iterator[Line]) -> list[Line]:
    """Take lines up to and with the second that is not blank."""
    taken, filled = [], 0
    while filled < 2 and (line := next(lines, None)):
        taken.append(line)
        filled += not line[1].isspace()
    return taken


def _is_document(head: list[Line]) -> bool:
    """Whether these lines, at most two of them not blank, begin a single value and not one value a line."""
    filled = [line for _, line in head if not line.isspace()]
    if len(filled) == 2:
        try:
            _DECODER.decode(filled[0])
        except (ValueError, RecursionError):
            return True
    return len(filled) == 1


def _to_entry(value: object, name: str, index: int, index_name: str) -> Entry:
    if isinstance(value, dict):
        return RawRow(name, index, index_name, value)
    where = RawRow(name, index, index_name, {}).where
    return Problem(where, f"the row is {describe(value)}, not an object", "write each row as {column: value}")


def _explain(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in an object")
    return built


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_build_object, parse_constant=_refuse_constant)
_LINE_REMEDY: Final = "write one JSON object a line, as json.dumps(row, allow_nan=False) does"
_DOCUMENT_REMEDY: Final = "write the file with json.dump(rows, file, allow_nan=False), or one JSON object a line"
