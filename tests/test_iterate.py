"""The script of iterated RLHF goes two rounds round on a tiny policy, which earns more after them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rl import keys_task

SCRIPT = Path(__file__).parents[1] / "docs" / "iterate.sh"


@pytest.mark.slow
def test_two_rounds_raise_the_reward_and_the_same_command_does_no_more(tmp_path):
    policy = keys_task.write_policy(tmp_path / "policy", 0)
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 400, seed=5)
    shared = {"bf16": "false", "use_cpu": "true", "model_name_or_path": policy, "output_dir": tmp_path / "unused"}
    sampling = {
        **shared,
        "dataset_name": prompts,
        "reward_funcs": "[tests.rl.keys_task:score_first_key]",
        "response_length": keys_task.MAX_ANSWER,
        "per_device_eval_batch_size": 64,
    }
    training = {
        **shared,
        "dataset_name": prompts,
        "prepared_dir": tmp_path / "prepared",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 32,
        "num_train_epochs": 6,
        "beta": 0.1,
        "save_strategy": "no",
    }
    for name, keys in (("ppo", sampling), ("dpo", training)):
        text = "".join(
            f"{key}: {json.dumps(str(value)) if isinstance(value, Path) else value}\n" for key, value in keys.items()
        )
        (tmp_path / f"{name}.yaml").write_text(text)
    out = tmp_path / "out"
    bin_dir = Path(sys.executable).parent
    environment = {**os.environ, "OUT": str(out), "ROUNDS": "2", "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), str(policy), str(tmp_path / "ppo.yaml"), str(tmp_path / "dpo.yaml")]

    def go():
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=SCRIPT.parents[1]
        )

    done = go()
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads((out / f"pairs-{n}.jsonl.record.json").read_text()) for n in (1, 2)]
    means = [record["score_sum"] / record["num_answers"] for record in records]
    assert means[1] > means[0] + 0.1
    before = [(out / f"pairs-{n}.jsonl").read_bytes() for n in (1, 2)]
    assert go().returncode == 0
    assert [(out / f"pairs-{n}.jsonl").read_bytes() for n in (1, 2)] == before
