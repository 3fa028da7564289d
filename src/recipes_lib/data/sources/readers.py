"""File readers: JSON, JSON Lines, CSV, TSV, Parquet, Arrow and text to rows; errors have line and column.

``datasets`` 5.2 ends at the first broken line or byte, and of CSV it reads ``NA`` as null and ``007`` as 7. datatrove
0.10 skips a broken line without counting it, and ends a file at the first byte that is not UTF-8.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import date, time
from io import BufferedReader
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from recipes_lib.data.sources.messages import describe
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.errors import DataError, Problem

if TYPE_CHECKING:
    import pyarrow as pa


MAX_LINE_BYTES: Final = 1 << 28
"""Longest line read, 256 MiB; beyond it the file is not what its name says."""

MAX_DOCUMENT_BYTES: Final = 1 << 24
"""Longest document made of several lines, 16 MiB; what is longer becomes several documents, cut at line ends."""

_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")

TextDocuments = Literal["file", "paragraph", "line"]
"""What a row of a text file is: the whole file, what stands between blank lines, or a line."""


def _refuse_encoding(where: str, offset: int, first_bytes: bytes) -> Problem:
    """Return which byte of a file, counted from 0, is not UTF-8."""
    kind = "UTF-16" if first_bytes[:2] in _UTF16 else "in another encoding"
    found = f"not UTF-8 at byte {offset:,}"
    return Problem(where, found, f"the file may be {kind}: convert it to UTF-8 (iconv, or re-save it)")


class BrokenLine(str):
    """Placeholder of an unreadable line: its UTF-8 part, and the problem.

    Attributes:
        problem: The line, what was found, and what to do.
    """

    problem: Problem


def enumerate_lines(file: BufferedReader, name: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its 1-based number: decoded, with line end, without byte order mark.

    A line that is not UTF-8, or longer than ``MAX_LINE_BYTES``, becomes a ``BrokenLine``; reading continues after it.

    Raises:
        DataError: The file is UTF-16.
    """
    number, offset = 0, 0
    # One byte more, which tells a line that is too long from one that just fits.
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number, size = number + 1, len(raw)
        where = f"{name}:{number}"
        if size > MAX_LINE_BYTES:
            found = f"a line longer than {MAX_LINE_BYTES:,} bytes"
            line: str = _break_line("\n", Problem(where, found, "check that the file is what its suffix says"))
            while not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
                size += len(raw)
        else:
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                problem = _refuse_encoding(where, offset + error.start, raw if number == 1 else b"")
                if number == 1 and raw[:2] in _UTF16:
                    raise DataError(problem) from None
                line = _break_line(raw.decode(errors="replace"), problem)
        yield number, line.removeprefix("\ufeff") if number == 1 and not isinstance(line, BrokenLine) else line
        offset += size


def _break_line(text: str, problem: Problem) -> BrokenLine:
    line = BrokenLine(text)
    line.problem = problem
    return line


def read_text(file: BufferedReader, name: str, documents: TextDocuments = "line") -> Iterator[Entry]:
    r"""Read one row per document, named by its first line; white-space-only documents are dropped.

    Lines end at ``\n`` or ``\r\n`` only, not at Unicode's other line breaks. Lines and paragraphs come without the
    end of their last line; a file is unchanged.

    Raises:
        DataError: What follows cannot be read.
    """
    lines = enumerate_lines(file, name)
    rows = lines if documents == "line" else _join_lines(lines, ends_at_blank=documents == "paragraph")
    for number, text in rows:
        if isinstance(text, BrokenLine):
            yield text.problem
        elif text and not text.isspace():
            text = text if documents == "file" else text.rstrip("\r\n")
            yield RawRow(name, number, "line", {"text": text})


def _join_lines(lines: Iterator[tuple[int, str]], *, ends_at_blank: bool) -> Iterator[tuple[int, str]]:
    """Yield joined lines, with the number of the first: all of them, or up to the next blank line.

    A document with an unreadable line is unreadable.
    """
    joined: list[str] = []
    first = size = 0
    broken: BrokenLine | None = None
    for number, line in lines:
        is_end = ends_at_blank and line.isspace() and not isinstance(line, BrokenLine)
        num_bytes = len(line) if line.isascii() else len(line.encode())
        if joined and (is_end or size + num_bytes > MAX_DOCUMENT_BYTES):
            yield first, "".join(joined) if broken is None else broken
            joined, size, broken = [], 0, None
        if not is_end:
            first = first if joined else number
            joined.append(line)
            size += num_bytes
            if broken is None and isinstance(line, BrokenLine):
                broken = line
    if joined:
        yield first, "".join(joined) if broken is None else broken


