"""Sources as documents: formats, splitting into tasks, broken rows."""

import errno
import gzip
import json
import lzma
import os
import re
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules.json.json import Json
from datasets.splits import SplitDict, SplitInfo
from tests.corpus.texts import write_rows

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus.cleaning import make_corpus
from recipes_lib.corpus.documents import CHAT, PART_END, SOURCE, Ledger, join_chat
from recipes_lib.corpus.inputs import READ, Read, count_input_bytes, interleave_rows, open_inputs, split_source
from recipes_lib.data.sources.canonical import load_source
from recipes_lib.errors import ConfigError, DataError, Problem, ReadFailedError


def read(entry, raises=False, task_megabytes=1):
    (source,) = open_inputs(CorpusConfig(sources=[entry], output_dir="", task_megabytes=task_megabytes))
    ledger = Ledger([READ], 3)
    reader = Read(source, ledger, raises=raises)
    return [document for rank in range(len(source.tasks)) for document in reader.run(rank=rank)], ledger, source


def test_rows_keep_id_and_metadata(tmp_path):
    path = tmp_path / "web.jsonl"
    path.write_text('{"text": "one", "id": "x\\ud83d", "source": "u"}\n{"text": "two", "date": 3}\n')
    documents, _, _ = read({"name": str(path)})
    assert [(d.text, d.id, d.metadata) for d in documents] == [
        ("one", r"x\ud83d", {"source": "u", SOURCE: "web"}),
        ("two", "web:2", {"date": 3, SOURCE: "web"}),
    ]


@pytest.mark.parametrize("task_bytes", [7, 100, 1000, 10**6])
def test_split_jsonl_file_yields_every_line_once(tmp_path, task_bytes):
    texts = [f"text {at} " + "é" * (at % 17) for at in range(200)]
    path = write_rows(tmp_path / "a.jsonl", texts)
    parts = list(split_source(load_source(str(path)), "a", task_bytes))
    ledger = Ledger([READ], 3)
    reader = Read(None, ledger, raises=True)
    read_ = [found for part in parts for found in reader._read(part)]
    assert [document.text for document in read_] == texts
    assert len({document.id for document in read_}) == len(texts)
    assert task_bytes > path.stat().st_size or len(parts) > 1


def test_range_that_begins_with_a_list_loses_no_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + '[1]\n{"text": "two"}\n' * 50)
    parts = list(split_source(load_source(str(tmp_path / "a.jsonl")), "a", 40))
    found = [entry for part in parts for entry in part.source.rows()]
    assert len(parts) > 10
    assert [isinstance(entry, Problem) for entry in found] == [False, *[True, False] * 50]


