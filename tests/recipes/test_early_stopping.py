"""A run that gains nothing stops, says so, and when it is resumed there makes not a step more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.rows import read_rows

# At this rate no weight of float32 changes, so that no evaluation is better than the first.
STILL = {"learning_rate": 1e-30, "eval_steps": 2, "save_steps": 2, "early_stopping_patience": 2, "save_total_limit": 9}


def run(inputs: Path, folder: Path, **keys: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    keys = recipe_runs.make_keys(inputs, "sft", **STILL | keys, output_dir=folder)
    assert sharding.run_recipe("sft", keys) == 0
    return json.loads((folder / "run.json").read_text()), read_rows(folder / "metrics.jsonl")


def test_a_run_without_a_gain_stops_and_says_what_was_best(inputs: Path, tmp_path: Path) -> None:
    record, events = run(inputs, tmp_path / "run")
    evaluated = [event["step"] for event in events if event["kind"] == "eval"]
    # The first evaluation is made before the first step.
    assert max(event["step"] for event in events) == evaluated[2] < recipe_runs.NUM_STEPS
    assert record["status"] == "done"
    assert record["stopped_early"]["step"] == evaluated[2]
    assert record["stopped_early"]["best_step"] == evaluated[0]
    assert (tmp_path / "run" / "model.safetensors").exists()
    # Killed after the last checkpoint, before the end was written: nothing more is learnt.
    sharding.cut(tmp_path / "run", tmp_path / "killed", evaluated[2])
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "killed")
    again, events_again = run(inputs, tmp_path / "killed")
    assert events_again == events
    assert (again["status"], again["stopped_early"]) == ("done", record["stopped_early"])
    # With more patience the same checkpoint goes on.
    sharding.cut(tmp_path / "run", tmp_path / "patient", evaluated[2])
    patient, further = run(inputs, tmp_path / "patient", early_stopping_patience=99)
    assert max(event["step"] for event in further) == recipe_runs.NUM_STEPS
    assert patient["stopped_early"] is None


def test_a_run_that_gains_goes_on(inputs: Path, tmp_path: Path) -> None:
    record, events = run(inputs, tmp_path, learning_rate=1e-3, max_steps=4)
    assert max(event["step"] for event in events) == 4
    assert record["stopped_early"] is None
