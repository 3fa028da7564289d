"""JSON files of every layout give the rows that the json module gives."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_lib.data.sources import readers as source_json
from recipes_lib.data.sources.readers import read_json
from recipes_lib.data.sources.rows import Entry, RawRow
from recipes_lib.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), min_size=1, max_size=6)


def read(content: bytes, *, may_be_document: bool = True) -> list[Entry]:
    return list(read_json(io.BufferedReader(io.BytesIO(content)), "d.json", may_be_document=may_be_document))  # type: ignore[arg-type]


def columns(entries: list[Entry]) -> list[dict[str, Any]]:
    assert all(isinstance(entry, RawRow) for entry in entries)
    return [entry.columns for entry in entries if isinstance(entry, RawRow)]


@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), mark=st.booleans())
def test_an_array_is_its_elements(rows: list[dict[str, Any]], indent: int | None, ascii_only: bool, mark: bool) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    entries = read(text.encode("utf-8-sig" if mark else "utf-8"))
    assert columns(entries) == rows
    assert [entry.index for entry in entries if isinstance(entry, RawRow)] == list(range(len(rows)))


@given(rows=ROWS, end=st.sampled_from(["\n", "\r\n", "\n\n \n"]), mark=st.booleans(), may_be_document=st.booleans())
def test_lines_are_their_objects(rows: list[dict[str, Any]], end: str, mark: bool, may_be_document: bool) -> None:
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
    content = text.encode("utf-8-sig" if mark else "utf-8")
    if len(rows) > 1 or not may_be_document:
        assert columns(read(content, may_be_document=may_be_document)) == rows


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("wrapper", source_json.WRAPPERS)
def test_a_wrapped_list_is_its_elements(wrapper: str, indent: int | None) -> None:
    content = {"version": 1, wrapper: [{"text": "a"}, {"text": "b"}]}
    assert columns(read(json.dumps(content, indent=indent).encode())) == [{"text": "a"}, {"text": "b"}]


def test_a_single_object_is_a_row() -> None:
    row = {"messages": [{"role": "user", "content": "a"}]}
    assert columns(read(json.dumps(row, indent=2).encode())) == [row]


@pytest.mark.parametrize("broken", ['{"text" 3}', '{"text": nul}', "", '{"text": "a', '{"text": 1} {"text": 2}', "]"])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_an_error_in_an_array_has_its_line_and_column_and_follows_the_rows_before_it(
    broken: str, num_rows: int
) -> None:
    text = "[" + ",\n ".join(['{"text": "é"}'] * num_rows) + f",\n {broken}]"
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    entries = read_json(io.BufferedReader(io.BytesIO(text.encode())), "d.json", may_be_document=True)  # type: ignore[arg-type]
    assert columns([next(entries) for _ in range(num_rows)]) == [{"text": "é"}] * num_rows
    with pytest.raises(DataError) as caught:
        list(entries)
    assert caught.value.problems[0].where == f"d.json:{expected.value.lineno}"
    assert f"(column {expected.value.colno})" in caught.value.problems[0].found


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ('{"a": 1,\n "a": 2}', "the key 'a' stands twice"),
        ("[" * 99_999, "nested too deeply"),
    ],
)
def test_what_only_the_reader_refuses_is_named_by_the_line_of_its_row(row: str, found: str) -> None:
    with pytest.raises(DataError) as caught:
        read(f'[{{"text": "a"}},\n\n {row}]'.encode())
    assert (caught.value.problems[0].where, found in caught.value.problems[0].found) == ("d.json:3", True)


@pytest.mark.parametrize("is_array", [True, False])
def test_numbers_that_json_has_no_word_for_are_read_as_python_writes_them(is_array: bool) -> None:
    row = json.dumps({"text": "a", "score": math.nan, "least": -math.inf})
    (found,) = columns(read((f"[{row}]" if is_array else f"{row}\n").encode(), may_be_document=is_array))
    assert math.isnan(found.pop("score"))
    assert found == {"text": "a", "least": -math.inf}


@pytest.mark.parametrize("is_array", [True, False])
def test_memory_does_not_grow_with_the_number_of_rows_but_for_the_text_of_an_array(
    is_array: bool, tmp_path: Path
) -> None:
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


def test_rows_agree_with_datasets(tmp_path: Path) -> None:
    rows = [{"text": f"line {n} é\u2028\x85", "number": n, "nested": {"a": [n]}} for n in range(50)]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=n % 2 == 0) for n, row in enumerate(rows)))
    theirs = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert columns(read(path.read_bytes(), may_be_document=False)) == theirs.to_list()
