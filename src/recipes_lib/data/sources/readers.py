"""Readers of JSON, JSON Lines, CSV, TSV, Parquet, Arrow and text files, with line and column in errors.

Why not the readers of other libraries: ``datasets`` 5.2 stops at the first broken line or byte, and in CSV it reads
``NA`` as null and ``007`` as 7; datatrove 0.10 skips broken lines without counting them, and stops at the first byte
that is not UTF-8.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from io import BufferedReader
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard

from recipes_lib.data.sources.messages import describe
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.errors import DataError, Problem
from recipes_lib.files import count_bytes

if TYPE_CHECKING:
    import pyarrow as pa


MAX_LINE_BYTES: Final = 1 << 28
"""Longest line that is read, 256 MiB; a longer one means that the file has another type than its suffix says."""

MAX_DOCUMENT_BYTES: Final = 1 << 24
"""Longest document of several lines, 16 MiB; longer ones are split into several documents at line ends."""

_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")

TextDocuments = Literal["file", "paragraph", "line"]
"""Unit of a row in text files: the file, a paragraph (lines up to a blank one), or a line."""


def _describe_encoding(where: str, offset: int, first_bytes: bytes) -> Problem:
    """Return the problem of a byte that is not UTF-8; ``offset`` is its 0-based position in the file."""
    kind = "UTF-16" if first_bytes[:2] in _UTF16 else "in another encoding"
    found = f"not UTF-8 at byte {offset:,}"
    return Problem(where, found, f"the file may be {kind}: convert it to UTF-8 (iconv, or re-save it)")


class BrokenLine(str):
    """Placeholder for an unreadable line: its text with replacement characters, and the problem.

    Attributes:
        problem: The problem of the line.
    """

    problem: Problem


def enumerate_lines(file: BufferedReader, name: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its 1-based number, decoded, with its line end, and without a byte order mark.

    A line that is not UTF-8, or longer than ``MAX_LINE_BYTES``, is a ``BrokenLine``; reading continues after it.

    Raises:
        DataError: The file is UTF-16.
    """
    number, offset = 0, 0
    # One byte more than the limit, which shows whether the line exceeds it.
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
                problem = _describe_encoding(where, offset + error.start, raw if number == 1 else b"")
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
    r"""Yield one row per document, numbered by its first line; documents of white space only are skipped.

    Lines end at ``\n`` or ``\r\n``, not at other Unicode line breaks. The line end after a line or paragraph is
    removed; a whole file is unchanged.

    Raises:
        DataError: The file cannot be read further.
    """
    lines = enumerate_lines(file, name)
    rows = lines if documents == "line" else _join_lines(lines, ends_at_blank=documents == "paragraph")
    for number, text in rows:
        if isinstance(text, BrokenLine):
            yield text.problem
        elif text and not text.isspace():
            text = text if documents == "file" else text.rstrip("\r\n")
            yield RawRow(f"{name}:{number}", number, {"text": text})


def _join_lines(lines: Iterator[tuple[int, str]], *, ends_at_blank: bool) -> Iterator[tuple[int, str]]:
    """Yield documents of joined lines, with the number of the first line: the whole file, or paragraphs.

    A document with an unreadable line is that ``BrokenLine``.
    """
    joined: list[str] = []
    first = size = 0
    broken: BrokenLine | None = None
    for number, line in lines:
        is_end = ends_at_blank and line.isspace() and not isinstance(line, BrokenLine)
        num_bytes = count_bytes(line)
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


WRAPPERS: Final = ("data", "rows", "examples", "instances", "train")
"""Keys of a JSON document that may hold the list of rows."""

_BLANK: Final = re.compile(r"[ \t\r\n]*")

Line = tuple[int, str]


