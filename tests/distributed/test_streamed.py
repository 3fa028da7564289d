"""Streamed SFT runs: the same steps on two ranks, and resumed with several loader processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.distributed.cells import assert_resumed, measure_weight_gap, read_losses, resume
from tests.faults import recipe_runs

KEYS: dict[str, Any] = {
    "dataset_streaming": "true",
    "max_steps": 4,
    "save_steps": 2,
    "num_sample_prompts": 0,
    "eval_strategy": "no",
}
LEFT_OUT = ("test_split_size", "prepared_dir", "eval_steps", "per_device_eval_batch_size", "sample_max_new_tokens")


@pytest.mark.multiprocess
def test_streamed_steps_are_independent_of_loaders_and_world_size(tmp_path: Path) -> None:
    recipe_runs.write_inputs(tmp_path)
    # An epoch of 5 packs ends within a step of 4, and the run resumes in the second one.
    recipe_runs.write_chats(tmp_path / "chats.jsonl", range(1, 11))

    def build(num_processes: int = 1, **more: Any) -> dict[str, Any]:
        keys = {**KEYS, **dict.fromkeys(LEFT_OUT), **more}
        return {"stage": "sft", "keys": recipe_runs.make_keys(tmp_path, "sft", num_processes, **keys)}

    one, two = tmp_path / "one", tmp_path / "two"
    jobs = {"straight": build()}
    jobs["resumed by two workers"] = resume(build(dataloader_num_workers=2), one / "straight")
    # In a new process, because the workers are forked from it.
    assert not any(sharding.run_jobs(jobs, one, variables={})["codes"].values())
    assert not any(sharding.run_jobs({"straight": build(2)}, two, "cpu_ddp")["codes"].values())
    assert_resumed(one / "straight", one / "resumed by two workers")
    assert measure_weight_gap(one / "straight", two / "straight") < 1e-5
    losses = read_losses(one / "straight")
    assert read_losses(two / "straight") == pytest.approx(losses, rel=1e-5)
    assert len(set(losses)) == KEYS["max_steps"]
