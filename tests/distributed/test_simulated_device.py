"""Recipes on a device that is not the CPU: no tensor is where a GPU could not take it, and the numbers are the same.

On a CPU alone a batch that the loader has brought to the GPU and a number that was made on the host are no mistake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

FAST = ("sft packed", "dpo adapter stored", "distill on policy")
OF_ANSWERS = {"max_steps": 4, "num_sample_prompts": 2, "save_strategy": "steps", "save_steps": 2}


def place(jobs: dict[str, sharding.Job]) -> dict[str, sharding.Job]:
    return {name: {**job, "keys": {**job["keys"], "use_cpu": "false"}} for name, job in jobs.items()}


def verify_equal(one: Path, other: Path) -> None:
    gaps, allowed = measure_gaps(one, other), MUON_TOLERANCE if one.name == "muon" else 1e-5
    # Where a margin is 0 rounding decides which answer is preferred.
    wrong = {what: gap for what, gap in gaps.items() if not gap <= allowed and "accuracies" not in what}
    assert not wrong, (other, wrong)


@pytest.mark.parametrize("cells", [FAST, pytest.param({**CELLS, **FURTHER_CELLS}, marks=pytest.mark.slow)])
def test_one_process_has_the_numbers_of_the_cpu(inputs, tmp_path, cells) -> None:
    jobs = build_jobs(inputs, {name: (CELLS | FURTHER_CELLS)[name] for name in cells}, 1)
    sharding.run_jobs(jobs, tmp_path / "cpu")
    told = sharding.run_jobs(place(jobs), tmp_path / "device", variables=SIMULATED)
    assert set(told["codes"].values()) == {0}
    for cell in cells:
        verify_equal(tmp_path / "cpu" / cell, tmp_path / "device" / cell)


def test_what_learns_from_its_own_answers_learns_the_same(tmp_path) -> None:
    policy = keys_task.write_policy(tmp_path / "policy", 0, num_steps=30)
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 100, seed=5)
    builders: dict[str, Any] = {"ppo": keys_task.build_flags, "grpo": keys_task.build_group_flags}
    jobs = {}
    for recipe, build in builders.items():
        flags = build(policy, tmp_path, prompts, per_device_train_batch_size=8, **OF_ANSWERS)
        jobs[recipe] = {"stage": recipe, "keys": dict(flag.removeprefix("--").split("=", 1) for flag in flags)}
    sharding.run_jobs(jobs, tmp_path / "cpu")
    sharding.run_jobs(place(jobs), tmp_path / "device", variables=SIMULATED)
    for recipe in jobs:
        # Other kernels round otherwise, and Adam at a rate of 1e-3 makes more of it.
        assert measure_weight_gap(tmp_path / "cpu" / recipe, tmp_path / "device" / recipe) < 1e-4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_stages_of_a_pipeline_have_the_numbers_of_one_process(inputs, tmp_path) -> None:
    schedules = pipelines.CELLS
    sharding.run_jobs({cell: pipelines.build_job(inputs, cell) for cell in schedules}, tmp_path / "cpu")
    jobs = place({cell: pipelines.build_job(inputs, cell, 2) for cell in schedules})
    sharding.run_jobs(jobs, tmp_path / "device", "cpu_ddp", variables=SIMULATED)
    for cell in schedules:
        verify_equal(tmp_path / "cpu" / cell, tmp_path / "device" / cell)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["DDP, 2", "FSDP2, 2", "TP, 2", "CP, 2", "FSDP2 offload, 2"])
def test_processes_that_share_a_run_have_the_numbers_of_one(inputs, alone, tmp_path, layout) -> None:
    how = LAYOUTS[layout]
    cells = {name: CELLS[name] for name in ("sft packed", "lora padded") if list_cells(layout).get(name)}
    how.run(place(build_jobs(inputs, cells, how.data_size)), tmp_path, variables=SIMULATED)
    for cell in cells:
        verify_equal(alone / cell, tmp_path / cell)