def read_json(file: BufferedReader, name: str, *, may_be_document: bool) -> Iterator[Entry]:
    """Yield the rows of a JSON file: an array, one object per line, or one document; its first bytes decide.

    A row may be a list of messages, without a column.

    Args:
        file: The opened file.
        name: Name of the file in errors.
        may_be_document: Whether a file that begins with ``{`` may be a single object over several lines, as in
            ``.json`` files. It is read into memory; JSON Lines are not.

    Raises:
        DataError: The file cannot be read further.
    """
    # A larger buffer: the first chat may be longer than the usual 8 KiB.
    file = BufferedReader(file, 1 << 20)
    start = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()
    # No JSON document has a line end between brackets, so that these are lines with an array each.
    if start.startswith(b"[") and not re.search(rb"\]\r?\n\[", start):
        yield from _read_array(file, name)
        return
    lines: Iterator[Line] = enumerate_lines(file, name)
    if may_be_document:
        head = _take_two(lines)
        lines = chain(head, lines)
        if _is_document(head):
            yield from _read_document(lines, name)
            return
    yield from read_json_lines(lines, name)


def read_json_lines(lines: Iterable[Line], name: str) -> Iterator[Entry]:
    """Yield the rows of JSON Lines, of which the first may be any line of a file.

    Args:
        lines: Lines of ``enumerate_lines``.
        name: Name of the file in errors.
    """
    for number, line in lines:
        if isinstance(line, BrokenLine):
            yield line.problem
            continue
        if not line or line.isspace():
            continue
        try:
            # Without its line end, after which an error would be in column 1.
            value = _DECODER.decode(line.rstrip())
        except (ValueError, RecursionError) as error:
            yield Problem(f"{name}:{number}", _explain(error), _LINE_REMEDY)
        else:
            yield _to_entry(value, f"{name}:{number}", number)


def _read_document(lines: Iterable[Line], name: str) -> Iterator[Entry]:
    written = [line for _, line in lines]
    if broken := next((line for line in written if isinstance(line, BrokenLine)), None):
        raise DataError(broken.problem)
    text = "".join(written)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        where = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
        raise DataError(Problem(where, _explain(error), _DOCUMENT_REMEDY)) from None
    wrapped = [key for key in WRAPPERS if isinstance(value, dict) and isinstance(value.get(key), list)]
    if not wrapped and _is_table(value):
        found = "is one object of all rows or columns, as pandas writes by default"
        raise DataError(
            Problem(name, found, 'write rows, as pandas\' `to_json(path, orient="records", lines=True)` does')
        )
    rows = value[wrapped[0]] if len(wrapped) == 1 else [value]
    for index, row in enumerate(rows):
        yield _to_entry(row, f"{name} row {index}", index)


def _is_table(value: object) -> bool:
    """Return whether a value is a table in one object: of rows or columns with the same keys, or of lists as long."""
    parts = list(value.values()) if isinstance(value, dict) else []
    if len(parts) > 1 and all(isinstance(part, list) for part in parts):
        # The lists of a single chat have objects.
        return len(set(map(len, parts))) == 1 and not any(isinstance(item, dict) for part in parts for item in part)
    are_alike = all(isinstance(part, dict) for part in parts) and len(set(map(frozenset, parts))) == 1
    # A single column has row numbers as keys.
    return are_alike and (len(parts) > 1 or all(map(str.isdigit, parts[0])))


def _read_array(file: BufferedReader, name: str) -> Iterator[Entry]:
    """Decode the elements of an array one by one, so that rows before an error are read, and errors have a line."""
    try:
        # The bytes, as many again, are not kept while the rows are read.
        text = file.read().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"{name}:{error.object.count(bytes([10]), 0, error.start) + 1}"
        raise DataError(_describe_encoding(where, error.start, b"")) from None

    def skip_blank(at: int) -> int:
        blank = _BLANK.match(text, at)
        return blank.end() if blank else at

    at, index = skip_blank(skip_blank(0) + 1), 0
    try:
        while index or text[at : at + 1] != "]":
            value, at = _DECODER.raw_decode(text, at)
            yield _to_entry(value, f"{name} row {index}", index)
            at, index = skip_blank(at), index + 1
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                found = "the array is not closed" if at == len(text) else "expected `,` or `]`"
                raise json.JSONDecodeError(found, text, at)
            at = skip_blank(at + 1)
        at = skip_blank(at + 1)
        if at < len(text):
            raise json.JSONDecodeError("text after the array", text, at)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else text.count("\n", 0, at) + 1
        raise DataError(Problem(f"{name}:{line}", _explain(error), _DOCUMENT_REMEDY)) from None


