"""Parsing of YAML documents: line numbers, syntax errors, encodings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes_lib.config.loader import load_config
from recipes_lib.config.values import compose, read_entries, read_text
from recipes_lib.errors import ConfigError, Problem


def entries_and_problems(text: str):
    problems: list[Problem] = []
    return read_entries(text, "f.yaml", problems), problems


def test_entries_have_line_numbers() -> None:
    entries, problems = entries_and_problems("# comment\na: 1\n\nb:\n  - x\n  - y\n")
    assert not problems
    assert [(entry.key, entry.where) for entry in entries] == [("a", "f.yaml:2"), ("b", "f.yaml:4")]
    assert entries[1].locate(entries[1].node.value[1]) == "f.yaml:6"


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", 1, "empty"),
        ("---\n", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("- a\n- b\n", 1, "list"),
        ("hello\n", 1, "single value"),
        ("a: 1\n\tb: 2\n", 2, "'\\t'"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "expected"),
        ("a: 1\nb: c: d\n", 2, "mapping values"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: &x 1\nb: *x\n", 2, "alias"),
        ("a: &x {c: 1}\nb:\n  <<: *x\n", 3, "merge key"),
        ("a: 1\nb: {<<: {c: 1}}\n", 2, "merge key"),
        ("a: 1\nb: !!str 2\n", 2, "tag !!str"),
        ("a: 1\nb: [!!int '2']\n", 2, "tag !!int"),
        ("a: 1\nb: !own {c: 1}\n", 2, "tag !own"),
        ("!!map\na: 1\n", 1, "tag !!map"),
        ("seed: !!python/object:os.system 1", 1, "tag !!python"),
        ("a: 1\nb: \x07\n", 2, "#x0007"),
        ('a: 1\nb: "\\U99999999"\n', 2, "escape"),
        ('a: 1\nb: ["\\ud83d hi"]\nc: 1\n', 2, "an unpaired surrogate"),
        ('a: 1\nb: "\\ude00\\ud83d"\n', 2, "an unpaired surrogate"),
        ('a: 1\nb: ["runs/a\\0b"]\n', 2, "a NUL character"),
        ("a: 1\n? [x]\n: 2\n", 2, "list or a mapping"),
        ("a: 1\nb: 2\na: 3\n", 3, "repeated"),
        ("a: 1\nb: " + "[" * 40 + "]" * 40, 2, "levels deep"),
    ],
)
def test_document_must_be_one_flat_mapping(text: str, line: int, word: str) -> None:
    _, problems = entries_and_problems(text)
    assert [problem.where for problem in problems] == [f"f.yaml:{line}"]
    assert word in problems[0].found
    assert problems[0].remedy


@pytest.mark.parametrize(
    ("text", "line", "remedy"),
    [
        ("a: 1\nb:2\nc: 3\n", 2, "a blank after the colon"),
        ("a: 1\nb = 2\n", 2, "a blank after the colon"),
        ("a:1\nb: 2\n", 2, "as on the line before"),
        ("a: x\n  b: 2\n", 2, "at the left margin"),
        (" a: 1\nb: 2\n", 2, "at the left margin"),
        ("[a]\nb = 1\n", 2, "one `key: value` a line"),
        ('{"a": 1}\n{"a": 2}\n', 2, "one `key: value` a line"),
        ("a:\n    b: 1\n  c: 2\n", 3, "the same number of blanks"),
        ("a: 1\nb: 'x\nc: 3\nd: 4\n", 2, "close the quote"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "the bracket of line 2"),
        ("a: 1\nb: {c: ${d.output}}\n", 2, 'contains braces, as in "${sft.output}"'),
        ("a: 1\nb: @x\n", 2, "quote a value"),
        ("a: 1\nb: %x\n", 2, "quote a value"),
        ("a: 1\nb: *\n", 2, "quote a value"),
        ('a: 1\nb: "C:\\Users"\n', 2, "single quotes"),
        ('a: 1\nb: "C:\\models"\n', 2, "single quotes"),
        ("a: 1\n".encode("utf-16-le").decode(), 1, "UTF-16"),
    ],
)
def test_syntax_error_has_line_and_remedy(text: str, line: int, remedy: str) -> None:
    _, problems = entries_and_problems(text)
    assert [problem.where for problem in problems] == [f"f.yaml:{line}"]
    assert remedy in problems[0].remedy


@pytest.mark.parametrize("text", ["\U0001f600 hi", "é", "plain", "\U0010ffff\U00010000"])
def test_json_text_round_trips(text: str) -> None:
    node = compose(json.dumps([text]), "--key", [])
    assert [item.value for item in node.value] == [text]


def test_alias_expansion_bomb_is_refused() -> None:
    bomb = "a: &a [x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    problems: list[Problem] = []
    compose(bomb, "f.yaml", problems)
    assert {problem.found for problem in problems} == {"the value is an alias (*name)"}
    assert len(problems) == 40, "one for each, so that none was expanded"


def test_unsupported_yaml_does_not_hide_other_problems(write, minimal_text: str) -> None:
    """An alias is no value, so that nothing else is reported about its key."""
    extra = "seed: &s 3\ndata_seed: *s\nlora_r: !!int 8\n<<: *s\ndataset_mixture: [{name: a/b, repeat: *s}]\nbogus: 1\n"
    with pytest.raises(ConfigError) as caught:
        load_config("lora", ["--config", str(write(minimal_text + extra))])
    first = minimal_text.count("\n") + 2
    found = {int(problem.where.rpartition(":")[2]): problem.found for problem in caught.value.problems}
    assert sorted(found) == [first, first + 1, first + 2, first + 4]


@pytest.mark.parametrize("kind", ["missing", "folder", "latin-1", "utf-16", "data", "/dev/zero"])
def test_unreadable_file_is_one_problem(tmp_path: Path, kind: str) -> None:
    path = Path(kind) if kind == "/dev/zero" else tmp_path / "f.yaml"
    if kind == "data":
        path.write_bytes(b"a: 1\n" * 10**6)
    if kind == "folder":
        path.mkdir()
    if kind == "latin-1":
        path.write_bytes("a: 1\nname: é\n".encode("latin-1"))
    if kind == "utf-16":
        path.write_bytes("a: 1\n".encode("utf-16"))
    problems: list[Problem] = []
    assert read_text(path, problems) is None
    line = {"latin-1": ":2", "utf-16": ":1"}.get(kind, "")
    assert [problem.where for problem in problems] == [f"{path}{line}"]


def test_utf8_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    problems: list[Problem] = []
    assert read_text(path, problems) == "a: 1\n"
