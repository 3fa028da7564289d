"""Reading `metrics.jsonl`, `samples.jsonl` and `run.json`, also of a killed run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from recipes_lib.report.run_files import find_non_finite_steps, read_curve, read_number, read_run
from recipes_lib.training.monitoring.metrics import MetricsWriter


def test_metrics_writer_output_round_trips(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step, loss in ((0, 2.5), (1, math.nan), (2, math.inf), (3, -math.inf), (4, 1.5)):
        writer.write({"kind": "train", "step": step, "loss": loss, "mfu": None})
    writer.write({"kind": "eval", "step": 4, "eval_loss": 1.25})

    run = read_run(tmp_path)

    assert read_curve(run.train, "loss") == [(0, 2.5), (4, 1.5)]
    assert find_non_finite_steps(run.train, "loss") == [1, 2, 3]
    assert read_curve(run.train, "mfu") == read_curve(run.train, "absent") == []
    assert read_curve(run.evaluations, "eval_loss") == [(4, 1.25)]
    assert run.num_torn_lines == 0


@pytest.mark.parametrize(
    "torn", ['{"kind": "train", "st', "[1]", "null", '{"loss": 1}', '{"step": "x"}', "\x00", "\udcff"]
)
def test_invalid_lines_are_counted_and_skipped(tmp_path: Path, torn: str) -> None:
    text = '{"kind": "train", "step": 1}\n' + torn + '\n\n{"kind": "train", "step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text, errors="surrogateescape")

    run = read_run(tmp_path)

    assert [event["step"] for event in run.train] == [1, 2]
    assert run.num_torn_lines == 1
    assert repr(run) == f"RunFiles(name={tmp_path.name!r}, path={tmp_path!r})"


def test_repeated_step_after_resume_keeps_last_record(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 3), (2, 9), (2, 2), (3, 1))]
    samples = [{"step": 2, "prompt": p, "completion": c} for p, c in (("a", "old"), ("b", "b"), ("a", "new"))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))

    run = read_run(tmp_path)

    assert read_curve(run.train, "loss") == [(1, 3), (2, 2), (3, 1)]
    assert [sample["completion"] for sample in run.samples] == ["new", "b"]


def test_only_named_values_of_training_steps_are_kept(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": 1, "loss": 2.0, "rare": 5}, {"kind": "eval", "step": 1, "eval_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "a", "completion": "b"}))
    run = read_run(tmp_path, ("step", "loss", "absent"))
    assert list(run.train) == [{"kind": "train", "step": 1, "loss": 2.0}]
    assert (list(run.evaluations), list(run.samples)) == ([lines[1]], [])


@pytest.mark.parametrize("value", ["high", None, True, [1], {"a": 1}])
def test_read_number_is_none_for_non_numbers(value: object) -> None:
    assert read_number({"loss": value}, "loss") is None


def test_read_number_of_huge_integer_is_infinite() -> None:
    assert read_number({"loss": 10**400}, "loss") == math.inf


def test_invalid_run_json_gives_no_facts(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"stage": "sf')

    assert read_run(tmp_path).facts == {}
