"""Records are replaced whole or not at all, and whatever stands in their place is refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from recipes_lib.errors import DataError
from recipes_lib.files import is_inside, read_lines, read_record, replace_record


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is no JSON"),
        (b'{"a": 1', "is no JSON"),
        (b"\xff\xfe{}", "is no JSON"),
        (b"[1, 2]", "holds a list and not an object"),
        (b"null", "holds null and not an object"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"1" * 100_000 + b"}", "is no JSON"),
        (b'{"b": 1}', "`a` is missing"),
        (b'{"a": "1"}', "`a` is a string"),
        (b'{"a": true}', "`a` is a boolean"),
    ],
)
def test_what_is_no_such_record_is_refused_with_its_path(tmp_path, content, found) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_record(path, {"a": int}, remedy="put it back")
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert found in problem.found
    assert problem.remedy == "put it back"


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path) -> None:
    pipe, sparse, loop = tmp_path / "pipe", tmp_path / "sparse", tmp_path / "loop"
    os.mkfifo(pipe)
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    loop.symlink_to(loop)
    for path in (tmp_path, pipe, sparse, loop, Path("/dev/zero"), tmp_path / "missing", tmp_path / "a\0b"):
        with pytest.raises(DataError, match="cannot be read"):
            read_record(path)
    assert list(read_lines(pipe)) == []


def test_a_field_may_be_left_out_where_its_type_says_so(tmp_path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"a": 1}')
    assert read_record(path, {"a": int, "b": str | None}) == {"a": 1}


def test_torn_lines_are_told_apart(tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n\n{"text": "a\xe2\x80\xa8b"}\n[1]\n{"step": \xff\n' + b"[" * 100_000 + b'\n{"step"')
    assert list(read_lines(path)) == [{"step": 1}, {"text": "a\u2028b"}, None, None, None, None]
    assert list(read_lines(tmp_path / "missing")) == []


def test_a_record_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "record.json"
    replace_record(path, {"a": "ü", "path": tmp_path, "name": "\udcff"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü", "path": str(tmp_path), "name": "\udcff"}

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        replace_record(path, {"a": "new"})
    assert caught.value.filename == str(path)
    assert read_record(path)["a"] == "ü"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    ("name", "inside"),
    [("model.safetensors", True), ("a/b.pt", True), ("../x", False), ("a/../../x", False), ("/dev/zero", False)],
)
def test_names_that_leave_the_folder_are_told_apart(name, inside) -> None:
    assert is_inside(name) is inside
    assert not is_inside(7)
