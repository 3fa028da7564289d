"""CSV, TSV, Parquet and Arrow files to rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from datetime import date, time
from io import BufferedReader
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.data.sources.text_lines import BrokenFileError, enumerate_lines
from recipes_lib.errors import Problem

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_CELL_CHARACTERS: Final = 1 << 28  # the csv module's own limit of 131,072 is below a long document
_BATCH_ROWS: Final = 1024
_ARROW_FILE: Final = b"ARROW1"
"""What an Arrow file begins with, and a stream does not."""


def read_csv(file: BufferedReader, name: str, *, delimiter: str) -> Iterator[Entry]:
    """Read a table whose first line names the columns; every cell is text, empty cells too.

    Raises:
        BrokenFileError: The header is not usable, or what follows cannot be read.
    """
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    lines = (line for _, line in enumerate_lines(file, name))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    number = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            found = f"invalid CSV in the row that begins here: {error}"
            raise BrokenFileError(Problem(f"{name}:{number}", found, _QUOTING)) from None
        if cells is None:
            return
        if not cells:  # a blank line
            pass
        elif columns is None:
            columns = cells
            _check_header(columns, f"{name}:{number}")
        elif len(cells) == len(columns):
            yield RawRow(name, number, "line", dict(zip(columns, cells, strict=True)))
        else:
            yield Problem(f"{name}:{number}", f"{len(cells)} cells under {len(columns)} columns", _QUOTING)
        number = reader.line_num + 1


def _check_header(columns: list[str], where: str) -> None:
    repeated = next((column for column in columns if columns.count(column) > 1), None)
    if "" in columns or repeated is not None:
        found = f"two columns are named `{repeated}`" if repeated else f"column {columns.index('') + 1} has no name"
        raise BrokenFileError(Problem(where, found, "name each column once in the first line"))


def read_parquet(file: BufferedReader, name: str) -> Iterator[Entry]:
    """Read a Parquet file a batch at a time, its values as ``spell_as_json`` has them.

    Raises:
        BrokenFileError: What follows cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        _check_header(table.schema_arrow.names, name)
        index = 0
        for batch in table.iter_batches(batch_size=_BATCH_ROWS):
            for columns in batch.to_pylist():
                yield RawRow(name, index, "row", spell_as_json(columns))
                index += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        found = f"not a whole Parquet file: {str(error).partition(chr(10))[0]}"
        raise BrokenFileError(Problem(name, found, "write or download it again")) from None


def read_arrow(file: BufferedReader, name: str) -> Iterator[Entry]:
    """Read an Arrow file, a stream as ``datasets`` writes it or a file as others do, as ``read_parquet`` reads.

    Raises:
        BrokenFileError: What follows cannot be read.
    """
    import pyarrow as pa

    try:
        is_stream = file.peek(len(_ARROW_FILE))[: len(_ARROW_FILE)] != _ARROW_FILE
        # A file has its index at the end, so that one that is compressed is held in memory.
        reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(pa.py_buffer(file.read()))
        _check_header(reader.schema.names, name)
        decode = _find_decoder(reader.schema)
        index = 0
        for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for columns in batch.slice(start, _BATCH_ROWS).to_pylist():
                    yield RawRow(name, index, "row", spell_as_json(decode(columns)))
                    index += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        found = f"not a whole Arrow file: {str(error).partition(chr(10))[0]}"
        raise BrokenFileError(Problem(name, found, "write it again, with `save_to_disk` or pyarrow")) from None


def _find_decoder(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What turns stored values into those of the dataset: ``datasets`` keeps JSON of any shape as text, for one."""
    if b"huggingface" not in (schema.metadata or {}):
        return lambda columns: columns
    import datasets

    features = datasets.Features.from_arrow_schema(schema)
    return lambda columns: dict(features.decode_example(columns))


def spell_as_json(value: Any) -> Any:
    """Return an Arrow value as a JSON file would have it.

    An object's null keys are dropped, for Arrow gives all rows the keys that any row has; dates and times are ISO text.
    """
    if isinstance(value, dict):
        return {key: spell_as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [spell_as_json(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value


_QUOTING: Final = 'quote cells that hold the delimiter, a quote or a line end: "like, this", with "" for a quote'
