"""Early stopping: record of the stop, and resume from the last checkpoint without further steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.distributed import sharding
from tests.faults import recipe_runs
from tests.rows import read_rows

# At this learning rate only fp32 weights near 0 change, and no loss, so no evaluation is better than the first.
CONSTANT = {
    "learning_rate": 1e-12,
    "eval_steps": 2,
    "save_steps": 2,
    "early_stopping_patience": 2,
    "save_total_limit": 9,
}


def run(inputs: Path, folder: Path, **keys: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    keys = recipe_runs.make_keys(inputs, "sft", **CONSTANT | keys, output_dir=folder)
    assert sharding.run_recipe("sft", keys) == 0
    return json.loads((folder / "run.json").read_text()), read_rows(folder / "metrics.jsonl")


def test_early_stopping_without_improvement(inputs: Path, tmp_path: Path) -> None:
    record, events = run(inputs, tmp_path / "run")
    evaluated = [event["step"] for event in events if event["kind"] == "eval"]
    # The first evaluation precedes the first step.
    assert max(event["step"] for event in events) == evaluated[2] < recipe_runs.NUM_STEPS
    assert record["status"] == "done"
    assert record["stopped_early"]["step"] == evaluated[2]
    assert record["stopped_early"]["best_step"] == evaluated[0]
    assert (tmp_path / "run" / "model.safetensors").exists()
    # Killed after the last checkpoint, before the end was recorded: no further step.
    sharding.cut(tmp_path / "run", tmp_path / "killed", evaluated[2])
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "killed")
    again, events_again = run(inputs, tmp_path / "killed")
    assert events_again == events
    assert (again["status"], again["stopped_early"]) == ("done", record["stopped_early"])
    # With more patience, training continues from the same checkpoint.
    sharding.cut(tmp_path / "run", tmp_path / "patient", evaluated[2])
    patient, further = run(inputs, tmp_path / "patient", early_stopping_patience=99)
    assert max(event["step"] for event in further) == recipe_runs.NUM_STEPS
    assert patient["stopped_early"] is None
