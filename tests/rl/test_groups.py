"""Runs of RLOO and GRPO: penalty and metrics, and the comparison with PPO by ``benchmarks/neighbours.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rl import arithmetic_task, keys_task
from tests.rows import read_events

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "neighbours.py"


@pytest.mark.parametrize(("recipe", "missing_eos_penalty", "penalty"), [("rloo", 1.5, 1.5), ("grpo", "null", 0.0)])
def test_reward_metric_subtracts_missing_eos_penalty(
    policy_dir, prompts_file, tmp_path, capfd, recipe, missing_eos_penalty, penalty
):
    keys = {
        "max_steps": 1,
        "num_iterations": 1,
        "steps_per_generation": 1,
        "beta": 0,
        "missing_eos_penalty": missing_eos_penalty,
    }
    keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **keys), recipe)
    (event,) = read_events(tmp_path)
    missing = 1 - event["objective/finish_rate"]
    assert 0 < missing < 1
    assert event["reward"] == pytest.approx(event["objective/score"] - penalty * missing, abs=1e-5)
    # With beta 0 there is no reference model to compare the policy with.
    printed = capfd.readouterr()
    assert "generate and the policy differ" in printed.out + printed.err
    assert "reference" not in printed.out + printed.err


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
