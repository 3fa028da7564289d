"""Opening of datasets by name, and collection of the problems of their rows."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.rows import read_source, write_rows

from recipes_lib.data.sources.canonical import detect_source_format, load_source, read_entries
from recipes_lib.data.sources.rows import RawRow, Row
from recipes_lib.errors import ConfigError, DataError

CHATS = [
    {"messages": [{"role": "user", "content": f"Question {n}, é"}, {"role": "assistant", "content": f"Answer {n}"}]}
    for n in range(5)
]


ARROW = ("stream.arrow", "stream.arrow.gz", "file.arrow", "copied")


def test_rows_are_equal_in_every_container(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = [
        *CHATS,
        {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]},
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text(json.dumps({"data": rows}))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (stream,) = (tmp_path / "saved").glob("*.arrow")
    shutil.copy(stream, tmp_path / "stream.arrow")
    with gzip.open(tmp_path / "stream.arrow.gz", "wb") as packed:
        packed.write(stream.read_bytes())
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as file:
        file.write_table(table)
    (tmp_path / "copied").mkdir()  # A folder of Arrow files, such as the cache of `datasets`.
    shutil.copy(stream, tmp_path / "copied")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "1.jsonl", rows[:2])
    write_rows(tmp_path / "folder" / "2.jsonl", rows[2:])
    for name in ("a.jsonl", "a.json", "b.json", "a.parquet", "saved", "folder", *ARROW):
        found = list(read_source(load_source(str(tmp_path / name))))
        assert [row.messages for row in found] == [row["messages"] for row in rows], name


def test_objects_of_mixed_types_are_read_from_files_of_datasets(tmp_path: Path) -> None:
    arguments = [{"x": 1}, {"y": ["a"]}]
    calls = datasets.List({"arguments": datasets.Json()})
    features = datasets.Features({"text": datasets.Value("string"), "arguments": datasets.Json(), "calls": calls})
    rows = [{"text": str(at), "arguments": one, "calls": [{"arguments": one}]} for at, one in enumerate(arguments)]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(tmp_path / "a.parquet")
    (stream,) = (tmp_path / "saved").glob("*.arrow")
    for path in (stream, tmp_path / "saved", tmp_path / "a.parquet"):
        found = [entry.columns for entry in load_source(str(path)).rows() if isinstance(entry, RawRow)]
        assert found == rows, path


def test_images_of_saved_dataset_are_not_decoded(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    image = {"bytes": b"no image", "path": None}
    datasets.Dataset.from_list([{"text": "a", "image": image}], features=features).save_to_disk(str(tmp_path))
    (row,) = read_source(load_source(str(tmp_path)))
    assert row.text == "a"


@pytest.mark.parametrize(
    ("answer", "code"),
    [("4", "answer"), ("4", "Response"), ("def f():\n    return 4", "code"), ("Four apples.", "completion_a")],
)
def test_text_beside_its_answer_is_refused(answer: str, code: str, tmp_path: Path) -> None:
    """As in MBPP (`text`, `code`) and MultiPref (`text`, `completion_a`): the question alone would be trained on."""
    name = str(write_rows(tmp_path / "d.jsonl", [{"text": "What is 2 + 2?", code: answer, "id": 1}]))
    with pytest.raises(DataError, match=rf"question of `{code}`.*\n.*question: text, answer: {code}.*format: text"):
        list(read_source(load_source(name)))
    with pytest.raises(DataError, match="may be the question"):
        detect_source_format(load_source(name))
    (row,) = read_source(load_source(name, columns={"question": "text", "answer": code}))
    assert [message["content"] for message in row.messages or ()] == ["What is 2 + 2?", answer]
    assert [row.text for row in read_source(load_source(name), "text")] == ["What is 2 + 2?"]
    (document,) = read_entries(load_source(name).rows(), name, "auto", as_documents=True)
    assert isinstance(document, Row)
    assert document.text == "What is 2 + 2?"


@pytest.mark.parametrize(
    "other",
    [{"answer": "b c"}, {"code": "de"}, {"target": 1}, {"output": ""}, {"prompt": "Write it."}, {"answers": ["d"]}],
)
def test_text_beside_other_columns_is_a_text(other: dict[str, object], tmp_path: Path) -> None:
    name = str(write_rows(tmp_path / "d.jsonl", [{"text": "a b c", **other}]))
    assert [row.text for row in read_source(load_source(name))] == ["a b c"]


def test_all_problems_are_raised_and_no_row_follows_first(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n{"text": 1}\n{\n{"text": "b"}\n{"text": ""}\n')
    seen = []
    with pytest.raises(DataError) as caught:
        seen.extend(read_source(load_source(str(path))))
    assert [row.text for row in seen] == ["a"]
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2", f"{path}:3", f"{path}:5"]


def test_equal_problems_are_merged(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"text": "a"}, {"text": ""}, *[{"text": 1}] * 30])
    with pytest.raises(DataError) as caught:
        list(read_source(load_source(str(path))))
    empty, alike = caught.value.problems
    assert (empty.where, empty.found) == (f"{path}:2", "`text` is empty")
    assert alike.where == f"{path}:3"
    assert f"so in 30 of 32 rows (93.8%), next {path}:4, {path}:5, {path}:6, ..." in alike.found


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("linked.jsonl", {}, r"no such file.*\n.*symbolic link to moved\.jsonl, which does not exist"),
        ("trian.jsonl", {}, r"did you mean .*/train\.jsonl\?"),
        ("*.jsonl", {}, "patterns are not expanded: name the folder"),
        ("train.jsonl", {"revision": "main"}, "for Hub datasets"),
    ],
)
def test_invalid_local_name_is_explained(tmp_path: Path, name: str, keys: dict[str, str], words: str) -> None:
    (tmp_path / "linked.jsonl").symlink_to("moved.jsonl")
    write_rows(tmp_path / "train.jsonl", CHATS)
    with pytest.raises(DataError, match=words):
        load_source(str(tmp_path / name), **keys)


@pytest.mark.parametrize(
    "name",
    [
        *("./data.jsonl", "/no/such/folder", "~/no-such-file", "~data", "data.parquet", "a/b/c", "x.csv.gz"),
        *("crawl/", "crawl/*.warc.gz", "crawl\\a", "my data"),
    ],
)
def test_missing_path_is_not_looked_up_on_hub(name: str) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load_source(name)


@pytest.mark.parametrize("name", ["https://huggingface.co/datasets/a/b", "s3://a/b.jsonl"])
def test_address_is_explained(name: str) -> None:
    with pytest.raises(DataError, match=r"URLs are not read: .* of the Hub is `owner/name`"):
        load_source(name)


@pytest.mark.parametrize("name", ["", " ", "a" * 5000, "a\0b"])
def test_invalid_name_is_error(name: str) -> None:
    with pytest.raises(DataError):
        load_source(name)


def test_layout_is_detected_from_first_valid_row(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{\n{"text": "a", "id": 1}\n')
    assert str(detect_source_format(load_source(str(path)))) == "`text` layout, from text; ignored: id"
    path.write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        detect_source_format(load_source(str(path)))


@pytest.mark.parametrize(
    ("row", "columns", "same"),
    [
        (
            {"q": "a", "a": "b", "id": 1},
            {"prompt": "q", "completion": "a"},
            {"prompt": "a", "completion": "b", "id": 1},
        ),
        ({"q": "a", "a": "b"}, {"question": "q", "answer": "a"}, {"question": "a", "answer": "b"}),
        ({"prompt": "b", "completion": "a"}, {"prompt": "completion", "completion": "prompt"}, None),
        ({"prompt": "a", "completion": "b", "text": "a b"}, {"text": None}, {"prompt": "a", "completion": "b"}),
        ({"prompt": "a", "completion": "b", "label": True}, {"label": None}, {"prompt": "a", "completion": "b"}),
        ({"text": "an id", "content": "a"}, {"text": "content"}, {"text": "a"}),
        (
            {"Question": "a", "Complex_CoT": "one two three four", "Response": "b"},
            {"reasoning_content": "Complex_CoT"},
            {"question": "a", "answer": "b", "reasoning_content": "one two three four"},
        ),
        (
            {"Question": "a", "Complex_CoT": "one two three four", "Response": "b"},
            {"Complex_CoT": None},
            {"question": "a", "answer": "b"},
        ),
        ({"q": {"of": {"text": "a"}}, "a.b": "b"}, {"prompt": "q.of.text", "completion": "a.b"}, None),
        ({"q": '{"of": {"text": "a"}}', "c": "b"}, {"prompt": "q.of.text", "completion": "c"}, None),
    ],
)
def test_dataset_columns_equal_renamed_dataset(tmp_path, row, columns, same) -> None:
    name = str(tmp_path / "d.jsonl")
    write_rows(tmp_path / "d.jsonl", [same or {"prompt": "a", "completion": "b"}])
    expected = list(read_source(load_source(name)))
    write_rows(tmp_path / "d.jsonl", [row])
    renamed = load_source(name, columns=columns)
    assert list(read_source(renamed)) == list(read_source(renamed)) == expected
    assert renamed.fingerprint() not in (load_source(name).fingerprint(), load_source(name, columns={}).fingerprint())


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_renamed_column_may_be_null_or_missing_in_first_row(tmp_path: Path, name: str) -> None:
    rows = [{"q": "a", "a": "b"}, {"q": "a", "a": "b", "preamble": "c"}]
    if name == "d.jsonl":
        write_rows(tmp_path / name, rows)
    else:
        pq.write_table(
            pa.Table.from_pylist(rows, pa.schema([(column, pa.string()) for column in rows[1]])), tmp_path / name
        )
    source = load_source(str(tmp_path / name), columns={"question": "q", "answer": "a", "system": "preamble"})
    assert [len(row.messages or ()) for row in read_source(source)] == [2, 3]


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ({"promt": "q"}, ConfigError, "did you mean `prompt`?"),
        ({"prompt": 3}, ConfigError, "`prompt: 3` names no column"),
        ({"prompt": "questoin", "completion": "a"}, DataError, "did you mean `question`?"),
        ({"prompt": "question.text", "completion": "a"}, DataError, "there is no column `question.text`"),
        ({"prompt": "number.text", "completion": "a"}, DataError, "there is no column `number.text`"),
        ({"prompt": "graded.groundtruth", "completion": "a"}, DataError, "did you mean `graded.ground_truth`?"),
    ],
)
def test_invalid_dataset_columns_are_refused(tmp_path, columns, error, words) -> None:
    row = {"question": "a", "a": "b", "number": "1", "graded": {"ground_truth": "1"}}
    path = write_rows(tmp_path / "d.jsonl", [row] * 2)
    with pytest.raises(error) as caught:
        list(read_source(load_source(str(path), columns=columns)))
    assert len(caught.value.problems) == 1
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "café"}\n'.encode("latin-1"), "not UTF-8 at byte 13"),
        ('{"text": "a"}\n'.encode("utf-16"), "the file may be UTF-16"),
        (b'{"text": "a", "text": "b"}\n' * 30, "the key 'text' occurs twice"),
        (b'{"question": "a"}\n{"messages": 3}\n', "needs `text`; found `question`"),
    ],
)
def test_source_without_valid_row_reports_first_problem(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        detect_source_format(load_source(str(path)), "text")
    assert caught.value.problems[0].where == f"{path}:1"
