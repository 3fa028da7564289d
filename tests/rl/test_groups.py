"""RLOO and GRPO learn from the rewards that the run asks for, and are compared with PPO on equal terms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rl import arithmetic_task, keys_task
from tests.rows import read_events

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "neighbours.py"


@pytest.mark.parametrize("recipe", ["rloo", "grpo"])
@pytest.mark.parametrize(("given", "penalty"), [(1.5, 1.5), ("null", 0.0)])
def test_what_a_policy_learns_from_is_less_the_penalty_of_the_run(
    policy_dir, prompts_file, tmp_path, capfd, recipe, given, penalty
):
    keys = {"max_steps": 1, "num_iterations": 1, "steps_per_generation": 1, "missing_eos_penalty": given, "beta": 0}
    keys_task.train(keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **keys), recipe)
    (event,) = read_events(tmp_path)
    missing = 1 - event["objective/finish_rate"]
    assert 0 < missing < 1
    assert event["reward"] == pytest.approx(event["objective/score"] - penalty * missing, abs=1e-5)
    # Without a KL penalty there is no reference, and so nothing to compare the policy with.
    told = capfd.readouterr()
    assert "generate and the policy differ" in told.out + told.err
    assert "reference" not in told.out + told.err


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Problems, and a policy that half knows the answers."""
    folder = tmp_path_factory.mktemp("arithmetic")
    rows = arithmetic_task.write_problems(folder, 0)
    return folder, arithmetic_task.write_policy(folder / "policy", rows, 0)


@pytest.mark.slow
def test_the_comparison_gives_every_recipe_as_many_answers_and_steps(task, tmp_path):
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