def _take_two(lines: Iterator[Line]) -> list[Line]:
    """Take lines up to and including the second non-blank one."""
    taken, filled = [], 0
    while filled < 2 and (line := next(lines, None)):
        taken.append(line)
        filled += not line[1].isspace()
    return taken


def _is_document(head: list[Line]) -> bool:
    """Return whether the leading lines, at most two of them non-blank, start a document rather than JSON Lines."""
    filled = [line for _, line in head if not line.isspace()]
    if any(isinstance(line, BrokenLine) for line in filled):
        return filled[0].strip() in ("{", "[")
    if len(filled) == 2:
        try:
            _DECODER.decode(filled[0])
        except (ValueError, RecursionError):
            return True
    return len(filled) == 1


def _to_entry(value: object, where: str, index: int) -> Entry:
    if isinstance(value, dict):
        return RawRow(where, index, value)
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return RawRow(where, index, {"messages": value})
    return Problem(where, f"the row is {describe(value)}, not an object", "write each row as {column: value}")


def _explain(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON at column {error.colno}: {error.msg}"
    return f"invalid JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}"


def _find_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once, or ``None``."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # `json` silently keeps the last of several equal keys.
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError(f"the key {_find_repeated(key for key, _ in pairs)!r} occurs twice in an object")
    return built


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_build_object)
_LINE_REMEDY: Final = "write one JSON object a line, as json.dumps(row) does, and no comments"
_DOCUMENT_REMEDY: Final = "write the file with json.dump(rows, file), or one JSON object a line; JSON has no comments"


_MAX_CELL_CHARACTERS: Final = 1 << 28  # The default of the csv module, 131,072, is less than a long document.
_DELIMITER: Final = re.compile(r'"?sep=(.)"?\s*')
_BATCH_ROWS: Final = 32
"""Arrow rows converted at once. Measured with rows of 1 MB: 1,024 take twice the memory of 32, and the same time."""
_BUFFER_BYTES: Final = 1 << 20
"""Bytes of a column of Parquet that are read at once."""
_ARROW_FILE: Final = b"ARROW1"
"""Magic bytes of the Arrow file format; the stream format has none."""


def read_csv(file: BufferedReader, name: str, *, delimiter: str) -> Iterator[Entry]:
    """Yield the rows of a table whose first line has the column names; every cell is a string, also an empty one.

    A header without commas determines the delimiter by its most frequent character of ``;``, tab and ``|``; a line such
    as ``sep=;`` before it, which Excel reads, names it. Columns without a name, such as pandas' index, are named
    ``Unnamed: 0`` and so on, as by pandas and ``datasets``.

    Raises:
        DataError: The header repeats a column, or the file cannot be read further.
    """
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    broken: list[Problem] = []
    lines = _note_broken(enumerate_lines(file, name), broken)
    head = next(lines, "")
    if declared := _DELIMITER.fullmatch(head):
        delimiter, head = declared[1], "\n"  # A blank line, so that lines are counted.
    elif delimiter == "," and "," not in head:
        delimiter = max(",;\t|", key=head.count)
    # Without `strict`, an unclosed quote silently puts the rest of the file into one cell.
    reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    number = 1
    try:
        for cells in reader:
            if broken:
                yield broken[0]
                broken.clear()
            elif not cells:  # a blank line
                pass
            elif columns is None:
                columns = [cell or f"Unnamed: {at}" for at, cell in enumerate(cells)]
                _check_header(columns, f"{name}:{number}")
            elif len(cells) == len(columns):
                yield RawRow(f"{name}:{number}", number, dict(zip(columns, cells, strict=True)))
            else:
                yield Problem(f"{name}:{number}", f"{len(cells)} cells under {len(columns)} columns", _QUOTING)
            number = reader.line_num + 1
    except csv.Error as error:
        found = f"invalid CSV in the row that begins here: {error}"
        raise DataError(Problem(f"{name}:{number}", found, _QUOTING)) from None


def _note_broken(lines: Iterator[tuple[int, str]], broken: list[Problem]) -> Iterator[str]:
    """Yield the lines, and append the problems of unreadable ones to ``broken``: a row can span several lines."""
    for number, line in lines:
        if isinstance(line, BrokenLine):
            if number == 1:
                raise DataError(line.problem)
            broken.append(line.problem)
        yield line