@pytest.mark.parametrize("task_bytes", [1, 700, 5000, 10**6])
def test_split_parquet_file_yields_every_row_once_with_stable_ids(tmp_path, task_bytes):
    path, rows = tmp_path / "a.parquet", [f"text {at}" for at in range(200)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=30)
    parts = list(split_source(load_source(str(path)), "a", task_bytes))
    reader = Read(None, Ledger([READ], 3), raises=True)
    found = [document for part in parts for document in reader._read(part)]
    assert [(document.text, document.id) for document in found] == [(text, f"a:{at}") for at, text in enumerate(rows)]
    assert len(parts) == min(7, -(-path.stat().st_size // task_bytes))
    assert abs(sum(part.num_bytes for part in parts) - path.stat().st_size) < 10
    pq.write_table(pa.table({"text": rows}), path)  # A single row group.
    assert [part.num_bytes for part in split_source(load_source(str(path)), "a", task_bytes)] == [path.stat().st_size]
    path.write_bytes(b"PAR1 broken")
    assert len(list(split_source(load_source(str(path)), "a", 1))) == 1


@pytest.mark.parametrize("num_files", [1, 3, 70])
def test_interleaved_rows_are_all_rows(tmp_path, num_files):
    texts = [f"{at}" for at in range(1400)]
    for number in range(num_files):
        share = len(texts) // num_files
        last = len(texts) if number == num_files - 1 else (number + 1) * share
        write_rows(tmp_path / f"{number:02d}.jsonl", texts[number * share : last])
    (tmp_path / "00.jsonl").open("a").write("broken\n")
    entries = list(interleave_rows(load_source(str(tmp_path))))
    found = [int(entry.columns["text"]) for entry in entries if not isinstance(entry, Problem)]
    assert len(entries) == len(found) + 1
    assert sorted(found) == list(range(1400))
    assert max(np.diff(sorted(found[:100]))) < 150


@pytest.mark.parametrize(
    "content",
    [
        json.dumps([{"text": "a" * 50}] * 500).encode(),
        gzip.compress(b"".join(b'{"text": "%d"}\n' % at for at in range(500))),
    ],
    ids=["array", "compressed"],
)
def test_json_array_and_compressed_file_are_not_split(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    (part,) = split_source(load_source(str(tmp_path / "a.jsonl")), "a", 100)
    assert len(list(part.source.rows())) == 500


def test_small_files_share_a_task_in_order(tmp_path):
    for at in range(5):
        (tmp_path / f"{at}.txt").write_text(f"file {at}")
    documents, _, source = read({"name": str(tmp_path), "label": "t"})
    assert [document.text for document in documents] == [f"file {at}" for at in range(5)]
    assert len(source.tasks) == 1


def test_text_file_is_one_document_or_one_per_paragraph(tmp_path):
    (tmp_path / "t.txt").write_text("a\nb\n\nc\n")
    whole = read({"name": str(tmp_path / "t.txt")})[0]
    assert [d.text for d in whole] == ["a\nb\n\nc\n"]
    paragraphs = read({"name": str(tmp_path / "t.txt"), "text_documents": "paragraph"})[0]
    assert [d.text for d in paragraphs] == ["a\nb", "c"]


DOLMA = {"id": "1", "text": "one", "source": "cc", "added": "2023", "metadata": {"url": "u", "n": [1]}}
PILE = {"text": "one", "meta": {"pile_set_name": "Pile-CC"}}
C4 = {"text": "one", "timestamp": "2019-04-25T12:57:54Z", "url": "u"}


@pytest.mark.parametrize(
    ("name", "row", "columns"),
    [
        ("v1_5r2-0000.json.gz", DOLMA, None),
        ("en_head.jsonl.zst", {"raw_content": "one", "url": "u", "quality_signals": "{}"}, {"text": "raw_content"}),
        ("c4-train.00000-of-01024.json.gz", C4, None),
        ("00.jsonl.zst", PILE, None),
        ("wiki.json.xz", PILE, None),
    ],
)
def test_layouts_of_public_corpora_are_read(tmp_path, name, row, columns):
    data = "".join(json.dumps(row | {"text": f"text {at}"} if columns is None else row) + "\n" for at in range(5))
    codecs = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": pa.Codec("zstd").compress}
    (tmp_path / name).write_bytes(bytes(codecs[name[name.rindex(".") :]](data.encode())))
    documents, ledger, _ = read({"name": str(tmp_path / name), **({"columns": columns} if columns else {})})
    assert [document.text for document in documents] == [f"text {at}" if columns is None else "one" for at in range(5)]
    assert not ledger.tallies[READ].removed
    metadata = {key: value for key, value in row.items() if key not in ("text", "id", "raw_content")}
    assert {key: documents[0].metadata[key] for key in metadata} == metadata


def test_fineweb_rows_keep_nested_metadata(tmp_path):
    row = {"text": "one", "id": "<urn:uuid:1>", "score": 2.5, "meta": {"lang": {"en": [0.9]}, "none": None}}
    pq.write_table(pa.Table.from_pylist([row] * 3), tmp_path / "000_00000.parquet")
    documents, _, _ = read({"name": str(tmp_path)})
    assert [document.id for document in documents] == ["<urn:uuid:1>"] * 3
    assert documents[0].metadata["meta"] == {"lang": {"en": [0.9]}}


def test_html_files_are_decoded_and_found_recursively(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_bytes('<meta charset="latin-1"><p>café</p>'.encode("latin-1"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.HTM").write_text("<p>zwei</p>")
    documents, _, _ = read({"name": str(tmp_path), "label": "pages"})
    assert [documents[0].text[-11:], documents[1].text] == ["<p>café</p>", "<p>zwei</p>"]
    assert [d.id for d in documents] == ["pages/a.html", "pages/sub/b.HTM"]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "c.html").write_text("<p>hidden</p>")
    (tmp_path / "empty.html").touch()
    (tmp_path / "long.html").write_text("<p>" * 50)
    monkeypatch.setattr("recipes_lib.corpus.inputs.MAX_PAGE_BYTES", 100)
    documents, ledger, _ = read({"name": str(tmp_path), "label": "pages"})
    assert len(documents) == 2
    assert ledger.tallies[READ].removed == {"empty": 1, "cannot be read": 1}
    assert ledger.notes == ["pages/long.html: is longer than 100 bytes"]


def test_html_files_behind_links_are_read_once(tmp_path):
    """As files of rows: a linked subfolder counts, a second name and a link to a parent do not."""
    pages, elsewhere = tmp_path / "pages", tmp_path / "elsewhere"
    for folder in (pages, elsewhere):
        folder.mkdir()
        (folder / "a.html").write_text(f"<p>{folder.name}</p>")
    (pages / "b.html").symlink_to("a.html")
    (pages / "c").symlink_to(elsewhere)
    (pages / "loop").symlink_to(".")
    documents, _, _ = read({"name": str(pages), "label": "x"})
    assert [document.id for document in documents] == ["x/a.html", "x/c/a.html"]


def test_folder_of_html_that_cannot_be_listed_is_a_data_error(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("<p>one</p>")
    (tmp_path / "sub").mkdir()
    listed = Path.iterdir

    def refuse(path):
        if path.name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match="sub: cannot be read: Permission denied"):
        read({"name": str(tmp_path)})


def test_corpus_is_a_source_of_another_one_and_no_earlier_one_of_itself(tmp_path):
    sources, out = [{"name": str(write_rows(tmp_path / "a.jsonl", ["one"]))}], tmp_path / "corpus"
    make_corpus(CorpusConfig(sources=sources, output_dir=str(out), workers=1))
    assert (out / "report.html").exists()
    assert [document.text for document in read({"name": str(out)})[0]] == ["one"]
    with pytest.raises(ConfigError, match="names the corpus itself"):
        make_corpus(CorpusConfig(sources=sources, output_dir=str(out), duplicates_of=[str(out)], workers=1))


def test_folder_of_html_and_other_data_is_refused(tmp_path, caplog):
    (tmp_path / "a.html").write_text("<p>one</p>")
    (tmp_path / "_sources").mkdir()
    for name in ("README.md", "robots.txt", "b.warc.zst", "_sources/a.rst.txt"):
        (tmp_path / name).write_text("about")
    assert len(read({"name": str(tmp_path), "label": "x"})[0]) == 1
    assert caplog.messages == [f"{tmp_path}: files of unknown kinds are ignored: _sources/a.rst.txt, b.warc.zst"]
    for name in ("b.txt", "b.jsonl.gz"):
        (tmp_path / name).write_text("two")
        with pytest.raises(DataError, match=f"mixes pages and other data: a.html, {name}"):
            read({"name": str(tmp_path), "label": "x"})
        (tmp_path / name).unlink()


def test_broken_rows_are_counted_or_raise(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbroken\n{"text": 3}\n{"text": ""}\n{"text": "two"}\n')
    documents, ledger, _ = read({"name": str(path)})
    assert [d.text for d in documents] == ["one", "two"]
    tally = ledger.tallies[READ]
    assert tally.removed == {"cannot be read": 3}
    assert (tally.documents_in, tally.documents_out) == (5, 2)
    assert [note.partition(": ")[0] for note in ledger.notes] == [f"{path}:{line}" for line in (2, 3, 4)]
    with pytest.raises(DataError, match=r"broken_rows: drop"):
        read({"name": str(path)}, raises=True)


@pytest.mark.parametrize(("mode", "repaired"), [("apply", ["one two", "x\ufffd😀"]), ("annotate", [])])
def test_texts_that_fix_text_can_repair_are_no_broken_rows(tmp_path, mode, repaired):
    texts, path, out = ["one\0 two", "x\ud83d\ud83d\ude00", "three", "\0"], tmp_path / "a.jsonl", tmp_path / "corpus"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make_corpus(CorpusConfig(sources=[{"name": str(path)}], output_dir=str(out), fix_text=mode, workers=1))
    assert sorted(document.text for document in read({"name": str(out)})[0]) == sorted(["three", *repaired])


@pytest.mark.parametrize("doc", [{"body": "one", "url": "u"}, '{"body": "one"}'])
def test_field_that_is_the_text_is_no_metadata(tmp_path, doc):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"doc": doc, "n": 1}))
    ((document,), *_) = read({"name": str(path), "columns": {"text": "doc.body"}})
    rest = {"doc": {"url": "u"}} if isinstance(doc, dict) else {}
    assert (document.text, document.metadata) == ("one", {"n": 1, SOURCE: "a", **rest})


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_file_that_ends_early_is_an_error_although_broken_rows_are_dropped(tmp_path, name):
    """As after a truncated download: the rows that it lacks cannot be counted."""
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["one", "two"]}), path)
    else:
        path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 100))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{name}: not a whole"):
        read({"name": str(path)})


