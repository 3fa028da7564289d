"""Differences in pairs: what is better is called so only where the interval says it, and the interval covers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from recipes_lib.errors import DataError
from recipes_lib.evaluation.compare import compare_folders, compute_interval, format_rows


def write(folder: Path, scores: Sequence[float], metric: str = "acc", prompt: str = "p", *, rises: bool = True) -> Path:
    folder.mkdir()
    rows = [
        {"task": "t", "doc_id": at, "filter": "none", "scores": {metric: score}, "doc_hash": "d", "prompt_hash": prompt}
        for at, score in enumerate(scores)
    ]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "eval.json").write_text(json.dumps({"tasks": {"t": {"higher_is_better": {metric: rises}}}}))
    return folder


def test_pairs_show_what_separate_intervals_hide(tmp_path: Path) -> None:
    """One question in twenty more is right, of questions most of which both answer alike."""
    base = [float(at % 2) for at in range(200)]
    more = [1.0 if at in range(0, 40, 4) else score for at, score in enumerate(base)]
    (row,) = compare_folders([write(tmp_path / "a", base), write(tmp_path / "b", more)])
    assert (row.verdict, row.num_questions) == ("better", 200)
    assert row.other - row.base == pytest.approx(0.05)
    assert 0 < row.low < 0.05 < row.high
    (back,) = compare_folders([tmp_path / "b", tmp_path / "a"])
    assert back.verdict == "worse"
    (none,) = compare_folders([tmp_path / "a", tmp_path / "a"])
    assert (none.verdict, none.low, none.high) == ("same", 0, 0)


def test_chance_is_called_the_same(tmp_path: Path) -> None:
    drawn = np.random.default_rng(1)
    paths = [write(tmp_path / name, drawn.integers(0, 2, 60).astype(float).tolist()) for name in "ab"]
    (row,) = compare_folders(paths)
    assert row.verdict == "same"
    assert row.low < 0 < row.high


def test_of_a_loss_less_is_better(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a", [2.0, 3.0] * 20, "bpb", rises=False),
        write(tmp_path / "b", [1.9, 2.9] * 20, "bpb", rises=False),
    ]
    (row,) = compare_folders(paths)
    assert row.verdict == "better"


def test_other_prompts_are_not_compared(tmp_path: Path) -> None:
    rows = compare_folders([write(tmp_path / "a", [1.0, 0.0]), write(tmp_path / "b", [1.0, 1.0], prompt="q")])
    assert [row.verdict for row in rows] == ["not comparable"]
    assert "asked by other prompts" in "\n".join(format_rows(rows))


@pytest.mark.parametrize("text", ["{", "{}", '{"task": 3}', "[]"])
def test_a_folder_without_an_evaluation_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"has no samples\.jsonl"):
        compare_folders([tmp_path, tmp_path])
    write(tmp_path / "a", [1.0])
    (tmp_path / "a" / "samples.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"samples.jsonl:1.* is "):
        compare_folders([tmp_path / "a", tmp_path / "a"])


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    drawn = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = compute_interval(drawn.choice([-1.0, 0.0, 1.0], 80, p=[0.1, 0.6, 0.3]))
        covered += low <= 0.2 <= high
    # Binomial with 0.95: 4.5 standard errors below; 100 % would be an interval that says nothing.
    assert 0.88 <= covered / 200 < 1


def test_one_question_shows_nothing() -> None:
    assert compute_interval(np.array([1.0])) == (-np.inf, np.inf)
