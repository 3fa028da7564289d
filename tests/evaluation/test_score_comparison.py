"""Paired comparison of two evaluations, by question, task and group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api import metrics
from tests.rows import write_rows

from recipes_lib.errors import DataError
from recipes_lib.evaluation.score_comparison import Difference, compare_folders, format_rows


def write(
    folder: Path,
    scores: Sequence[Any] | Mapping[str, Sequence[float]],
    metric: str = "acc",
    prompt: str = "p",
    *,
    rises: bool = True,
    groups: Mapping[str, Any] | None = None,
) -> Path:
    tasks = scores if isinstance(scores, Mapping) else {"t": scores}
    defaults = {"filter": "none", "doc_hash": "d", "prompt_hash": prompt}
    rows = [
        {"task": task, "doc_id": at, "scores": {metric: score}, **defaults}
        for task, found in tasks.items()
        for at, score in enumerate(found)
    ]
    folder.mkdir()
    write_rows(folder / "samples.jsonl", rows)
    record = {"tasks": {task: {"higher_is_better": {metric: rises}} for task in tasks}, "groups": groups or {}}
    (folder / "eval.json").write_text(json.dumps(record))
    return folder


def test_paired_difference_detects_small_improvement(tmp_path: Path) -> None:
    """5 % more questions are right, most are answered alike: only the paired interval excludes zero."""
    base = [float(at % 2) for at in range(200)]
    more = [1.0 if at in range(0, 40, 4) else score for at, score in enumerate(base)]
    (row,) = compare_folders([write(tmp_path / "a", base), write(tmp_path / "b", more)])
    assert (row.verdict, row.num_questions) == ("better", 200)
    assert row.other - row.base == pytest.approx(0.05)
    assert 0 < row.low < 0.05 < row.high
    (back,) = compare_folders([tmp_path / "b", tmp_path / "a"])
    assert back.verdict == "worse"
    write(tmp_path / "first", base[:150])
    for folders in (("a", "first"), ("first", "a")):
        assert [row.num_questions for row in compare_folders([tmp_path / name for name in folders])] == [150]
    (none,) = compare_folders([tmp_path / "a", tmp_path / "a"])
    assert none.verdict == "same"
    assert -0.02 < none.low < 0 < none.high < 0.02


@pytest.mark.parametrize("num_questions", [1, 4, 12])
def test_scores_that_are_not_numbers_are_not_comparable(tmp_path: Path, num_questions: int) -> None:
    folder = write(tmp_path / "a", [float("nan"), *[1.0] * (num_questions - 1)])
    (row,) = compare_folders([folder, folder])
    assert row.verdict == "not comparable"
    assert row.describe()["low"] is None


def test_lower_loss_is_better(tmp_path: Path) -> None:
    losses = {"a": [2.0, 3.0] * 20, "b": [1.9, 2.9] * 20}
    (row,) = compare_folders([write(tmp_path / name, found, "bpb", rises=False) for name, found in losses.items()])
    assert row.verdict == "better"


def test_log_likelihoods_are_compared_as_losses(tmp_path: Path) -> None:
    """lm-eval records the log-likelihood of a question, or it and a number of words or bytes, and aggregates them."""
    drawn = np.random.default_rng(0)
    sizes, losses = drawn.integers(2, 9, 40).tolist(), -drawn.uniform(3, 9, 40)
    figures = {
        "perplexity": (metrics.perplexity, False, np.log),
        "word_perplexity": (metrics.weighted_perplexity, True, np.log),
        "bits_per_byte": (metrics.bits_per_byte, True, float),
    }
    for name, (aggregate, is_weighted, scale) in figures.items():
        items = {}
        for side, gain in (("a", 0.0), ("b", 0.2)):
            found = (losses * (1 - gain)).tolist()
            items[side] = list(zip(found, sizes, strict=True)) if is_weighted else found
        folders = [write(tmp_path / f"{side} {name}", found, name, rises=False) for side, found in items.items()]
        (row,) = compare_folders(folders)
        assert row.verdict == "better"
        assert (row.base, row.other) == pytest.approx([scale(aggregate(items[side])) for side in "ab"])
        assert row.metric == ("bits_per_byte" if scale is float else f"log {name}")


def test_differing_prompts_are_not_comparable(tmp_path: Path) -> None:
    rows = compare_folders([write(tmp_path / "a", [1.0, 0.0]), write(tmp_path / "b", [1.0, 1.0], prompt="q")])
    assert [row.verdict for row in rows] == ["not comparable"]
    assert "the prompts differ" in "\n".join(format_rows(rows))


@pytest.mark.parametrize("text", ["{", "{}", '{"task": 3}', "[]"])
def test_folder_without_valid_samples_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "prompt": "of a run"}\n')
    with pytest.raises(DataError, match=r"eval\.json: .*\n    name the output folders of `recipes eval`"):
        compare_folders([tmp_path, tmp_path])
    write(tmp_path / "a", [1.0])
    (tmp_path / "a" / "samples.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no samples\.jsonl"):
        compare_folders([tmp_path / "a", tmp_path / "a"])
    (tmp_path / "a" / "samples.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"samples.jsonl:1.* is "):
        compare_folders([tmp_path / "a", tmp_path / "a"])
    (write(tmp_path / "b", [1.0]) / "eval.json").write_text('{"tasks": {}, "groups": {}, "model": []}')
    with pytest.raises(DataError, match="one holds other values than an evaluation"):
        compare_folders([tmp_path / "b", tmp_path / "b"])


def test_group_is_compared_by_its_mean(tmp_path: Path) -> None:
    """The mean is over questions or over task means."""
    scores = {"a": {"x": [0.0] * 30, "y": [0.0] * 10}, "b": {"x": [1.0] * 30, "y": [0.0] * 10}}
    for name, is_weighted, mean in (("by size", True, 0.75), ("by task", False, 0.5)):
        groups = {"g": {"tasks": ["x", "y"], "is_weighted_by_size": is_weighted}}
        for each, found in scores.items():
            write(tmp_path / f"{each} {name}", found, groups=groups)
        rows = compare_folders([tmp_path / f"a {name}", tmp_path / f"b {name}"])
        assert [(row.task, row.num_questions, row.other, row.verdict) for row in rows] == [
            ("g", 40, pytest.approx(mean), "better"),
            ("x", 30, 1.0, "better"),
            ("y", 10, 0.0, "same"),
        ]


def test_rows_have_names_of_models_or_of_folders_if_equal(tmp_path: Path) -> None:
    folders = [write(tmp_path / folder, [1.0] * 8) for folder in "ab"]
    for names, shown in ((("x", "y"), "y"), (("x", "x"), str(folders[1])), ((None, "y"), str(folders[1]))):
        for folder, name in zip(folders, names, strict=True):
            record = json.loads((folder / "eval.json").read_text()) | {"model": {"name": name}}
            (folder / "eval.json").write_text(json.dumps(record))
        assert [row.model for row in compare_folders(folders)] == [shown]


def test_columns_of_the_table_fit_long_names() -> None:
    rows = [Difference(name, "acc", "m", 9, 0.0, 0.0, -0.1, 0.1, "same") for name in ("t" * 40, "mmlu")]
    head, *lines = format_rows(rows)
    assert {line.index("0.0000") + 6 for line in lines} == {head.index("base") + 4}


def test_infinite_interval_is_null_in_json() -> None:
    row = Difference("t", "acc", "m", 1, 0.0, 1.0, -np.inf, np.inf, "same")
    found = json.loads(json.dumps(row.describe(), allow_nan=False))
    assert found == {**row._asdict(), "low": None, "high": None}


def test_tasks_and_groups_that_one_lacks_are_left_out(tmp_path: Path) -> None:
    groups = {"g": {"tasks": ["t", "u"]}}
    whole = write(tmp_path / "whole", {"t": [1.0] * 8, "u": [0.0] * 8}, groups=groups)
    part = write(tmp_path / "part", {"t": [1.0] * 8}, groups=groups)
    assert [row.task for row in compare_folders([whole, part])] == ["t"]
    fewer = write(tmp_path / "fewer", {"t": [1.0] * 8, "u": [0.0] * 8}, groups={"g": {"tasks": ["t"]}})
    assert [row.task for row in compare_folders([whole, fewer])] == ["t", "u"]
    other = write(tmp_path / "other", {"v": [1.0] * 8})
    assert list(format_rows(compare_folders([whole, other])))[1:] == ["no task and metric that both have"]
