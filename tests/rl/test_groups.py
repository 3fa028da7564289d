"""Comparison of PPO, RLOO and GRPO by ``benchmarks/neighbours.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rl import arithmetic_task

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "neighbours.py"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folder of problems, and of a policy that solves half of them."""
    folder = tmp_path_factory.mktemp("arithmetic")
    rows = arithmetic_task.write_problems(folder, 0)
    return folder, arithmetic_task.write_policy(folder / "policy", rows, 0)


@pytest.mark.slow
def test_comparison_uses_equal_answers_and_steps_for_all_recipes(task, tmp_path):
    folder, policy = task
    output = tmp_path / "neighbours.json"
    command = [sys.executable, str(BENCHMARK), "--policy", str(policy), "--prompts", str(folder / "train.jsonl")]
    command += ["--held_out", str(folder / "held_out.jsonl"), "--reward", "recipes_lib.rl.verifiers:final_number"]
    command += ["--answers", "256", "--response_length", "8", "--learning_rate", "1e-3", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(output.read_text())["measurements"]
    assert set(runs) == {"ppo", "rloo", "grpo"}
    figures = [{key: run[key] for key in ("num_answers", "num_steps", "before")} for (run,) in runs.values()]
    assert figures == [{"num_answers": 256, "num_steps": 16, "before": figures[0]["before"]}] * 3