def test_document_above_byte_limit_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes_lib.corpus.inputs.MAX_DOCUMENT_BYTES", 12)
    write_rows(tmp_path / "a.jsonl", ["short", "é" * 6, "é" * 7, "the end"])
    documents, ledger, _ = read({"name": str(tmp_path / "a.jsonl")})
    assert [document.text for document in documents] == ["short", "é" * 6, "the end"]
    assert ledger.tallies[READ].removed == {"longer than 12 bytes": 1}
    assert ledger.tallies[READ].documents_in == 4


USER, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "a"), *[("assistant", t) for t in "bc"])
)
LAYOUTS = {
    "messages": {"messages": [USER, {**ANSWER, "train": False}, USER, ANSWER], "tools": [{"name": "t"}]},
    "prompt and completion": {"prompt": "a", "completion": "b"},
    "chats as prompt and completion": {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.0},
    "preference of chats": {
        "prompt": [USER],
        "chosen": [ANSWER],
        "rejected": [OTHER],
        "chat_template_kwargs": {"x": 1},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chat_keeps_all_columns(tmp_path, layout):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(LAYOUTS[layout] | {"score": 3}) + "\n")
    (document,) = read({"name": str(path), "kind": "chat"})[0]
    # Texts in order, with separators between messages.
    assert document.text.split(PART_END) == re.findall('(?<=: ")[abc](?=")', json.dumps(LAYOUTS[layout]))
    assert join_chat(document.metadata[CHAT], document.text) == LAYOUTS[layout]
    assert document.metadata["score"] == 3
    assert not {"a", "b", "c"} & set(json.dumps(document.metadata[CHAT]).split('"'))


def test_tools_that_the_first_chat_lacks_are_no_metadata(tmp_path):
    rows = [{"messages": [USER, ANSWER]}, LAYOUTS["messages"] | {"score": 3}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, document = read({"name": str(tmp_path / "chat.jsonl"), "kind": "chat"})[0]
    assert join_chat(document.metadata[CHAT], document.text) == LAYOUTS["messages"]
    assert document.metadata.keys() == {CHAT, SOURCE, "score"}


@pytest.mark.parametrize(
    ("kind", "row"),
    [("text", LAYOUTS["messages"]), ("web", LAYOUTS["prompt and completion"]), ("chat", {"text": "one"})],
)
def test_row_of_wrong_kind_is_refused(tmp_path, kind, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="kind: chat"):
        read({"name": str(tmp_path / "a.jsonl"), "kind": kind})


def test_chat_containing_separator_is_counted_as_broken(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"a{PART_END}", "completion": "b"}, {"prompt": "a", "completion": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents, ledger, _ = read({"name": str(path), "kind": "chat"})
    assert len(documents) == 1
    assert "U+E000" in ledger.notes[0]


class _Builder(Json):
    def download_and_prepare(self, *args, **kwargs):
        raise AssertionError("downloaded")


def test_streamed_hub_dataset_is_not_downloaded(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "train.jsonl", ["one", "two"])
    builder = _Builder(cache_dir=str(tmp_path / "cache"), dataset_name="x", hash="c", data_files=str(path))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    config = CorpusConfig(sources=[{"name": "org/x"}], output_dir="")
    for size in (None, 12_345):
        builder.info.splits = size and SplitDict({"train": SplitInfo("train", size, 2)})
        (source,) = open_inputs(config, streams=True)
        assert count_input_bytes(source) == size
        reader = Read(source, Ledger([READ], 0), raises=True)
        assert [document.text for document in reader.run()] == ["one", "two"]

    def lose_connection(dataset, batch_size):
        yield {"text": ["one"]}
        raise ConnectionError("connection reset")

    # Not counted as an unreadable record: the finished corpus would lack the rest of the stream.
    monkeypatch.setattr(datasets.IterableDataset, "iter", lose_connection)
    with pytest.raises(ReadFailedError, match="connection reset"):
        list(Read(source, Ledger([READ], 0), raises=False).run())
    with pytest.raises(DataError, match="downloaded"):
        open_inputs(config)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "large.jsonl"])
def test_unreadable_line_loses_no_other(tmp_path, monkeypatch, name):
    from recipes_lib.data.sources import readers

    size = 1 << 20 if name == "large.jsonl" else 100
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 2 * size)
    lines = [json.dumps({"text": f"{at}" + "x" * size}).encode() for at in range(4)]
    lines[1], lines[3:3] = b'{"text": "caf\xe9"}', [b"y" * 5 * size]
    data = b"\n".join(lines)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    documents, ledger, source = read({"name": str(tmp_path / name)})
    assert [document.text[0] for document in documents] == ["0", "2", "3"]
    assert ledger.tallies[READ].removed == {"cannot be read": 2}
    assert ledger.tallies[READ].documents_in == 5
    assert (len(source.tasks) > 1) == (name == "large.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "large.jsonl", "a.parquet", "a.html", "a.warc"])
def test_file_that_the_disk_fails_to_read_is_not_counted_as_read(tmp_path, name):
    """A finished task is not repeated: the corpus would lack the file also after the disk is repaired."""
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["one"]}), path)
    else:
        path.write_text('{"text": "one"}\n' * (100_000 if name == "large.jsonl" else 1))
    config = CorpusConfig(sources=[{"name": str(path)}], output_dir="", task_megabytes=1)
    (source,) = open_inputs(config)
    path.unlink()
    with pytest.raises(ReadFailedError, match=r": cannot be read: .*No such file"):
        list(Read(source, Ledger([READ], 3), raises=False).run())