WRAPPERS: Final = ("data", "rows", "examples", "instances")
"""Keys under which the single object of a file may hold its rows."""

_BLANK: Final = re.compile(r"[ \t\r\n]*")

Line = tuple[int, str]


def read_json(file: BufferedReader, name: str, *, may_be_document: bool) -> Iterator[Entry]:
    """Read the rows of a JSON file, in the layout of its beginning.

    Args:
        file: The opened file.
        name: Its name, for errors.
        may_be_document: Whether a file that begins with ``{`` may be one object over several lines (a ``.json`` file),
            which is read whole; otherwise it has one object a line.

    Raises:
        DataError: What follows cannot be read.
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
        if isinstance(line, BrokenLine):
            yield line.problem
            continue
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
    written = [line for _, line in lines]
    if broken := next((line for line in written if isinstance(line, BrokenLine)), None):
        raise DataError(broken.problem)
    text = "".join(written)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        where = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        found = f"invalid JSON{column}: {_explain(error)}"
        raise DataError(Problem(where, found, _DOCUMENT_REMEDY)) from None
    wrapped = [key for key in WRAPPERS if isinstance(value, dict) and isinstance(value.get(key), list)]
    rows = value[wrapped[0]] if len(wrapped) == 1 else [value]
    for index, row in enumerate(rows):
        yield _to_entry(row, name, index, "row")


def _read_array(file: BufferedReader, name: str) -> Iterator[Entry]:
    """Read the whole text, then its elements one by one, so that an error has its line and earlier rows are read."""
    raw = file.read()
    try:
        text = raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"{name}:{raw.count(bytes([10]), 0, error.start) + 1}"
        raise DataError(_refuse_encoding(where, error.start, b"")) from None

    def skip_blank(at: int) -> int:
        blank = _BLANK.match(text, at)
        return blank.end() if blank else at

    def fail(found: str, at: int) -> NoReturn:
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        raise DataError(Problem(f"{name}:{line}", f"{found} (column {column})", _DOCUMENT_REMEDY))

    at, index = skip_blank(skip_blank(0) + 1), 0
    while index or text[at : at + 1] != "]":
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            fail(f"invalid JSON: {_explain(error)}", error.pos if isinstance(error, json.JSONDecodeError) else at)
        yield _to_entry(value, name, index, "row")
        at, index = skip_blank(at), index + 1
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            fail("the array is not closed" if at == len(text) else "expected `,` or `]`", at)
        at = skip_blank(at + 1)
    at = skip_blank(at + 1)
    if at < len(text):
        fail("text after the array", at)


def _take_two(lines: Iterator[Line]) -> list[Line]:
    """Take lines up to and including the second non-blank one."""
    taken, filled = [], 0
    while filled < 2 and (line := next(lines, None)):
        taken.append(line)
        filled += not line[1].isspace()
    return taken


def _is_document(head: list[Line]) -> bool:
    """Whether these lines, at most two of them non-blank, begin one value rather than one value per line."""
    filled = [line for _, line in head if not line.isspace()]
    if any(isinstance(line, BrokenLine) for line in filled):
        return filled[0].strip() in ("{", "[")
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
    # Python keeps the last of equal keys without a word.
    built = dict(pairs)
    if len(built) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in an object")
    return built


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_build_object)
_LINE_REMEDY: Final = "write one JSON object a line, as json.dumps(row) does"
_DOCUMENT_REMEDY: Final = "write the file with json.dump(rows, file), or one JSON object a line"


_MAX_CELL_CHARACTERS: Final = 1 << 28  # The csv module's own limit of 131,072 is below the length of long documents.
_BATCH_ROWS: Final = 32
"""Rows converted at once. 1,024 rows of a megabyte took twice the memory of 32, and no row less time."""
_ARROW_FILE: Final = b"ARROW1"
"""What an Arrow file begins with, and a stream does not."""


def read_csv(file: BufferedReader, name: str, *, delimiter: str) -> Iterator[Entry]:
    """Read a table with column names in the first line; every cell is text, including empty ones.

    A first line without commas, but with semicolons, tabs or bars, says that these delimit the cells. Columns without a
    name, as of pandas' index, are called ``Unnamed: 0`` and so on, as by pandas and ``datasets``.

    Raises:
        DataError: The header is not usable, or what follows cannot be read.
    """
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    broken: list[Problem] = []
    lines = _note_broken(enumerate_lines(file, name), broken)
    head = next(lines, "")
    if delimiter == "," and "," not in head:
        delimiter = max(",;\t|", key=head.count)
    # Without `strict`, a quote that is never closed takes the rest of the file into one cell, without an error.
    reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    number = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            found = f"invalid CSV in the row that begins here: {error}"
            raise DataError(Problem(f"{name}:{number}", found, _QUOTING)) from None
        if cells is None:
            return
        if broken:
            yield broken[0]
            broken.clear()
        elif not cells:  # a blank line
            pass
        elif columns is None:
            columns = [cell or f"Unnamed: {at}" for at, cell in enumerate(cells)]
            _check_header(columns, f"{name}:{number}")
        elif len(cells) == len(columns):
            yield RawRow(name, number, "line", dict(zip(columns, cells, strict=True)))
        else:
            yield Problem(f"{name}:{number}", f"{len(cells)} cells under {len(columns)} columns", _QUOTING)
        number = reader.line_num + 1


def _note_broken(lines: Iterator[tuple[int, str]], broken: list[Problem]) -> Iterator[str]:
    """Yield the lines; problems of unreadable ones are appended to ``broken``."""
    for number, line in lines:
        if isinstance(line, BrokenLine):
            if number == 1:
                raise DataError(line.problem)
            broken.append(line.problem)
        yield line


def _check_header(columns: list[str], where: str) -> None:
    repeated = next((column for column in columns if columns.count(column) > 1), None)
    if repeated is not None:
        raise DataError(Problem(where, f"two columns are named `{repeated}`", "give each column its own name"))


def read_parquet(file: BufferedReader, name: str, groups: range | None = None) -> Iterator[Entry]:
    """Read a Parquet file in batches, with values converted by ``spell_as_json``.

    Args:
        file: The opened file.
        name: Its name, for errors.
        groups: Row groups to read, one after another; all unless told.

    Raises:
        DataError: What follows cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        _check_header(table.schema_arrow.names, name)
        groups = range(table.num_row_groups) if groups is None else groups
        # Rows are numbered over the whole file, also in a part of it.
        index = sum(table.metadata.row_group(at).num_rows for at in range(groups.start))
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(groups)):
            for columns in batch.to_pylist():
                yield RawRow(name, index, "row", spell_as_json(columns))
                index += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        found = f"not a whole Parquet file: {str(error).partition(chr(10))[0]}"
        raise DataError(Problem(name, found, "write or download it again")) from None


