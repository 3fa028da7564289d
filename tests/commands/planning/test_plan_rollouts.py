"""Reinforcement learning is planned by layout: memory, time and launch of each, and the hours of the run."""

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


def test_the_fastest_layout_is_chosen_of_those_that_fit(plan, tmp_path: Path) -> None:
    told = plan("--gpus", "2xH100", "--write", tmp_path / "plan")
    layouts = dict(re.findall(r"(\w+) [\d.]+ GB, ([\d.e-]+) s", re.search(r"^layouts +(.*)$", told, re.MULTILINE)[1]))
    assert {"ddp", "fsdp2"} <= layouts.keys()
    fastest = min(layouts, key=lambda name: float(layouts[name]))
    assert f"--hardware {fastest} --num_processes 2" in told
    assert yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())["num_processes"] == 2
    assert re.search(rf"time +{re.escape(layouts[fastest])} s an iteration, an estimate for {fastest}", told)


def test_a_run_as_long_as_its_data_has_hours_and_cost_for_a_thousand_iterations(plan) -> None:
    told = plan("--gpu", "H100", "--price_per_gpu_hour", 3)
    seconds = float(re.search(r"time +([\d.e-]+) s an iteration", told)[1])
    assert f"{seconds * 1000 / 3600:.1f} hours for 1,000 iterations" in told
    assert re.search(r"cost +[\d.]+ for 1,000 iterations, at 3 for a GPU hour", told)
    assert "forward passes of policy\n" in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "2xH100 MIG 1g.10gb"], "does not support MIG instances"),
        (["--gpu", "H100 MIG 1g.10gb", "--num_processes", 7], "does not support MIG instances"),
        (["--gpus", "2x4090", "--max_length", 4_000_000], "in no layout"),
    ],
)
def test_what_cannot_be_is_told(plan, flags, words) -> None:
    assert words in plan(*flags, code=2)


def test_one_mig_instance_is_planned_as_a_gpu(plan) -> None:
    assert "fits H100 MIG 1g.10gb" in plan("--gpu", "H100 MIG 1g.10gb")
