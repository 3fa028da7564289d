"""HTML page of an evaluation: scores, questions, verdicts and escaping."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipes_lib.errors import DataError
from recipes_lib.report.html_pages import MAX_QUESTIONS, MAX_TEXT, classify_answer, write_eval_report

EVIL = "<script>alert(1)</script>"


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    scores = {"acc": {"value": 0.5, "stderr": 0.1}, "bpb": {"value": 1.25, "stderr": None}}
    task = {"scores": scores, "num_questions": 2, "num_fewshot": 0, "num_cut": 1, "num_empty": 0, "num_reasoning": 2}
    record = {
        "model": {"name": EVIL, "fingerprint": "f"},
        "tasks": {"t": task},
        "groups": {"g": {"scores": {"acc": scores["acc"]}, "num_questions": 2, "num_fewshot": 0}},
    }
    (folder / "eval.json").write_text(json.dumps(record))
    defaults = {
        "task": "t",
        "doc_id": 0,
        "choices": [],
        "answers": [EVIL],
        "target": "x",
        "scores": {"acc": 1.0},
        "is_cut": False,
    }
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(defaults | row)}\n" for row in rows))
    return write_eval_report(folder).read_text()


def test_eval_page_shows_scores_questions_and_verdicts(tmp_path: Path) -> None:
    choice = {
        "choices": [" a", " b"],
        "answers": [[-1.5, False], [-2.5, True]],
        "scores": {"acc": 0.0, "acc_norm": 1.0},
    }
    page = write(tmp_path, [{"prompt": "x" * (MAX_TEXT + 7) + EVIL}, {"prompt": "Q", **choice}])
    assert "0.5000" in page
    assert "0.1960" in page
    assert "-1.500" in page
    assert re.findall(r'<article data-task="t" class="(\w+)">', page) == ["right", "wrong"]
    assert "1 truncated prompts, 0 empty answers and 2 answers scored with their reasoning, of 2 questions" in page
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert") >= 3
    assert "x" * (MAX_TEXT + 1) not in page
    assert "http" not in re.sub(r"http-equiv", "", page)


def test_eval_page_limits_number_of_questions(tmp_path: Path) -> None:
    page = write(tmp_path, [{"prompt": "q", "doc_id": at} for at in range(MAX_QUESTIONS + 3)])
    assert page.count("<article") == MAX_QUESTIONS


def test_eval_page_is_bounded_for_many_tasks_and_long_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes_lib.report.html_pages.MAX_SHOWN", 2)
    long = "x" * (MAX_TEXT + 1)
    page = write(tmp_path, [{"prompt": "q", "doc_id": at, "answers": [long], "target": long} for at in range(4)])
    assert page.count("<article") == 2
    assert "The first 2 of each task" in page
    assert "1 task;" in page
    assert long not in page


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [({"acc": 1.0}, "right"), ({"em": 0}, "wrong"), ({"bpb": 1.3}, ""), ({"f1": 0.5, "em": 1}, "right")],
)
def test_verdict_is_first_binary_score(scores: dict[str, float], verdict: str) -> None:
    assert classify_answer({"scores": scores}) == verdict


def test_folder_without_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"eval\.json"):
        write_eval_report(tmp_path)
