"""Readers of JSON, CSV, Parquet and text files, against ``json``, ``csv``, pandas and ``datasets``."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import json
import math
import random
import tracemalloc
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes_lib.data.sources import readers
from recipes_lib.data.sources.readers import (
    TextDocuments,
    read_arrow,
    read_csv,
    read_json,
    read_parquet,
    read_text,
    spell_as_json,
)
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), min_size=1, max_size=6)


def read(content: bytes, *, may_be_document: bool = True) -> list[Entry]:
    return list(read_json(open_bytes(content), "d.json", may_be_document=may_be_document))


def columns(entries: list[Entry]) -> list[dict[str, Any]]:
    assert all(isinstance(entry, RawRow) for entry in entries)
    return [entry.columns for entry in entries if isinstance(entry, RawRow)]


@settings(max_examples=40)
@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), mark=st.booleans())
def test_json_array_rows_equal_elements(rows, indent, ascii_only, mark) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    entries = read(text.encode("utf-8-sig" if mark else "utf-8"))
    assert columns(entries) == rows
    assert [entry.index for entry in entries if isinstance(entry, RawRow)] == list(range(len(rows)))


@settings(max_examples=40)
@given(rows=ROWS, end=st.sampled_from(["\n", "\r\n", "\n\n \n"]), mark=st.booleans(), may_be_document=st.booleans())
@example(rows=[{"text": "é\u2028\x85\x0b"}] * 2, end="\n", mark=False, may_be_document=True)
def test_json_lines_rows_equal_objects(rows: list[dict[str, Any]], end: str, mark: bool, may_be_document: bool) -> None:
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
    content = text.encode("utf-8-sig" if mark else "utf-8")
    if len(rows) > 1 or not may_be_document:
        assert columns(read(content, may_be_document=may_be_document)) == rows


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("wrapper", readers.WRAPPERS)
def test_wrapped_json_list_rows_equal_elements(wrapper: str, indent: int | None) -> None:
    content = {"version": 1, wrapper: [{"text": "a"}, {"text": "b"}]}
    assert columns(read(json.dumps(content, indent=indent).encode())) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("may_be_document", [True, False])
@pytest.mark.parametrize(("start", "between", "end"), [("[", ",\n", "]"), ("", "\n", ""), ("", "\r\n", "\n")])
def test_row_may_be_a_list_of_messages(start: str, between: str, end: str, may_be_document: bool) -> None:
    chats = [
        [{"role": "user", "content": "]\n["}, {"role": "assistant", "content": str(number)}] for number in range(3)
    ]
    text = start + between.join(map(json.dumps, chats)) + end
    found = columns(read(text.encode(), may_be_document=may_be_document))
    assert found == [{"messages": chat} for chat in chats]


def test_lines_of_long_lists_are_not_read_as_an_array() -> None:
    chats = [[{"role": "user", "content": "a" * 100_000}, {"role": "assistant", "content": "b"}]] * 2
    content = "\n".join(map(json.dumps, chats)).encode()
    assert columns(read(content, may_be_document=False)) == [{"messages": chat} for chat in chats]


@pytest.mark.parametrize("names", [["question", "answer"], ["text"]])
@pytest.mark.parametrize("orient", ["columns", "index", "list"])
def test_table_of_pandas_is_refused_with_its_way_out(orient: Any, names: list[str]) -> None:
    """``columns`` is the default of ``to_json``; as one row, it would be an error with all row numbers."""
    frame = pd.DataFrame({name: ["a", "b"] for name in ("id", *names)})
    table = json.dumps(frame.to_dict("list")) if orient == "list" else frame.to_json(orient=orient)
    with pytest.raises(DataError, match='orient="records", lines=True'):
        read(table.encode())
    with pytest.raises(DataError, match="orient="):
        read(frame[names].to_json().encode())
    assert columns(read(frame.to_json(orient="records", lines=True).encode())) == frame.to_dict("records")
    chat = {"messages": [{"role": "user"}] * 2, "tools": ["a", "b"]}
    for row in ({"question": {"text": "a"}, "answer": {"value": "b"}}, {"chat": {"messages": []}}, chat):
        assert columns(read(json.dumps(row).encode())) == [row]


@pytest.mark.parametrize(
    ("broken", "offset"),
    [('{"text" 3}', 8), ('{"text": nul}', 9), ("", 0), ('{"text": "a', 9), ('{"text": 1} {"text": 2}', 12), ("]", 0)],
)
@pytest.mark.parametrize("num_rows", [1, 4])
def test_array_error_has_line_and_column_and_keeps_earlier_rows(broken: str, offset: int, num_rows: int) -> None:
    text = "[" + ",\n ".join(['{"text": "é"}'] * num_rows) + f",\n {broken}]"
    entries = read_json(open_bytes(text.encode()), "d.json", may_be_document=True)
    assert columns([next(entries) for _ in range(num_rows)]) == [{"text": "é"}] * num_rows
    with pytest.raises(DataError) as caught:
        list(entries)
    assert caught.value.problems[0].where == f"d.json:{num_rows + 1}"
    assert f"at column {offset + 2}: " in caught.value.problems[0].found


@pytest.mark.parametrize(
    ("row", "found"), [('{"a": 1,\n "a": 2}', "the key 'a' occurs twice"), ("[" * 99_999, "nested too deeply")]
)
def test_repeated_key_and_deep_nesting_name_line(row: str, found: str) -> None:
    with pytest.raises(DataError) as caught:
        read(f'[{{"text": "a"}},\n\n {row}]'.encode())
    assert (caught.value.problems[0].where, found in caught.value.problems[0].found) == ("d.json:3", True)


@pytest.mark.parametrize("is_array", [True, False])
def test_nan_and_infinity_are_read(is_array: bool) -> None:
    row = json.dumps({"text": "a", "score": math.nan, "least": -math.inf})
    (found,) = columns(read((f"[{row}]" if is_array else f"{row}\n").encode(), may_be_document=is_array))
    assert math.isnan(found.pop("score"))
    assert found == {"text": "a", "least": -math.inf}


@pytest.mark.parametrize("is_array", [True, False])
def test_memory_is_independent_of_num_json_rows(is_array: bool, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    row = json.dumps({"text": "word " * 1000})
    path.write_text(f"[{','.join([row] * 4_200)}]" if is_array else f"{row}\n" * 4_200)
    size = path.stat().st_size
    tracemalloc.start()
    with path.open("rb") as file:
        assert sum(1 for _ in read_json(file, "d.json", may_be_document=True)) == 4_200
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 20 << 20
    assert peak < (6 << 20) + 2 * size * is_array


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=5), delimiter=st.sampled_from([",", "\t"]), mark=st.booleans())
def test_csv_round_trip(rows: list[tuple[str, str]], delimiter: str, mark: bool) -> None:
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
def test_csv_delimiter_and_unnamed_columns_agree_with_pandas(content: str, columns: dict[str, str]) -> None:
    (entry,) = read_csv(open_bytes(content.encode()), "d.csv", delimiter=",")
    assert isinstance(entry, RawRow)
    assert entry.columns == columns
    separator = next((each for each in ",;\t|" if each in content.partition("\n")[0].replace("a;b", "")), ",")
    (theirs,) = pd.read_csv(io.StringIO(content), sep=separator, dtype=str, keep_default_na=False).to_dict("records")
    assert entry.columns == theirs


@pytest.mark.parametrize("declaration", ["sep=;\r\n", '"sep=;"\n', "\ufeffsep=;\n"])
def test_csv_delimiter_may_be_declared_in_first_line(declaration: str) -> None:
    """The declaration, as Excel reads it, decides: another character is more frequent in the header."""
    content = f"{declaration}prompt|id;completion|id\na;b\n".encode()
    assert list(read_csv(open_bytes(content), "d.csv", delimiter=",")) == [
        RawRow("d.csv:3", 3, {"prompt|id": "a", "completion|id": "b"})
    ]


def test_csv_cell_holds_long_document() -> None:
    (entry,) = read_csv(open_bytes(b"text\n" + b"a" * 500_000), "d.csv", delimiter=",")
    assert isinstance(entry, RawRow)
    assert len(entry.columns["text"]) == 500_000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": None, "b": 0, "c": "", "d": []}, {"b": 0, "c": "", "d": []}),
        ({"a": [{"b": None, "c": {"d": None}}]}, {"a": [{"c": {}}]}),
        ([None, 1], [None, 1]),
        ({"a": Decimal("0.50")}, {"a": 0.5}),
        ([[("role", "user"), ("content", "a"), ("name", None)]], [{"role": "user", "content": "a"}]),
    ],
)
def test_spell_as_json_removes_only_null_fields_and_converts_decimals(value: object, expected: object) -> None:
    assert json.dumps(spell_as_json(value)) == json.dumps(expected)


class _FailingDisk(io.BytesIO):
    """A file of which only the first bytes can be read."""

    def readinto(self, buffer: Any) -> int:
        if self.tell():
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(buffer)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_failure_of_the_disk_is_not_damaged_data(kind: str) -> None:
    table, sink = pa.table({"text": ["one"] * 1000}), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    reader = read_parquet if kind == "parquet" else read_arrow
    with pytest.raises(OSError, match="Input/output error"):
        list(reader(io.BufferedReader(_FailingDisk(sink.getvalue()), 64), kind))  # type: ignore[type-var]


def test_parquet_row_group_is_not_read_at_once(tmp_path: Path) -> None:
    texts = [random.Random(at).randbytes(1 << 15).hex() for at in range(128)]
    pages = {"use_dictionary": False, "data_page_size": 1 << 16, "write_batch_size": 1}
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet", **pages)
    sizes = []

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            sizes.append(len(memoryview(buffer)))
            return super().readinto(buffer)

    with io.BufferedReader(Counted(tmp_path / "d.parquet")) as file:
        assert next(read_parquet(file, "d.parquet")).columns == {"text": texts[0]}
        assert sum(sizes) < file.seek(0, io.SEEK_END) / 2


def test_parquet_dates_are_read_as_iso_strings() -> None:
    turn = {"role": "user", "content": "Hi", "timestamp": datetime(2024, 5, 1, 12, 30, tzinfo=UTC)}
    rows: list[dict[str, Any]] = [{"messages": [turn], "day": date(2024, 5, 1), "at": time(12, 30)}]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    (entry,) = read_parquet(open_bytes(file.getvalue()), "d.parquet")
    assert isinstance(entry, RawRow)
    written = json.dumps(rows, default=lambda value: value.isoformat())
    assert [entry.columns] == json.loads(written)


def read_documents(content: bytes, documents: TextDocuments) -> list[tuple[int, str]]:
    entries = [entry for entry in read_text(open_bytes(content), "d", documents) if isinstance(entry, RawRow)]
    return [(entry.index, entry.columns["text"]) for entry in entries]


def open_bytes(content: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]


LINES = ["To be,", "  or not to be", "", "é\u2028\x85\x0b same line ", " \t", "that is"]
FILES = ["one\n", "\n\n  one\r\n\r\ntwo\n\n", "a\n" * 1000, "no end", "\u2028\x85 é\x0b"]


@pytest.mark.parametrize(
    ("documents", "options", "contents"),
    [
        ("line", {}, ["\n".join(LINES), "\r\n".join(LINES)]),
        ("paragraph", {"sample_by": "paragraph"}, ["To be,\n  or not to be\n\nthat is\n\nthe question"]),
        ("file", {"sample_by": "document", "keep_linebreaks": True}, FILES),
    ],
)
def test_documents_of_text_files_agree_with_datasets(documents, options, contents, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.encode())
    files = {"data_files": list(map(str, paths)), "cache_dir": str(tmp_path / "cache")}
    theirs = datasets.load_dataset("text", **files, **options, split="train")
    ours = [text for content in contents for _, text in read_documents(content.encode(), documents)]
    assert [text.replace("\r\n", "\n") for text in ours] == [text for text in theirs["text"] if text.strip()]


@pytest.mark.parametrize(("documents", "expected"), [("line", "a :2 c d"), ("paragraph", ":2 d"), ("file", ":2")])
def test_unreadable_line_breaks_only_its_document(documents, expected, monkeypatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 8)
    for broken in (b"b\xff", b"longer than eight bytes by far"):
        entries = read_text(open_bytes(b"a\n" + broken + b"\nc\n\nd\n"), "d", documents)
        found = [entry.columns["text"] if isinstance(entry, RawRow) else entry.where[1:] for entry in entries]
        assert found == expected.split()


def test_unreadable_csv_row_breaks_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 12)
    content = b'x,y\n1,2\n3,\xff\n"a\nb\xff",c\n' + b"4" * 40 + b"\n5,6\n"
    entries = list(readers.read_csv(open_bytes(content), "d", delimiter=","))
    found = [entry.index if isinstance(entry, RawRow) else entry.where for entry in entries]
    assert found == [2, "d:3", "d:5", "d:6", 7]


def test_blank_lines_separate_paragraphs_located_by_first_line() -> None:
    content = b"\xef\xbb\xbf\n \t\nfirst\r\n  goes on\r\n\r\n\n\x0c\n second \n\n"
    assert read_documents(content, "paragraph") == [(3, "first\r\n  goes on"), (8, " second ")]
    assert read_documents(content, "file") == [(1, content.decode().removeprefix("\ufeff"))]
    assert read_documents(content, "line") == [(3, "first"), (4, "  goes on"), (8, " second ")]


@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t\n"])
def test_blank_file_has_no_documents(documents: TextDocuments, content: bytes) -> None:
    assert read_documents(content, documents) == []


@pytest.mark.parametrize("documents", ["file", "paragraph"])
def test_long_document_is_split_at_line_ends(documents: TextDocuments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 24)
    content = "zwölf ä\n" * 7 + "a line that is longer than a document may be\n" + "b\n" * 20
    pieces = read_documents(content.encode(), documents)
    assert "\n".join(text.rstrip("\n") for _, text in pieces) == content.rstrip("\n")
    lines = content.splitlines()
    for number, text in pieces:
        assert lines[number - 1 : number - 1 + len(text.splitlines())] == text.splitlines()
        assert len(text.encode()) <= 24 or text.rstrip("\n") == lines[7]
    for (_, text), (number, _) in itertools.pairwise(pieces):
        with_next_line = text.rstrip("\n") + "\n" + lines[number - 1] + "\n"
        assert len(with_next_line.encode()) > 24, "no piece is shorter than it must be"


def test_document_is_read_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 100)
    file = open_bytes(b"nine chars\n" * 100_000)
    next(read_text(file, "d", "file"))
    assert file.tell() < 200
