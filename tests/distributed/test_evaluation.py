"""Evaluation on two ranks, compared with one process: held-out metrics, named datasets, benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.distributed import sharding
from tests.distributed.cells import FULL_PRECISION, assert_same_run, build_jobs
from tests.evaluation.conftest import write_tasks
from tests.faults import recipe_runs
from tests.rows import read_rows


@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", ["sft", pytest.param("distill", marks=pytest.mark.slow)])
def test_named_datasets_and_benchmarks_match_one_process(inputs: Path, tmp_path: Path, recipe: str) -> None:
    tasks = write_tasks(tmp_path)
    recipe_runs.write_chats(tmp_path / "web.jsonl", range(200, 207))
    named = {"eval_datasets": json.dumps({"web": str(tmp_path / "web.jsonl")})}
    benchmarks = {
        "eval_tasks": '["local_choice", "local_written"]',
        "eval_tasks_include_path": json.dumps([str(tasks)]),
    }
    cells = {
        "sft": ("sft", 4, named | benchmarks | {"eval_tasks_steps": 3}),
        "distill": ("distill", 4, named | {"test_split_size": "null"}),
    }
    cells = {recipe: cells[recipe]}
    one = sharding.run_jobs(build_jobs(inputs, cells, 1), tmp_path / "one")
    two = sharding.run_jobs(build_jobs(inputs, cells, 2), tmp_path / "two", "cpu_ddp", *FULL_PRECISION)
    assert {*one["codes"].values(), *two["codes"].values()} == {0}, (one, two)
    assert_same_run(tmp_path / "one" / recipe, tmp_path / "two" / recipe)
    events = read_rows(tmp_path / "two" / recipe / "metrics.jsonl")
    assert any("eval_web_loss" in event for event in events)
    for name in () if recipe == "distill" else ("eval_local_choice_acc", "eval_local_written_exact_match"):
        assert [event["step"] for event in events if name in event] == [0, 3]
