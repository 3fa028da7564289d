"""Tables give the rows that other readers give."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, date, datetime, time
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.sources.readers import read_csv, read_parquet, spell_as_json
from recipes_lib.data.sources.rows import RawRow

CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


def open_bytes(content: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]


@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=5), delimiter=st.sampled_from([",", "\t"]), mark=st.booleans())
def test_a_table_reads_as_it_was_written(rows: list[tuple[str, str]], delimiter: str, mark: bool) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "completion"), *rows])
    content = text.getvalue().encode("utf-8-sig" if mark else "utf-8")
    entries = list(read_csv(open_bytes(content), "d.csv", delimiter=delimiter))
    assert [tuple(entry.columns.values()) for entry in entries if isinstance(entry, RawRow)] == rows


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ('prompt;completion\n"a, b";c\n', {"prompt": "a, b", "completion": "c"}),
        ("prompt\tcompletion\na, b\tc\n", {"prompt": "a, b", "completion": "c"}),
        ("prompt|completion\r\na, b|c\r\n", {"prompt": "a, b", "completion": "c"}),
        ("text\na; b\n", {"text": "a; b"}),
        ('"a;b",text\n1,2\n', {"a;b": "1", "text": "2"}),
        (",text\n0,a\n", {"Unnamed: 0": "0", "text": "a"}),
        ("text,\na,\n", {"text": "a", "Unnamed: 1": ""}),
    ],
)
def test_the_first_line_says_what_delimits_cells_and_pandas_calls_nameless_columns(
    content: str, columns: dict[str, str]
) -> None:
    (entry,) = read_csv(open_bytes(content.encode()), "d.csv", delimiter=",")
    assert isinstance(entry, RawRow)
    assert entry.columns == columns
    separator = next((each for each in ",;\t|" if each in content.partition("\n")[0].replace("a;b", "")), ",")
    (theirs,) = pd.read_csv(io.StringIO(content), sep=separator, dtype=str, keep_default_na=False).to_dict("records")
    assert entry.columns == theirs


def test_a_row_has_the_line_it_begins_on() -> None:
    content = b'prompt,completion\n\na,"b\nb"\nc,d\n'
    entries = [entry for entry in read_csv(open_bytes(content), "d.csv", delimiter=",") if isinstance(entry, RawRow)]
    assert [(entry.index, entry.columns["prompt"]) for entry in entries] == [(3, "a"), (5, "c")]


def test_a_long_document_fits_in_a_cell() -> None:
    (entry,) = read_csv(open_bytes(b"text\n" + b"a" * 500_000), "d.csv", delimiter=",")
    assert isinstance(entry, RawRow)
    assert len(entry.columns["text"]) == 500_000


def test_parquet_is_read_in_order_across_batches() -> None:
    file = io.BytesIO()
    rows: list[dict[str, Any]] = [{"text": str(n), "extra": {"a": n}} for n in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=700)
    entries = [entry for entry in read_parquet(open_bytes(file.getvalue()), "d.parquet") if isinstance(entry, RawRow)]
    assert [entry.columns for entry in entries] == rows
    assert [entry.index for entry in entries] == list(range(2500))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": None, "b": 0, "c": "", "d": []}, {"b": 0, "c": "", "d": []}),
        ({"a": [{"b": None, "c": {"d": None}}]}, {"a": [{"c": {}}]}),
        ([None, 1], [None, 1]),
    ],
)
def test_null_keys_go_and_nothing_else(value: object, expected: object) -> None:
    assert spell_as_json(value) == expected


def test_a_table_with_dates_is_read_as_its_rows_written_in_json() -> None:
    said = {"role": "user", "content": "Hi", "timestamp": datetime(2024, 5, 1, 12, 30, tzinfo=UTC)}
    rows: list[dict[str, Any]] = [{"messages": [said], "day": date(2024, 5, 1), "at": time(12, 30)}]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    (entry,) = read_parquet(open_bytes(file.getvalue()), "d.parquet")
    assert isinstance(entry, RawRow)
    written = json.dumps(rows, default=lambda value: value.isoformat())
    assert [entry.columns] == json.loads(written)