def read_arrow(file: BufferedReader, name: str) -> Iterator[Entry]:
    """Read an Arrow file, a stream as written by ``datasets`` or a file, with values as in ``read_parquet``.

    Raises:
        DataError: What follows cannot be read.
    """
    import pyarrow as pa

    try:
        is_stream = file.peek(len(_ARROW_FILE))[: len(_ARROW_FILE)] != _ARROW_FILE
        # The index of a file is at its end, so a compressed file is decompressed in memory.
        reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(pa.py_buffer(file.read()))
        _check_header(reader.schema.names, name)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from read_batches(batches, reader.schema, name)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or "it states a length beyond the memory"
        found = f"not a whole Arrow file: {reason}"
        raise DataError(Problem(name, found, "write it again, with `save_to_disk` or pyarrow")) from None


def read_batches(batches: Iterable[pa.RecordBatch | pa.Table], schema: pa.Schema, name: str) -> Iterator[Entry]:
    """Yield the rows of Arrow batches of an untrusted file, decoded if ``datasets`` wrote it."""
    decode, index = _find_decoder(schema), 0
    for batch in batches:
        # pyarrow trusts the offsets in a file: those of a damaged one read other memory, or end the process.
        batch.validate(full=True)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for columns in batch.slice(start, _BATCH_ROWS).to_pylist():
                yield RawRow(name, index, "row", spell_as_json(decode(columns)))
                index += 1


def _find_decoder(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the decoder of stored values: ``datasets`` stores JSON of mixed shape as text, for example."""
    if b"huggingface" not in (schema.metadata or {}):
        return lambda columns: columns
    import datasets

    features = datasets.Features.from_arrow_schema(schema)
    return lambda columns: dict(features.decode_example(columns))


def spell_as_json(value: Any) -> Any:
    """Convert an Arrow value to its form in a JSON file.

    Null keys of an object are dropped, because Arrow gives all rows the keys of any row; dates and times become ISO
    strings.
    """
    if isinstance(value, dict):
        return {key: spell_as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [spell_as_json(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value


_QUOTING: Final = 'quote cells that hold the delimiter, a quote or a line end: "like, this", with "" for a quote'
