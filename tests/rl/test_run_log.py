"""RunLog: contents of ``metrics.jsonl``, and rewinding of log files on resume."""

from __future__ import annotations

import json

import pytest
from transformers import TrainingArguments

from recipes_lib.rl.state import RLState
from recipes_lib.rl.trainer import RunLog


@pytest.fixture
def log(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    return RunLog(args, None, None, num_answers=8)


def read(tmp_path):
    def steps(name):
        return [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()]

    return steps("metrics.jsonl"), steps("samples.jsonl")


def write_all(log, state):
    log.write("train", state, {"loss": 1.0})
    log.samples.write({"step": state.step, "completion": "b"})
    log.write("eval", state, {"eval_reward": 0.5})


def test_metrics_are_written_with_counts_of_state(log, tmp_path):
    log.begin(RLState(), 8)
    log.write("train", RLState(iteration=2, step=4, num_answers=12, num_tokens=7), {"objective/score": float("nan")})
    (event,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    expected = {"kind": "train", "step": 4, "iteration": 2, "epoch": 1.5, "num_answers": 12, "num_tokens": 7}
    assert expected.items() <= event.items()
    assert event["objective/score"] == "nan"


@pytest.mark.parametrize(
    ("state", "metrics", "samples"),
    [
        (RLState(), [], []),
        (RLState(step=4, evaluated_step=4), [0, 0, 4, 4], [0, 4]),
        # Interrupted evaluation: its samples will be written again.
        (RLState(step=4), [0, 0, 4], [0]),
    ],
)
def test_resume_drops_records_after_state(log, tmp_path, state, metrics, samples):
    for step in (0, 4, 8):
        write_all(log, RLState(step=step))
    log.begin(state, 8)
    assert read(tmp_path) == (metrics, samples)