def _check_header(columns: list[str], where: str) -> None:
    if (repeated := _find_repeated(columns)) is not None:
        raise DataError(Problem(where, f"two columns are named `{repeated}`", "give each column its own name"))


def is_disk_failure(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the operating system raised the error; codecs and pyarrow raise ``OSError`` without a number."""
    return isinstance(error, OSError) and error.errno is not None


def read_parquet(file: BufferedReader, name: str, groups: range | None = None) -> Iterator[Entry]:
    """Yield the rows of a Parquet file, read in batches, with values converted by ``spell_as_json``.

    Args:
        file: The opened file.
        name: Name of the file in errors.
        groups: Range of row groups to read; ``None`` for all.

    Raises:
        DataError: The file cannot be read further.
        OSError: The disk failed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _refuse_damage(name, "Parquet", "write or download it again"):
        # A compressed file has no random access, and is read into memory.
        source = file if file.seekable() else pa.BufferReader(file.read())
        # By default, all columns of a row group are read at once, which can have gigabytes.
        table = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        groups = range(table.num_row_groups) if groups is None else groups
        batches = table.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(groups))
        # Rows are numbered from the start of the file, whichever groups are read.
        first = sum(table.metadata.row_group(at).num_rows for at in range(groups.start))
        yield from _convert_batches(batches, table.schema_arrow, name, first)


def read_arrow(file: BufferedReader, name: str) -> Iterator[Entry]:
    """Yield the rows of an Arrow file, in the stream format (as ``datasets`` writes) or the file format.

    Values are converted by ``spell_as_json``.

    Raises:
        DataError: The file cannot be read further.
        OSError: The disk failed.
    """
    import pyarrow as pa

    with _refuse_damage(name, "Arrow", "write it again, with `save_to_disk` or pyarrow"):
        is_stream = file.peek(len(_ARROW_FILE))[: len(_ARROW_FILE)] != _ARROW_FILE
        # The file format has its index at the end; a compressed file has no random access and is read into memory.
        reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(pa.py_buffer(file.read()))
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from _convert_batches(batches, reader.schema, name)


@contextmanager
def _refuse_damage(name: str, kind: str, remedy: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError, LookupError, MemoryError) as error:
        if is_disk_failure(error):
            raise
        reason = str(error).partition("\n")[0] or "it states a length beyond the memory"
        raise DataError(Problem(name, f"not a whole {kind} file: {reason}", remedy)) from None


def _convert_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, name: str, index: int = 0
) -> Iterator[Entry]:
    """Yield the rows of Arrow batches, numbered from ``index``."""
    _check_header(schema.names, name)
    decode = _find_decoder(schema)
    for batch in batches:
        # pyarrow trusts offsets unless asked to validate them; those of a damaged file read out of bounds or crash.
        batch.validate(full=True)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for columns in batch.slice(start, _BATCH_ROWS).to_pylist():
                yield RawRow(f"{name} row {index}", index, spell_as_json(decode(columns)))
                index += 1


def _find_decoder(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the decoder of a row: the feature ``Json`` of ``datasets``, for objects of mixed types, is stored as text.

    Images and sound are not decoded, which would need further packages.
    """
    if "arrow.json" not in str(schema):  # Importing `datasets` is slow.
        return lambda columns: columns
    import datasets

    features = datasets.Features.from_arrow_schema(schema)
    encoded = datasets.Features({name: feature for name, feature in features.items() if "Json(" in repr(feature)})
    return lambda columns: columns | encoded.decode_example({name: columns[name] for name in encoded})


def spell_as_json(value: Any) -> Any:
    """Convert an Arrow value to the value that a JSON file would have.

    Null fields of structs are removed, because in Arrow every struct has the fields of all rows. Dates and times become
    ISO 8601 strings, decimals numbers. pyarrow gives maps, which Spark writes for objects, as lists of tuples.
    """
    if isinstance(value, dict):
        return {key: spell_as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return spell_as_json(dict(value))
        return [spell_as_json(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    return value.isoformat() if isinstance(value, date | time) else value


_QUOTING: Final = 'quote cells that hold the delimiter, a quote or a line end: "like, this", with "" for a quote'
