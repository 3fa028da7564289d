"""Filtering of replies, and choice of rows and pairs by agreement and grade."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes_lib.commands.generated.candidates import (
    Answer,
    Candidate,
    filter_replies,
    find_failure,
    keep_graded,
    read_row_file,
    write_rows,
)
from recipes_lib.commands.generated.generation_methods import METHODS, SourceRow, load_method
from recipes_lib.commands.generated.row_filters import build_checks
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.errors import DataError
from recipes_lib.evaluation.judge_questions import Question

SOURCE = [SourceRow(f"f:{n}", text, Question(str(n), None, [], [text])) for n, text in enumerate(("2 + 2?", "3 + 3?"))]


def reply(number: int, *texts: str | None, **changes: Any) -> dict[str, Any]:
    answers = [
        {"text": text or "", "is_finished": text != "cut", "error": "too long" if text is None else None}
        for text in texts
    ]
    return {"number": number, "steps": {}, "failed": None, "answers": answers, **changes}


def run(
    tmp_path: Path, *replies: Any, method: str = "answers", **keys: Any
) -> tuple[list[Candidate], Counter[str], Any]:
    path = tmp_path / "replies.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in replies))
    config = SynthesisConfig(**{"num_candidates": len(replies), "method": method, **keys})
    removed, samples = Counter[str](), dict[str, Any]()
    candidates = list(filter_replies(load_method(config), SOURCE, build_checks(config), path, removed, samples))
    return candidates, removed, samples


def test_each_candidate_is_kept_or_counted_once(tmp_path: Path) -> None:
    candidates, removed, samples = run(
        tmp_path,
        reply(0, "4"),
        reply(1, "cut"),
        reply(0, ""),
        reply(1, None),
        reply(0, "I'm sorry, but I can't help with that."),
        reply(1, failed="no instruction in the reply"),
        reply(0, "again 4"),
        reply(1, "cut", "6"),
        num_answers=2,
    )
    kept = [(one.values["prompt"], [(answer.text, answer.place) for answer in one.answers]) for one in candidates]
    assert kept == [("2 + 2?", [("4", 0)]), ("3 + 3?", [("6", 1)])]
    assert removed == Counter(
        ["unfinished", "empty", "refused by the engine", "refusal", "no instruction in the reply", "near duplicate"]
    )
    assert samples["unfinished"][0]["answers"] == ["cut"]
    candidates, _, _ = run(tmp_path, reply(0, "4"), reply(1, "6"), num_candidates=1)
    assert [one.answers[0].text for one in candidates] == ["4"], "replies of an earlier, longer launch are ignored"


def test_near_duplicate_instructions_are_removed(tmp_path: Path) -> None:
    def write(number: int, text: str) -> dict[str, Any]:
        return reply(number, "So.", steps={"instruction": f"<instruction>{text}</instruction>"})

    candidates, removed, _ = run(
        tmp_path, write(0, "2 + 2?"), write(1, "Name a river."), write(2, "Name a river!"), write(3, "Name a sea."),
        write(4, "I'm sorry, but I can't help with that."), method="instructions",
    )  # fmt: skip
    assert [one.values["instruction"] for one in candidates] == ["Name a river.", "Name a sea."]
    assert removed == {"near duplicate": 2, "refusal": 1}
    kept, _, _ = run(
        tmp_path, write(0, "2 + 2?"), write(1, "2 + 2?"), method="instructions", near_duplicates_threshold=None
    )
    assert len(kept) == 2


def test_majority_answers_are_chosen(tmp_path: Path) -> None:
    candidates, removed, _ = run(
        tmp_path, reply(0, "it is 5", "it is 4", "so 4", "4"), reply(1, "1", "2", "3", "6"),
        num_answers=4, min_agreement=0.5,
    )  # fmt: skip
    (candidate,) = candidates
    assert (candidate.agreement, [one.agrees for one in candidate.answers]) == (0.75, [False, True, True, True])
    assert [one.place for one in candidate.find_extremes()] == [1, 0]
    assert removed == {"no agreement": 1}


@pytest.mark.parametrize(
    ("agrees", "grades", "extremes"),
    [
        ([True, True, True], [1.0, 3.0, 2.0], (1, 0)),
        ([True, True, True], [None, 3.0, 2.0], (1, 2)),
        ([True, False, True], [1.0, 9.0, 2.0], (2, 1)),
        ([True, True], [2.0, 2.0], (0, 0)),
        ([True, True], [None, None], (0, 0)),
    ],
)
def test_extremes_are_ordered_by_agreement_then_grade(agrees, grades, extremes) -> None:
    pairs = zip(agrees, grades, strict=True)
    answers = [Answer("x", place, agrees=one, grade=grade) for place, (one, grade) in enumerate(pairs)]
    assert tuple(answer.place for answer in Candidate({}, answers).find_extremes()) == extremes


def test_rows_have_provenance_and_pairs_two_answers(tmp_path: Path) -> None:
    config = SynthesisConfig(judge="j", num_answers=3, model_name_or_path="m", min_score=2.0)
    candidates, _, samples = run(tmp_path, reply(0, "four", "4", "five"), reply(1, "a"), num_answers=3)
    for answer, grade in zip([*candidates[0].answers, *candidates[1].answers], (5.0, 9.0, 1.0, 1.0), strict=True):
        answer.grade = grade
    removed: Counter[str] = Counter()
    ungraded = Candidate({}, [Answer("x", 0)])
    kept = [one for one in (*candidates, ungraded) if keep_graded(config, one, removed)]
    assert removed == {"low grade": 1, "no grade": 1}
    assert write_rows(load_method(config), kept, tmp_path, samples) == (1, 1)
    (row,), (pair,) = (list(read_row_file(tmp_path / name)) for name in ("rows.jsonl", "pairs.jsonl"))
    assert row["messages"] == [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert row["synthesis"] == {
        "method": "answers", "model": "m", "number": 0, "answer": 1, "source": ["f:0"], "grade": 9.0, "agreement": None,
    }  # fmt: skip
    assert [pair[side][0]["content"] for side in ("prompt", "chosen", "rejected")] == ["2 + 2?", "4", "five"]
    plain = yaml.safe_load((METHODS / "answers.yaml").read_text())
    plain["row"] = {"prompt": "{{ prompt }}", "completion": "{{ answer }}"}
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(plain))
    config = dataclasses.replace(config, method=str(tmp_path / "plain.yaml"))
    assert write_rows(load_method(config), candidates[:1], tmp_path, samples) == (1, 1)
    (pair,) = read_row_file(tmp_path / "pairs.jsonl")
    assert [pair[side] for side in ("prompt", "chosen", "rejected")] == ["2 + 2?", "4", "five"]
    assert write_rows(load_method(SynthesisConfig()), candidates, tmp_path, samples) == (4, 0)
    assert not (tmp_path / "pairs.jsonl").exists(), "pairs of an earlier launch are deleted"


@pytest.mark.parametrize(("reasoning", "content"), [("keep", "<think>\nHm.\n</think>\n\n4"), ("drop", "4")])
def test_reasoning_is_not_filtered(tmp_path: Path, reasoning: str, content: str) -> None:
    texts = ("<think>Hm.</think>4", "<think>I'm sorry, but I can't help you.</think>", "so 4")
    (candidate,), _, samples = run(tmp_path, reply(0, *texts), num_answers=3, min_agreement=0.5)
    assert [(one.text, one.place) for one in candidate.answers] == [("4", 0), ("so 4", 2)]
    config = SynthesisConfig(min_agreement=0.5, reasoning=reasoning)
    write_rows(load_method(config), [candidate], tmp_path, samples)
    (row,) = read_row_file(tmp_path / "rows.jsonl")
    assert row["messages"][-1]["content"] == content


def test_find_failure_returns_one_reason() -> None:
    step = {"name": "answer", "prompt": "p", "pattern": "<a>(.*)</a>"}
    status = {"error": None, "is_finished": True}
    reasons = {"<a>x</a>": None, "x": "no answer in the reply", " ": "empty"}
    reasons["<a>x\0</a>"] = "a NUL or half a surrogate pair"
    assert {text: find_failure(step, text, **status) for text in reasons} == reasons
    assert find_failure(step, "<a>x</a>", error=None, is_finished=False) == "unfinished"
    assert find_failure(step, "", error="400", is_finished=False) == "refused by the engine"


def test_broken_line_is_reported_with_number(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n{"a"')
    with pytest.raises(DataError, match=r"r\.jsonl:2"):
        list(read_row_file(tmp_path / "r.jsonl"))
