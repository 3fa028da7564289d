"""A run that is killed without warning and started again by the same command ends where it would have ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def start(output_dir, tiny_model_dir, data):
    keys = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": data,
        "test_split_size": 4,
        "output_dir": output_dir,
        "prepared_dir": data.parent / "prepared",
        "bf16": "false",
        "max_steps": 60,
        "save_steps": 5,
        "save_total_limit": 2,
        "per_device_train_batch_size": 2,
        "num_sample_prompts": 1,
        "sample_max_new_tokens": 2,
    }
    command = [sys.executable, str(ROOT / "recipes" / "sft.py"), *(f"--{name}={value}" for name, value in keys.items())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process):
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:]


def read_losses(path):
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["kind"] == "train"}


@pytest.mark.slow
@pytest.mark.parametrize("step", [12, 31])
def test_killed_at_any_step_the_same_command_ends_with_the_very_weights(tiny_model_dir, tmp_path, step):
    data = tmp_path / "chats.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}, yes. " * (n % 7)}]}
        for n in range(1, 120)
        if n % 7
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish(start(tmp_path / "straight", tiny_model_dir, data))

    killed = start(tmp_path / "killed", tiny_model_dir, data)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while killed.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            os.kill(killed.pid, signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    finish(start(tmp_path / "killed", tiny_model_dir, data))

    straight, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "killed"))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert read_losses(tmp_path / "straight" / "metrics.jsonl") == read_losses(metrics)
