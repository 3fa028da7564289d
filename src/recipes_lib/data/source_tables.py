"""CSV, TSV and Parquet files to rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import date, time
from io import BufferedReader
from typing import Any, Final

from recipes_lib.data.source_rows import Entry, RawRow
from recipes_lib.data.source_text import BrokenFileError, enumerate_lines
from recipes_lib.errors import Problem

_MAX_CELL_CHARACTERS: Final = 1 << 28  # the csv module's own limit of 131,072 is below a long document
_BATCH_ROWS: Final = 1024


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
