"""Malformed files, folders and rows: each is one ``DataError`` with location and remedy, and no other exception."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.rows import read_source

from recipes_lib.data.sources.canonical import load_source
from recipes_lib.data.sources.local_files import COMPRESSIONS, READERS
from recipes_lib.errors import DataError, Problem

GOOD = b'{"text": "fine"}\n'


def line(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


def chat(*messages: object, **columns: object) -> dict[str, object]:
    return {"messages": list(messages), **columns}


def user(content: object = "Hi") -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: object = "Hello", **keys: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **keys}


def calling(arguments: object) -> dict[str, object]:
    return assistant(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def find_problems(path: Path) -> Sequence[Problem]:
    """Return the problems of a dataset; every one has a location in it and a remedy.

    Any exception but ``DataError`` fails the test, as does a dataset without rows and without a problem.
    """
    problems: Sequence[Problem] = []
    try:
        assert list(read_source(load_source(str(path))))
    except DataError as error:
        problems = error.problems
    assert all(problem.where.startswith(str(path)) and problem.remedy for problem in problems)
    return problems


def arrow(table: pa.Table) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=500)
    return file.getvalue()


ARROW = arrow(pa.table({"text": [f"document {n}" for n in range(2000)]}))
PARQUET = parquet(pa.table({"text": [f"document {n}" for n in range(2000)]}))

# case -> file name, bytes, location of the error within the file, text that the error contains
FILES: dict[str, tuple[str, bytes, str, str]] = {
    "empty jsonl": ("d.jsonl", b"", "", "no rows"),
    "blank lines only": ("d.jsonl", b"\n  \n\r\n", "", "no rows"),
    "byte order mark only": ("d.jsonl", b"\xef\xbb\xbf", "", "no rows"),
    "empty json": ("d.json", b"", "", "no rows"),
    "empty array": ("d.json", b"[]", "", "no rows"),
    "empty csv": ("d.csv", b"", "", "no rows"),
    "csv header only": ("d.csv", b"prompt,completion\n", "", "no rows"),
    "blank text": ("d.txt", b"\n\n \n", "", "no rows"),
    "empty parquet file": ("d.parquet", b"", "", "Parquet"),
    "parquet without rows": ("d.parquet", parquet(pa.table({"text": pa.array([], pa.string())})), "", "no rows"),
    "broken line": ("d.jsonl", GOOD + b'{"text": "a",}\n', ":2", "column"),
    "cut line": ("d.jsonl", GOOD + b'{"text": ["a"\n' + GOOD, ":2", "column 14"),
    "cut last line": ("d.jsonl", GOOD + GOOD + b'{"text": "a', ":3", "invalid JSON"),
    "single quotes": ("d.jsonl", b"{'text': 'a'}\n", ":1", "column 2"),
    "two objects on a line": ("d.jsonl", GOOD + b'{"text": "a"} {"text": "b"}\n', ":2", "Extra data"),
    "string per line": ("d.jsonl", GOOD + b'"text"\n', ":2", "a string, not an object"),
    "number per line": ("d.jsonl", b"17\n", ":1", "a number, not an object"),
    "null per line": ("d.jsonl", GOOD + b"null\n", ":2", "null, not an object"),
    "array among objects": ("d.jsonl", GOOD + b'["text"]\n', ":2", "a list, not an object"),
    "repeated key": ("d.jsonl", GOOD + b'{"text": "a", "text": "b"}\n', ":2", "'text' occurs twice"),
    "deep nesting": ("d.jsonl", GOOD + b"[" * 100000 + b"\n", ":2", "nested too deeply"),
    "endless integer": ("d.jsonl", b'{"text": ' + b"1" * 5000 + b"}\n", ":1", "invalid JSON"),
    "latin-1": ("d.jsonl", GOOD + '{"text": "café"}\n'.encode("latin-1"), ":2", "byte 30"),
    "utf-16": ("d.jsonl", '{"text": "a"}\n'.encode("utf-16"), ":1", "UTF-16"),
    "cut utf-8 in an array": ("d.json", '[{"text": "é"}]'.encode()[:-4], ":1", "not UTF-8 at byte 11"),
    "latin-1 in an array": ("d.json", '[\n{"text": "café"}]'.encode("latin-1"), ":2", "not UTF-8 at byte 15"),
    "array not closed": ("d.json", b'[{"text": "a"},\n {"text": "b"}', ":2", "not closed"),
    "array ends in a comma": ("d.json", b'[{"text": "a"},\n]', ":2", "invalid JSON"),
    "array without commas": ("d.json", b'[{"text": "a"}\n {"text": "b"}]', ":2", "expected `,`"),
    "array of scalars": ("d.json", b'[{"text": "a"}, 3]', " row 1", "a number, not an object"),
    "text after an array": ("d.json", b'[{"text": "a"}]\n{}', ":2", "after the array"),
    "array broken inside": ("d.json", b'[{"text": "a"},\n {"text" "b"}]', ":2", "column 10"),
    "object cut short": ("d.json", b'{\n "data": [\n  {"text": "a"},\n', ":4", "invalid JSON"),
    "wrapped scalars": ("d.json", b'{"data": [1]}', " row 0", "a number, not an object"),
    "columns, not rows": ("d.json", b'{"text": ["a", "b"]}', " row 0", "`text` is a list, not a string"),
    "repeated csv column": ("d.csv", b"text,text\na,b\n", ":1", "two columns are named `text`"),
    "ragged csv row": ("d.csv", b"prompt,completion\na,b\nc,d,e\n", ":3", "3 cells under 2 columns"),
    "short csv row": ("d.csv", b'prompt,completion\n"a\nb",c\nd\n', ":4", "1 cells under 2 columns"),
    "open csv quote": ("d.csv", b'prompt,completion\na,b\n"c,d\ne,f\n', ":3", "invalid CSV"),
    "csv quote inside": ("d.csv", b'prompt,completion\n"a"b,c\n', ":2", "invalid CSV"),
    "csv in latin-1": ("d.csv", "prompt,completion\na,é\n".encode("latin-1"), ":2", "byte 20"),
    "cut parquet": ("d.parquet", PARQUET[:-200], "", "Parquet"),
    "damaged parquet": ("d.parquet", PARQUET[:4] + bytes(400) + PARQUET[404:], "", "Parquet"),
    "parquet that is json": ("d.parquet", GOOD * 10, "", "Parquet"),
    "unknown time zone": (
        "d.parquet",
        parquet(pa.table({"text": ["a"], "at": pa.array([1], pa.timestamp("us", "Mars/Base"))})),
        "",
        "Parquet",
    ),
    "repeated parquet column": (
        "d.parquet",
        parquet(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])),
        "",
        "two columns are named `text`",
    ),
    "parquet of numbers": ("d.parquet", parquet(pa.table({"text": [1]})), " row 0", "a number, not a string"),
    "parquet of bytes": ("d.parquet", parquet(pa.table({"text": [b"a"]})), " row 0", "of type bytes"),
    "null in parquet": ("d.parquet", parquet(pa.table({"text": ["a", None]})), " row 1", "`text` is missing"),
    "cut arrow": ("d.arrow", ARROW[:-200], "", "not a whole Arrow file"),
    "arrow that is json": ("d.arrow", GOOD * 10, "", "not a whole Arrow file"),
    "empty arrow file": ("d.arrow", b"", "", "not a whole Arrow file"),
    "no suffix": ("d", GOOD, "", "unknown kind of file"),
    "empty object": ("d.jsonl", b"{}\n", ":1", "none with a value"),
    "mixed layouts": ("d.jsonl", GOOD + line(chat(user(), assistant())), ":2", "`text` is missing"),
    "caption instead of columns": ("d.csv", b"My table\nprompt;completion\n", ":2", "match no layout"),
    "half a surrogate pair": ("d.jsonl", GOOD + b'{"text": "\\ud83d"}\n', ":2", "surrogate"),
    "NULs in text": ("d.txt", "ab".encode("utf-16-le"), ":1", "NUL"),
    "empty text": ("d.jsonl", GOOD + line({"text": ""}), ":2", "`text` is empty"),
}
THOUGHT, TEXT = {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hi"}

HI = {"messages": [user(), assistant()]}
# case -> the row of a file of one line, text that the error contains
ROWS: dict[str, tuple[dict[str, object], str]] = {
    "no known column": ({"query": "a", "reply": "b"}, "match no layout"),
    "all columns null": ({"text": None, "messages": None}, "match no layout"),
    "two layouts": ({"text": "a", "messages": [user(), assistant()]}, "several layouts"),
    "empty messages": (chat(), "empty list"),
    "messages as a string": ({"messages": "Hi"}, "`messages` is not valid JSON"),
    "messages as an object": ({"messages": user()}, "an object, not a list"),
    "arguments with NaN": (chat(user(), calling('{"a": NaN}')), "cannot be written as JSON"),
    "function call without a name": (chat(user(), assistant(None, function_call={"arguments": "{}"})), "no function"),
    "prompt without an answer": ({"prompt": "a", "n": 1}, "chosen + rejected; in RL also prompt"),
    "two questions": ({"query": "a", "problem": "b", "answer": "c"}, "match no layout"),
    "two answers": ({"problem": "a", "solution": "b", "response": "c"}, "each of `solution`, `response` may be"),
    "message as a string": (chat("Hi"), "messages[0] is a string"),
    "unknown role": (chat(user(), {"role": "robot", "content": "a"}), "unknown role 'robot'"),
    "no role": (chat({"content": "a"}), "messages[0] has no role"),
    "role is a number": (chat({"role": 1, "content": "a"}), "role is a number"),
    "no content": (chat({"role": "user"}, assistant()), "messages[0].content is missing"),
    "content is a number": (chat(user(3), assistant()), "content is a number"),
    "null answer": (chat(user(), assistant(None)), "messages[1].content is missing"),
    "empty answer": (chat(user(), assistant(" \n")), "messages[1].content is empty"),
    "no assistant": (chat(user(), user()), "no assistant turn"),
    "image": (chat(user([{"type": "image_url", "image_url": "x"}]), assistant()), "`image_url`"),
    "call in a part": (chat(user(), assistant([{"type": "tool_use", "name": "add"}])), "write calls as `tool_calls: ["),
    "result in a part": (chat(user([{"type": "tool_result", "content": "4"}]), assistant()), "{role: tool, content"),
    "thought of a user": (chat(user([THOUGHT]), assistant()), "messages[0].content[0] has type `thinking`"),
    "thought after an answer": (chat(user(), assistant([TEXT, THOUGHT])), "content[1] has type `thinking`"),
    "thought without an answer": (chat(user(), assistant([THOUGHT])), "messages[1].content is empty"),
    "thought of a number": (chat(user(), assistant([{**THOUGHT, "thinking": 3}, TEXT])), "[0].thinking is a number"),
    "image in a text": (
        chat(user("<image>\nWhat is it?"), assistant(), images=["a.png"]),
        "refers to `images`, and only text",
    ),
    "lists of unequal lengths": (
        {"messages": {"role": ["user", "assistant"], "content": ["Hi"]}},
        "lengths: 2 of `role`, 1 of",
    ),
    "columns as variables": (
        chat(user(), assistant(), chat_template_kwargs={"tools": [], "add_generation_prompt": True}),
        "has `tools`, `add_generation_prompt`",
    ),
    "surrogate in a tool call": (chat(user(), calling({"a": "\ud83d"})), "surrogate"),
    "NUL": ({"text": "a\x00b"}, "NUL character at position 1"),
    "tool calls a number": (chat(user(), assistant(tool_calls=1)), "tool_calls is a number, not a list"),
    "arguments a list": (chat(user(), calling([1])), "arguments is a list, not an object"),
    "tools of numbers": (chat(user(), assistant(), tools=[1]), "tools[0] is a number, not an object"),
    "history as an object": ({"instruction": "a", "output": "b", "history": {"c": 1}}, "`history` is an object"),
    "tool call without a name": (chat(user(), assistant(tool_calls=[{}])), "names no function"),
    "arguments not JSON": (chat(user(), calling("{")), "not valid JSON"),
    "tools not JSON": (chat(user(), assistant(), tools="[{"), "`tools` is not valid JSON"),
    "tools an object": (chat(user(), assistant(), tools={"a": 1}), "`tools` is an object"),
    "template variables a list": (chat(user(), assistant(), chat_template_kwargs=[1]), "not an object"),
    "text is a boolean": ({"text": True}, "`text` is a boolean, not a string"),
    "empty completion": ({"prompt": "a", "completion": ""}, "`completion` is empty"),
    "prompt is a number": ({"prompt": 1, "completion": "a"}, "`prompt` is a number"),
    "system prompt of a text": ({"prompt": "a", "completion": "b", "system": "c"}, "`system` is part of a chat"),
    "history of a pair": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e"]]},
        "{question: prompt}",
    ),
    "completion of the user": ({"prompt": [user()], "completion": [user()]}, "no assistant"),
    "unknown sharegpt role": ({"conversations": [{"from": "x", "value": "a"}]}, "role 'x'"),
    "sharegpt value is null": ({"conversations": [{"from": "gpt", "value": None}]}, "missing"),
    "call not JSON": ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "[0].content is not valid JSON"),
    "two system prompts": (
        {"conversations": [{"from": "system", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"},
        "column and a system turn",
    ),
    "alpaca without an answer": ({"instruction": "a", "input": "", "output": ""}, "empty"),
    "alpaca without a question": ({"instruction": "", "input": "", "output": "a"}, "empty"),
    "broken history": ({"instruction": "a", "output": "b", "history": [["only"]]}, "history[0] is not a"),
    "equal pair": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    "pair without a prompt": ({"chosen": "a", "rejected": "b"}, "share no prompt"),
    "dialogues, no prompt": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"},
        "share no prompt",
    ),
    "dialogues part early": (
        {"chosen": "\n\nAssistant: a\n\nHuman: b\n\nAssistant: c", "rejected": "\n\nAssistant: d"},
        "has further turns",
    ),
    "dialogues, no answer": (
        {"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: b"},
        "`chosen` is empty",
    ),
    "pair beside a chat": ({"conversations": [user(), assistant()], "chosen": "a", "rejected": "b"}, "several layouts"),
    "lists of strings": ({"prompt": "What?", "chosen": ["a", "b"], "rejected": ["c", "d"]}, "chosen[0] is a string"),
    "turns as JSON": (
        {"messages": ['{"role": "user", "content": "What?"}', '{"role": "assistant", "content": "a"}']},
        "messages[0] is a string, not an object",
    ),
    "pair about an image": (
        {"prompt": "<image> What is it?", "chosen": "a", "rejected": "b", "image": {"path": "a.png"}},
        "refers to `image`",
    ),
    "question of white space": ({"question": " ", "answer": "a"}, "the question is empty"),
    "verdict of a tie": (
        {"context": [user()], "response1": "a", "response2": "b", "overall_preference": 0},
        "`overall_preference` is 0: no answer is",
    ),
    "pair of two kinds": ({"chosen": "a", "rejected": [assistant()]}, "both"),
    "pair of two prompts": (
        {"chosen": [user("a"), assistant()], "rejected": [user("b"), assistant()]},
        "share no prompt",
    ),
    "pair of two users": (
        {"chosen": [user(), user("a"), assistant()], "rejected": [user(), user("b"), assistant()]},
        "does not continue with an assistant turn",
    ),
    "pair of which one is cut": ({"chosen": [user(), assistant()], "rejected": [user()]}, "`rejected` does not"),
}
# Rows whose last column says whether their answer is good.
JUDGED: dict[str, dict[str, object]] = {
    "response": {"prompt": "a", "response": "b", "label": True},
    "completion": {"prompt": "a", "completion": "b", "label": "false"},
    "chat": {**HI, "kto_tag": False},
    "chat, LLaMA-Factory's KTO demo": {**HI, "label": True},
    "answer": {"Question": "a", "Answer": "b", "Is_Correct": False},
    "trajectory, SWE-smith": {**HI, "resolved": 0},
    "trajectory without reward": {**HI, "reward": 0.0},
    "safety, BeaverTails": {"prompt": "a", "response": "b", "is_safe": False},
}
ROWS |= {f"judged {name}": (row, f"`{[*row][-1].lower()}` says which answers are good") for name, row in JUDGED.items()}
FILES |= {kind: ("d.jsonl", line(row), ":1", words) for kind, (row, words) in ROWS.items()}


@pytest.mark.parametrize("kind", FILES)
def test_malformed_file_is_one_located_error(kind: str, tmp_path: Path) -> None:
    name, content, place, words = FILES[kind]
    path = tmp_path / name
    path.write_bytes(content)
    (problem,) = find_problems(path)
    assert problem.where == f"{path}{place}"
    assert words in str(problem)


FOLDERS: dict[str, tuple[dict[str, bytes], str]] = {
    "two kinds": ({"a.jsonl": GOOD, "b.csv": b"text\na\n"}, "mixes kinds of files: a.jsonl, b.csv"),
    "no data": ({".hidden.jsonl": GOOD, "README.md": b"about", "cat.png": b"PNG"}, "no data file"),
    "a stray file": (
        {"train.jsonl": GOOD, "other.jsonl": GOOD},
        "`other.jsonl` belongs to no split, and `train.jsonl` to train",
    ),
    "a stray file after it": (
        {"dev.jsonl": GOOD, "rows.jsonl": GOOD},
        "`rows.jsonl` belongs to no split, and `dev.jsonl` to validation",
    ),
    "two meanings": ({"train-test.jsonl": GOOD}, "belongs to test and train"),
    "a broken file": ({"a.jsonl": GOOD, "b.jsonl": GOOD + b"{\n"}, "b.jsonl:2: invalid JSON"),
    "tests alone": ({"test.jsonl": GOOD}, "no split `train`; found `test`"),
    "an empty saved dataset": ({"state.json": b"{}", "dataset_info.json": b"{}"}, "`_data_files` is missing"),
    "a saved dataset of other files": ({"state.json": b'{"_data_files": [{"filename": "a.txt"}]}'}, "no Arrow file"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_malformed_folder_is_one_located_error(kind: str, tmp_path: Path) -> None:
    files, words = FOLDERS[kind]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (problem,) = find_problems(tmp_path)
    assert words in str(problem)


def test_unreadable_file_is_located_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    source = load_source(str(path))
    with pytest.raises(DataError, match=r"d\.jsonl: cannot be read: Permission denied"):
        list(read_source(source))
    with pytest.raises(DataError, match="Permission denied"):
        source.fingerprint()


def test_overlong_line_is_located_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes_lib.data.sources.readers.MAX_LINE_BYTES", 100)
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD + b'{"text": "' + b"a" * 100)
    with pytest.raises(DataError, match=r"d\.jsonl:2: a line longer than 100 bytes"):
        list(read_source(load_source(str(path))))


@pytest.mark.parametrize("suffix", [*READERS, *(f".jsonl{suffix}" for suffix in COMPRESSIONS)])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300) | st.text(alphabet='{}[]",:\\ntu0\n\r é\0', max_size=60).map(str.encode))
def test_random_bytes_give_rows_or_data_error(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"d{suffix}"
    path.write_bytes(content)
    find_problems(path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(PARQUET) - 1), damage=st.binary(min_size=1, max_size=8))
def test_damaged_parquet_gives_rows_or_data_error(position: int, damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(PARQUET[:position] + damage + PARQUET[position + len(damage) :])
    find_problems(path)


SMALL_ARROW = arrow(pa.table({"messages": [[user(), assistant()]] * 3, "score": [0.5, None, 2.0]}))


@pytest.mark.parametrize("damage", [b"\xff" * 4, b"\x00\x00\x00\x80", b"\x00\x00\x00\x10\x00\x00\x00\x10"])
def test_damaged_arrow_length_or_offset_gives_rows_or_data_error(damage: bytes, tmp_path: Path) -> None:
    for position in range(0, len(SMALL_ARROW), 4):
        path = tmp_path / "d.arrow"
        path.write_bytes(SMALL_ARROW[:position] + damage + SMALL_ARROW[position + len(damage) :])
        find_problems(path)


def test_damaged_saved_dataset_gives_rows_or_data_error(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).save_to_disk(str(tmp_path))
    (path,) = tmp_path.glob("*.arrow")
    whole = path.read_bytes()
    for position in range(0, len(whole), 4):
        path.write_bytes(whole[:position] + b"\x00\x00\x00\x80" + whole[position + 4 :])
        find_problems(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "function", "type"]), values
        )
    ),
    max_leaves=8,
)
COLUMNS = ("messages", "prompt", "completion", "text", "conversations", "instruction", "input", "output", "history")
COLUMNS += ("chosen", "rejected", "system", "tools", "chat_template_kwargs")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.dictionaries(st.sampled_from(COLUMNS), JSON))
def test_random_object_gives_row_or_data_error(row: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(line(row))
    assert all(problem.where == f"{path}:1" for problem in find_problems(path))
