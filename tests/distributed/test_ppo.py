"""Two processes of uneven answers train as one does, in either layout, and stop together: an epoch, and the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.rl import keys_task

SHORT: dict[str, Any] = {
    "max_steps": 12,
    "per_device_eval_batch_size": 3,
    "save_strategy": "steps",
    "save_steps": 4,
    "num_sample_prompts": 2,
    "learning_rate": 3e-4,
}
RUNS: dict[str, dict[str, Any]] = {
    "models": SHORT | {"kl_target_per_sequence": 0.5, "kl_horizon": 100},
    "adapters": SHORT | {"use_peft": True},
    # A target that only some minibatches keep.
    "early_stop": SHORT | {"target_kl": 1e-4, "num_ppo_epochs": 3, "max_steps": 12},
}
CLOCKS = ("time/", "_per_s", "seconds", "memory")


@pytest.mark.multiprocess
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    policy = keys_task.write_policy(tmp_path / "policy", 0, num_steps=30)
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 100, seed=5)

    def build(name: str, place: str, batch_size: int) -> list[str]:
        keys = {**RUNS[name], "per_device_train_batch_size": batch_size}
        return keys_task.build_flags(policy, tmp_path / place / name, prompts, **keys)

    jobs = [*(build(name, "two", 4) for name in RUNS), build("adapters", "stopped", 4)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [keys_task.__file__, json.dumps(jobs), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    for name in RUNS:
        keys_task.train(build(name, "one", 8))
        one, two = (tmp_path / place / name for place in ("one", "two"))
        for kind in ("train", "eval"):
            for expected, got in zip(keys_task.read_metrics(one, kind), keys_task.read_metrics(two, kind), strict=True):
                assert expected.keys() == got.keys()
                for figure, value in expected.items():
                    if figure != "kind" and not any(part in figure for part in CLOCKS):
                        assert got[figure] == pytest.approx(value, rel=1e-3, abs=1e-4), f"{name}: {figure}"
        last = max(event["step"] for event in keys_task.read_metrics(one))
        for learner in ("policy", "critic"):
            weights = [load_file(run / f"checkpoint-{last}" / f"{learner}.safetensors") for run in (one, two)]
            for key, value in weights[0].items():
                torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-5)
    # The second rank alone was asked, in the second iteration: the first one was saved, and no digit is another.
    stopped, two = (tmp_path / place / "adapters" for place in ("stopped", "two"))
    assert json.loads((stopped / "run.json").read_text())["resumed_from"] == "checkpoint-4"
    for learner in ("policy", "critic"):
        weights = [load_file(run / "checkpoint-12" / f"{learner}.safetensors") for run in (two, stopped)]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    updates = [event["policy/num_updates"] for event in keys_task.read_metrics(tmp_path / "one" / "early_stop")]
    assert 0 < min(updates) < 6
