"""Plain text is a row a line, as ``datasets`` reads it but for blank lines."""

from __future__ import annotations

import io
from pathlib import Path

import datasets
import pytest

from recipes_lib.data.source_rows import RawRow
from recipes_lib.data.source_text import BrokenFileError, enumerate_lines, read_text


def open_bytes(content: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_agree_with_datasets(end: str, tmp_path: Path) -> None:
    lines = ["To be,", "  or not to be", "", "é\u2028\x85\x0b same line ", " \t", "that is"]
    path = tmp_path / "d.txt"
    path.write_bytes(end.join(lines).encode())
    theirs = datasets.load_dataset("text", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    ours = [
        entry.columns["text"] for entry in read_text(open_bytes(path.read_bytes()), "d") if isinstance(entry, RawRow)
    ]
    assert ours == [text for text in theirs["text"] if text.strip()]


def test_lines_are_counted_with_the_blank_ones_and_lose_the_byte_order_mark() -> None:
    entries = [entry for entry in read_text(open_bytes(b"\xef\xbb\xbfa\n\n\nb"), "d") if isinstance(entry, RawRow)]
    assert [(entry.index, entry.columns["text"]) for entry in entries] == [(1, "a"), (4, "b")]


def test_an_encoding_error_has_its_line_and_its_byte_in_the_file() -> None:
    content = "aé\nb".encode() + b"\xff\n"
    with pytest.raises(BrokenFileError) as caught:
        list(enumerate_lines(open_bytes(content), "d"))
    assert caught.value.problem.where == "d:2"
    assert caught.value.problem.found == f"not UTF-8 at byte {content.index(255)}"