def test_ids_include_relative_folder(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / "s" / folder).mkdir(parents=True)
        write_rows(tmp_path / "s" / folder / "a.jsonl", [f"one {folder}"])
    documents, _, _ = read({"name": f"{tmp_path / 's'}/"})
    assert [document.id for document in documents] == ["s/x/a.jsonl:1", "s/y/a.jsonl:1"]
    (tmp_path / "s" / "y" / "a.jsonl").write_text('{"text": "b", "body": "two"}\n')
    (tmp_path / "s" / "x" / "a.jsonl").write_text('{"text": "a", "body": "one"}\n')
    documents, _, _ = read({"name": str(tmp_path / "s"), "columns": {"text": "body"}})
    assert {document.id: document.text for document in documents} == {"s/x/a.jsonl:1": "one", "s/y/a.jsonl:1": "two"}


def test_large_file_with_renamed_columns_is_split(tmp_path):
    path = tmp_path / "a.jsonl"
    # Every second row lacks the column, so that one of them is the first of the file, and of a part.
    rows = [{"n": at, "body" if at % 2 else "other": f"{at} " + "x" * 1000} for at in range(3000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents, ledger, source = read({"name": str(path), "columns": {"text": "body"}})
    starts = [next(part.source.source.rows()).columns["n"] % 2 for (part,) in source.tasks]
    assert 0 in starts[1:]
    assert [int(document.text.split()[0]) for document in documents] == list(range(1, 3000, 2))
    assert ledger.tallies[READ].removed == {"cannot be read": 1500}


def test_fingerprint_follows_content(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ["one"])
    first = read({"name": str(path)})[2].fingerprint
    assert read({"name": str(path)})[2].fingerprint == first
    write_rows(path, ["two"])
    assert read({"name": str(path)})[2].fingerprint != first


@pytest.mark.parametrize("suffix", ["txt", "html"])
def test_non_utf8_file_name_is_escaped(tmp_path, suffix):
    (tmp_path / os.fsdecode(b"caf\xe9." + suffix.encode())).write_text("some words", encoding="utf-8")
    (tmp_path / os.fsdecode(b"broken\xe9.txt")).write_bytes(b"\xff")
    if suffix == "html":
        (tmp_path / os.fsdecode(b"broken\xe9.txt")).unlink()
    documents, ledger, _ = read({"name": str(tmp_path)})
    assert [rf"caf\udce9.{suffix}" in document.id for document in documents] == [True]
    assert all(note.encode() and r"broken\udce9.txt" in note for note in ledger.notes)
    assert len(ledger.notes) == (suffix == "txt")


def test_unopenable_file_is_a_data_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "b.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"b\.txt: cannot be read: No such file"):
        read({"name": str(tmp_path)})

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("recipes_lib.data.sources.local_files.compute_digest", refuse)
    (tmp_path / "page.html").write_text("<p>words</p>")
    with pytest.raises(DataError, match=r"page\.html: cannot be read: Permission denied"):
        read({"name": str(tmp_path / "page.html")})
