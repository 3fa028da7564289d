"""Questions and answers in public layouts, and mismatches between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.rows import write_rows

from recipes_lib.errors import DataError
from recipes_lib.evaluation.endpoint import Reply
from recipes_lib.evaluation.judge_questions import (
    Question,
    ask_questions,
    load_answers,
    load_questions,
    read_answers,
    read_question,
)

USER, SO = {"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}
KIND = {"role": "system", "content": "Be kind."}


def asked(*turns: str, id: str = "5", category: str | None = None, reference: Sequence[str] = ()) -> Question:
    return Question(id, category, [], list(turns), list(reference))


@pytest.mark.parametrize(
    ("row", "question"),
    [
        # MT-Bench, and as HuggingFaceH4/mt_bench_prompts.
        (
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "reference": ["r1", "r2"]},
            asked("Write.", "Shorter.", id="81", category="writing", reference=["r1", "r2"]),
        ),
        (
            {"category": "math", "prompt": ["One?", "Two?"], "reference": ["1"], "prompt_id": 1},
            asked("One?", "Two?", category="math", reference=["1"]),
        ),
        # Arena-Hard 0.1 and 2, AlpacaEval.
        (
            {"question_id": "f0", "category": "arena-hard-v0.1", "cluster": "ABC", "turns": [{"content": "Use é"}]},
            asked("Use é", id="f0", category="arena-hard-v0.1"),
        ),
        (
            {"uid": "0a", "category": "hard_prompt", "subcategory": "coding", "prompt": "Fix it."},
            asked("Fix it.", id="0a", category="hard_prompt"),
        ),
        ({"instruction": "Name three.", "output": "a b c", "generator": "g", "dataset": "d"}, asked("Name three.")),
        ({"instruction": "Add.", "input": "1 2"}, asked("Add.\n\n1 2")),
        ({"question": "How?", "reference": "So."}, asked("How?", reference=["So."])),
        ({"question": "How many?", "reference": 72}, asked("How many?", reference=["72"])),
        ({"turns": ["a", "b"], "reference": ["", "r2"]}, asked("a", "b", reference=["", "r2"])),
        ({"turns": ["a", "b"], "reference": ["", ""]}, asked("a", "b")),
        ({"messages": [KIND, USER, SO]}, Question("5", None, [KIND], ["How?"], ["So."])),
        ({"messages": [USER], "input": "x"}, asked("How?")),
        ({"question": "Why?", "messages": [USER]}, asked("Why?")),
        ({"question": "Why?", "prompt": ["a"]}, asked("Why?")),
        ({"prompt": [USER], "id": 0}, asked("How?", id="0")),
        ({"messages": [USER, {**SO, "content": "No."}], "reference": "So."}, asked("How?", reference=["So."])),
        ({"messages": [{**USER, "content": [{"type": "text", "text": part} for part in ("How", "?")]}]}, asked("How?")),
    ],
)
def test_read_question_of_public_formats(row: dict[str, Any], question: Question) -> None:
    assert read_question(row, 5, "w") == question


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"text": "x"},
        {"prompt": " "},
        {"turns": []},
        {"turns": ["a", " "]},
        {"prompt": 3},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "assistant", "content": "So."}]},
        {"prompt": []},
        {"prompt": ["a", 3]},
    ],
)
def test_row_without_question_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="w: has no question"):
        read_question(row, 0, "w")


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"question_id": 81, "model_id": "m", "choices": [{"index": 0, "turns": ["One.", "Two."]}]}, ["One.", "Two."]),
        ({"choices": [{"turns": [{"content": "One.", "token_len": 2}]}]}, ["One."]),
        ({"messages": [USER, {"role": "assistant", "content": {"answer": "So."}}]}, ["So."]),
        ({"output": "So."}, ["So."]),
        ({"answers": ["One.", ""]}, ["One.", ""]),
    ],
)
def test_read_answers_of_public_formats(row: dict[str, Any], answers: list[str]) -> None:
    assert read_answers(row, "w") == answers


def test_answers_are_matched_by_id(tmp_path: Path) -> None:
    questions = load_questions(write_rows(tmp_path / "q.jsonl", ({"id": name, "prompt": name} for name in "abc")), 2)
    rows = [{"id": name, "answer": name * 2} for name in "cba"]
    assert load_answers(write_rows(tmp_path / "a.jsonl", rows), questions) == [["aa"], ["bb"]]


def test_answers_without_ids_are_matched_by_row_if_it_has_the_same_question(tmp_path: Path) -> None:
    rows = [{"instruction": text, "output": text * 2} for text in "abc"]
    questions = load_questions(write_rows(tmp_path / "q.jsonl", rows), 2)
    assert load_answers(tmp_path / "q.jsonl", questions) == [["aa"], ["bb"]]
    bare = [{"output": row["output"]} for row in rows]
    assert load_answers(write_rows(tmp_path / "a.jsonl", bare), questions) == [["aa"], ["bb"]]
    with pytest.raises(DataError, match=r":1: has no id, and is not about question 0 of the same row"):
        load_answers(write_rows(tmp_path / "a.jsonl", rows[::-1]), questions)
    # Row 1, counted from 0, is not the answer to question 1.
    numbered = [Question(str(number), None, [], ["?"]) for number in (1, 2)]
    with pytest.raises(DataError, match="has no id, and is not about question 1 of the same row"):
        load_answers(write_rows(tmp_path / "a.jsonl", bare), numbered)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"id": "a", "answer": "x"}], "1 of 2 questions have no answer: b"),
        ([{"id": "a", "answer": "x"}, {"id": "b", "answer": "x"}, {"id": "b", "answer": "y"}], "same id: b"),
        ([{"id": "a", "answer": "x"}, {"id": "b", "answers": ["x", "y"]}], "2 answers to a question of 1 turns"),
        ([{"id": "a", "answer": "x"}, {"id": "b"}], "has no answer"),
        ([{"answer": "x"}, {"id": "b", "answer": "x"}], r":1: has no id, and is not about question a"),
        ([], "missing or empty"),
    ],
)
def test_mismatched_answers_are_refused(tmp_path: Path, rows: list[Any], found: str) -> None:
    questions = [Question(name, None, [], ["?"]) for name in "ab"]
    with pytest.raises(DataError, match=found):
        load_answers(write_rows(tmp_path / "a.jsonl", rows), questions)


@pytest.mark.parametrize("is_list", [True, False])
def test_list_of_alpaca_eval_equals_lines(tmp_path: Path, is_list: bool) -> None:
    rows = [{"instruction": f"Task {n}", "output": f"Done {n}", "generator": "m", "dataset": "d"} for n in range(3)]
    path = tmp_path / "alpaca_eval.json"
    path.write_text(json.dumps(rows, indent=2) if is_list else "\n".join(map(json.dumps, rows)))
    questions = load_questions(path, limit=2)
    assert [question.turns for question in questions] == [["Task 0"], ["Task 1"]]
    assert load_answers(path, questions) == [["Done 0"], ["Done 1"]]


def test_invalid_line_is_reported_with_number(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    for line, found in (("[1]", "is not a JSON object"), ('{"prompt": "\\ud83d"}', "holds half a surrogate pair")):
        path.write_text(f'{{"prompt": "\\ud83d\\ude00"}}\n{line}')
        with pytest.raises(DataError, match=rf"q\.jsonl:2: {found}"):
            load_questions(path)
    with pytest.raises(DataError, match="missing or empty"):
        load_questions(tmp_path / "absent.jsonl")


def test_invalid_questions_are_reported_together(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"text": "z"}]
    with pytest.raises(DataError) as caught:
        load_questions(write_rows(tmp_path / "q.jsonl", rows))
    found = [problem.found for problem in caught.value.problems]
    assert found == ["has no question", "several rows have the same id: a"]


class CountingEngine:
    """Engine whose answer is the number of messages that it received."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.numbers: list[int] = []

    def answer(self, chats: Any, numbers: Any) -> list[Reply]:
        self.asked += chats
        self.numbers += numbers
        return [Reply(f"after {len(chat)}", is_finished=len(chat) < 4) for chat in chats]

    def describe(self) -> dict[str, Any]:
        return {}


def test_second_turn_includes_first_answer() -> None:
    engine, system = CountingEngine(), {"role": "system", "content": "Be kind."}
    questions = [Question("a", None, [system], ["One", "Two"]), Question("b", None, [], ["Three"])]
    answers, num_cut = ask_questions(engine, questions, [10, 11])
    assert (answers, num_cut) == ([["after 2", "after 4"], ["after 1"]], [1, 0])
    assert engine.asked[-1] == [
        system, {"role": "user", "content": "One"}, {"role": "assistant", "content": "after 2"},
        {"role": "user", "content": "Two"},
    ]  # fmt: skip
    assert len(set(engine.numbers)) == 3, "each answer has a seed of its own"
