"""``recipes plan`` of RL recipes: layouts, time of an iteration, hours and cost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

KEYS = {
    "max_length": 256,
    "response_length": 128,
    "reward_funcs": ["a.b:c"],
    "per_device_train_batch_size": 8,
    "num_generations": 8,
}


@pytest.fixture
def plan(plan_recipe):
    """Plan GRPO."""
    return lambda *flags, **keys: plan_recipe("grpo", *flags, **KEYS, **keys)


def test_fastest_fitting_layout_is_chosen_and_written(plan, tmp_path: Path) -> None:
    output = plan("--gpus", "2xH100", "--write", tmp_path / "plan")
    layouts = dict(re.findall(r"(\w+) [\d.]+ GB, ([\d.e-]+) s", re.search(r"^layouts +(.*)$", output, re.MULTILINE)[1]))
    assert {"ddp", "fsdp2"} <= layouts.keys()
    assert "zero2" not in layouts
    fastest = min(layouts, key=lambda name: float(layouts[name]))
    assert f"--hardware {fastest} --num_processes 2" in output
    assert yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())["num_processes"] == 2
    assert re.search(rf"time +{re.escape(layouts[fastest])} s an iteration, an estimate for {fastest}", output)


def test_run_in_epochs_has_cost_of_thousand_iterations(plan) -> None:
    output = plan("--gpu", "H100", "--price_per_gpu_hour", 3)
    seconds = float(re.search(r"time +([\d.e-]+) s an iteration", output)[1])
    assert f"{seconds * 1000 / 3600:.1f} hours for 1,000 iterations" in output
    assert re.search(r"cost +[\d.]+ for 1,000 iterations, at 3 for a GPU hour", output)
    assert "forward passes of policy\n" in output
    seconds, cost, rest = re.search(
        r"time +([\d.e-]+) s an iteration.*\ncost +([\d.]+) for 1,000 iterations(.*?), at 3",
        plan("--gpu", "H100", "--price_per_gpu_hour", 3, use_vllm=True, vllm_mode="server"),
        re.DOTALL,
    ).groups()
    assert float(cost) == pytest.approx(2 * 3 * float(seconds) * 1000 / 3600, abs=0.01)
    assert rest == " on 2 GPUs, half of them for the vLLM server"


SHARED = ["--use_vllm", "true", "--vllm_gpu_memory_utilization", 1e-6]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "2xH100 MIG 1g.10gb"], "does not support MIG instances"),
        (["--gpu", "H100 MIG 1g.10gb", "--num_processes", 7], "does not support MIG instances"),
        (["--gpus", "2x4090", "--max_length", 4_000_000], "in no layout"),
        (["--gpus", "1xH100", *SHARED], "--gpus: vLLM's weights and one answer do not fit its 0% of 1xH100"),
        (["--gpu", "H100", *SHARED], "--gpu: vLLM's weights and one answer do not fit its 0% of H100"),
    ],
)
def test_impossible_plan_raises(plan, flags, words) -> None:
    assert words in plan(*flags, code=2)


def test_single_mig_instance_is_planned(plan) -> None:
    assert "fits H100 MIG 1g.10gb" in plan("--gpu", "H100 MIG 1g.10gb")
