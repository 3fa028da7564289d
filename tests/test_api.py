"""The library from Python does what the recipes do, and tells what is wrong by exceptions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import recipes_lib
from recipes_lib import check, load_run, train
from recipes_lib.errors import ConfigError


@pytest.fixture
def keys(tiny_model_dir: Path, tmp_path: Path) -> dict[str, object]:
    rows = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(16)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "model_name_or_path": str(tiny_model_dir),
        "dataset_name": str(tmp_path / "chats.jsonl"),
        "prepared_dir": str(tmp_path / "prepared"),
        "output_dir": str(tmp_path / "run"),
        "max_length": 64,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "test_split_size": 4,
        "eval_steps": 1,
        "eval_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
    }


def test_train_returns_the_run_with_its_metrics_and_its_model(keys: dict[str, object], tmp_path: Path) -> None:
    assert check("sft", keys) == []
    run = train("sft", keys, learning_rate=1e-3)
    losses = [event["loss"] for event in run.metrics if event["kind"] == "train"]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert [event["step"] for event in run.metrics] == sorted(event["step"] for event in run.metrics)
    assert run.facts["config"]["learning_rate"] == 1e-3
    assert load_file(run.path / "model.safetensors")
    again = train("sft", keys, learning_rate=1e-3)
    assert (again.facts, again.metrics) == (run.facts, run.metrics)
    assert load_run(str(tmp_path / "run")).metrics == run.metrics


def test_a_file_and_overrides_are_as_on_the_command_line(keys: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    assert check("lora", path, lora_target_modules=["q_proj"], max_steps=3) == []
    (problem,) = check("sft", path, learnin_rate=1)
    assert problem.where == "--learnin_rate"
    with pytest.raises(ConfigError, match="learnin_rate"):
        train("sft", path, learnin_rate=1)
    with pytest.raises(ConfigError, match="there is no recipe 'sfd'"):
        train("sfd", path)


def test_importing_the_library_loads_nothing_heavy() -> None:
    script = "import sys, recipes_lib; recipes_lib.train; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        recipes_lib.trian  # noqa: B018
