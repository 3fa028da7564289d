"""Plain text is a row a document: a line, a paragraph or a file, as ``datasets`` reads it but for blank ones."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import datasets
import pytest

from recipes_lib.data.sources import readers as source_text
from recipes_lib.data.sources.readers import BrokenLine, TextDocuments, enumerate_lines, read_text
from recipes_lib.data.sources.rows import RawRow


def read(content: bytes, documents: TextDocuments) -> list[tuple[int, str]]:
    entries = [entry for entry in read_text(open_bytes(content), "d", documents) if isinstance(entry, RawRow)]
    return [(entry.index, entry.columns["text"]) for entry in entries]


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
    content = "aé\nb".encode() + b"\xff\nc"
    lines = [line for _, line in enumerate_lines(open_bytes(content), "d")]
    assert lines[0::2] == ["aé\n", "c"]
    assert isinstance(lines[1], BrokenLine)
    assert lines[1].problem.where == "d:2"
    assert lines[1].problem.found == f"not UTF-8 at byte {content.index(255)}"


@pytest.mark.parametrize(("documents", "expected"), [("line", "a :2 c d"), ("paragraph", ":2 d"), ("file", ":2")])
def test_a_line_that_cannot_be_read_costs_its_document_alone(
    documents: TextDocuments, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_text, "MAX_LINE_BYTES", 8)
    for broken in (b"b\xff", b"longer than eight bytes by far"):
        entries = read_text(open_bytes(b"a\n" + broken + b"\nc\n\nd\n"), "d", documents)
        found = [entry.columns["text"] if isinstance(entry, RawRow) else entry.where[1:] for entry in entries]
        assert found == expected.split()


def test_a_row_of_a_table_that_cannot_be_read_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "MAX_LINE_BYTES", 12)
    content = b'x,y\n1,2\n3,\xff\n"a\nb\xff",c\n' + b"4" * 40 + b"\n5,6\n"
    entries = list(source_text.read_csv(open_bytes(content), "d", delimiter=","))
    found = [entry.index if isinstance(entry, RawRow) else entry.where for entry in entries]
    assert found == [2, "d:3", "d:5", "d:6", 7]


@pytest.mark.parametrize("content", ["one\n", "\n\n  one\r\n\r\ntwo\n\n", "a\n" * 1000, "no end", "\u2028\x85 é\x0b"])
def test_a_file_is_its_text_as_datasets_reads_it_with_its_own_line_ends(content: str, tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(content.encode())
    options = {"data_files": str(path), "sample_by": "document", "split": "train", "keep_linebreaks": True}
    theirs = datasets.load_dataset("text", **options, cache_dir=str(tmp_path / "cache"))
    assert read(path.read_bytes(), "file") == [(1, content)]
    assert list(theirs["text"]) == [content.replace("\r\n", "\n")]


def test_paragraphs_agree_with_datasets_where_one_blank_line_parts_them(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("To be,\n  or not to be\n\nthat is\n\nthe question")
    theirs = datasets.load_dataset(
        "text", data_files=str(path), sample_by="paragraph", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [text for _, text in read(path.read_bytes(), "paragraph")] == theirs["text"]


def test_any_number_of_blank_lines_parts_paragraphs_named_by_their_first_line() -> None:
    content = b"\xef\xbb\xbf\n \t\nfirst\r\n  goes on\r\n\r\n\n\x0c\n second \n\n"
    assert read(content, "paragraph") == [(3, "first\r\n  goes on"), (8, " second ")]
    assert read(content, "file") == [(1, content.decode().removeprefix("\ufeff"))]
    assert read(content, "line") == [(3, "first"), (4, "  goes on"), (8, " second ")]


@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t\n"])
def test_blank_files_hold_no_document(documents: TextDocuments, content: bytes) -> None:
    assert read(content, documents) == []


@pytest.mark.parametrize("documents", ["file", "paragraph"])
def test_long_documents_are_cut_at_line_ends_and_lose_nothing(
    documents: TextDocuments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_text, "MAX_DOCUMENT_BYTES", 24)
    content = "zwölf ä\n" * 7 + "a line that is longer than a document may be\n" + "b\n" * 20
    pieces = read(content.encode(), documents)
    assert "\n".join(text.rstrip("\n") for _, text in pieces) == content.rstrip("\n")
    lines = content.splitlines()
    for number, text in pieces:
        assert lines[number - 1 : number - 1 + len(text.splitlines())] == text.splitlines()
        assert len(text.encode()) <= 24 or text.rstrip("\n") == lines[7]
    for (_, text), (number, _) in itertools.pairwise(pieces):
        with_next_line = text.rstrip("\n") + "\n" + lines[number - 1] + "\n"
        assert len(with_next_line.encode()) > 24, "no piece is shorter than it must be"


def test_a_file_is_read_no_further_than_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "MAX_DOCUMENT_BYTES", 100)
    file = open_bytes(b"nine chars\n" * 100_000)
    next(read_text(file, "d", "file"))
    assert file.tell() < 200
