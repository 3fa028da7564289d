"""GRPO with a real colocated vLLM engine on a CPU: ``make test-vllm`` creates the environment and runs this."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from tests.forked import ROOT
from tests.rl import real_vllm
from tests.rows import read_events

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

VARIABLES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    real_vllm.write_inputs(folder)
    return folder


def run(folder, name, failing=0, num_processes=1, variables=(), **keys):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command = [
        sys.executable,
        *(launcher if num_processes > 1 else []),
        "-m",
        "tests.rl.real_vllm",
        folder,
        name,
        failing,
    ]
    given = [f"{key}={value}" for key, value in keys.items()]
    environment = os.environ | VARIABLES | dict(variables)
    return subprocess.run(
        [*map(str, command), *given],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def read_gaps(folder, name):
    return [float(line) for line in (folder / f"{name}.gaps").read_text().splitlines()]


def test_engine_failure_loses_one_iteration_and_weights_stay_current(folder):
    """Twenty iterations; the engine fails in the third, and the same command resumes after the second."""
    keys = {"num_sample_prompts": 0, "max_steps": 80}
    ended = run(folder, "run", failing=2 * 8 + 3, **keys)
    assert ended.returncode == 2, ended.stderr[-3000:]
    message = ended.stderr.split("use_vllm: ")[1]
    assert message.startswith("vLLM failed at sampling answers: EngineCore encountered an issue.\n")
    assert "run the same command to resume" in message
    assert "Traceback" not in message
    resumed = run(folder, "run", **keys)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "Traceback" not in resumed.stderr
    assert json.loads((folder / "run" / "run.json").read_text())["resumed_from"] == "checkpoint-8"
    gaps = read_gaps(folder, "run")
    assert len(gaps) == 20
    assert max(gaps) < 1e-3
    assert [event["step"] for event in read_events(folder / "run")] == list(range(4, 84, 4))
    # The policy must have moved, or stale weights would give equal log-probabilities.
    assert read_events(folder / "run")[-1]["kl"] > 0.01


@pytest.mark.parametrize(
    ("name", "keys"), [("adapter", {"use_peft": True, "learning_rate": 1e-2}), ("bf16", {"bf16": True})]
)
def test_engine_has_merged_adapter_or_bf16_weights(folder, name, keys):
    done = run(folder, name, **keys)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(read_gaps(folder, name)) < (1e-3 if name == "adapter" else 0.2)


@pytest.mark.parametrize("engine", ["", "FSDP"])
def test_each_of_two_processes_has_an_engine(folder, engine):
    variables = {}
    if engine:
        from tests.test_accelerate_configs import read_environment

        variables = read_environment(
            ROOT / "accelerate_configs" / "fsdp2.yaml", "--num_processes=2", "--mixed_precision=no"
        )
    done = run(folder, f"two{engine}", num_processes=2, variables=variables.items(), per_device_train_batch_size=16)
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = read_gaps(folder, f"two{engine}")
    assert len(gaps) == 5
    assert max(gaps) < 1e-3
