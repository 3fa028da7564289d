"""Recipes on the simulated device: no operation mixes devices, and results match the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import pipelines, sharding
from tests.distributed.cells import (
    CELLS,
    FURTHER_CELLS,
    MUON_TOLERANCE,
    build_jobs,
    measure_gaps,
    measure_weight_gap,
)
from tests.distributed.matrix import LAYOUTS, list_cells
from tests.rl import keys_task
from tests.simulated_device import SIMULATED

FAST = ("sft packed", "dpo adapter stored")
# No quantised weights: transformers places them on CUDA by itself, and their class cannot hold tensors of this device.
PLACED = {name: cell for name, cell in (CELLS | FURTHER_CELLS).items() if "load_in_4bit" not in cell[2]}
RL_KEYS = {"max_steps": 4, "num_sample_prompts": 2, "save_strategy": "steps", "save_steps": 2}


def place(jobs: dict[str, sharding.Job]) -> dict[str, sharding.Job]:
    """Return the jobs on the device."""
    return {name: {**job, "keys": {**job["keys"], "use_cpu": "false"}} for name, job in jobs.items()}


def verify_equal(one: Path, other: Path) -> None:
    gaps, allowed = measure_gaps(one, other), MUON_TOLERANCE if one.name == "muon" else 1e-5
    # Rounding decides the accuracy of a margin of 0.
    wrong = {name: gap for name, gap in gaps.items() if not gap <= allowed and "accuracies" not in name}
    assert not wrong, (other, wrong)


@pytest.mark.parametrize("cells", [FAST, pytest.param(tuple(PLACED), marks=pytest.mark.slow)])
def test_recipes_match_cpu(inputs, tmp_path, cells) -> None:
    jobs = build_jobs(inputs, {name: PLACED[name] for name in cells}, 1)
    sharding.run_jobs(jobs, tmp_path / "cpu")
    result = sharding.run_jobs(place(jobs), tmp_path / "device", variables=SIMULATED)
    assert set(result["codes"].values()) == {0}
    for cell in cells:
        verify_equal(tmp_path / "cpu" / cell, tmp_path / "device" / cell)


@pytest.mark.slow  # PPO runs on the device in `tests/training/test_device_work.py` too.
@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_rl_recipe_matches_cpu(tmp_path, recipe) -> None:
    policy = keys_task.write_policy(tmp_path / "policy", 0, num_steps=30)
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 100, seed=5)
    build = keys_task.build_flags if recipe == "ppo" else keys_task.build_group_flags
    flags = build(policy, tmp_path, prompts, per_device_train_batch_size=8, **RL_KEYS)
    jobs = {recipe: sharding.build_job(recipe, flags)}
    sharding.run_jobs(jobs, tmp_path / "cpu")
    sharding.run_jobs(place(jobs), tmp_path / "device", variables=SIMULATED)
    # Kernels differ in rounding, which Adam at a learning rate of 1e-3 amplifies.
    assert measure_weight_gap(tmp_path / "cpu" / recipe, tmp_path / "device" / recipe) < 1e-4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_pipeline_matches_one_process(inputs, tmp_path) -> None:
    schedules = pipelines.CELLS
    sharding.run_jobs({cell: pipelines.build_job(inputs, cell) for cell in schedules}, tmp_path / "cpu")
    jobs = place({cell: pipelines.build_job(inputs, cell, 2) for cell in schedules})
    sharding.run_jobs(jobs, tmp_path / "device", "cpu_ddp", variables=SIMULATED)
    for cell in schedules:
        verify_equal(tmp_path / "cpu" / cell, tmp_path / "device" / cell)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["DDP, 2", "FSDP2, 2", "TP, 2", "CP, 2", "FSDP2 offload, 2"])
def test_layouts_match_one_process(inputs, alone, tmp_path, layout) -> None:
    how = LAYOUTS[layout]
    cells = {name: CELLS[name] for name in ("sft packed", "lora padded") if list_cells(layout).get(name)}
    how.run(place(build_jobs(inputs, cells, how.data_size)), tmp_path, variables=SIMULATED)
    for cell in cells:
        verify_equal(alone / cell, tmp_path / cell)
