"""Streamed SFT runs: the same steps on two ranks, and resumed with several loader processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import sharding
from tests.distributed.cells import measure_weight_gap, read_weights
from tests.faults import recipe_runs
from tests.rows import read_rows

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

    def build(num_processes: int = 1, **more: Any) -> dict[str, Any]:
        keys = {**recipe_runs.make_keys(tmp_path, "sft", num_processes), **KEYS, **more}
        return {"stage": "sft", "keys": {key: value for key, value in keys.items() if key not in LEFT_OUT}}

    one, two = tmp_path / "one", tmp_path / "two"
    resumed = {**build(dataloader_num_workers=2), "copy_of": one / "straight", "step": 2}
    jobs = {"straight": build(), "resumed by two workers": resumed}
    # In a new process, because the workers are forked from it.
    assert not any(sharding.run_jobs(jobs, one, variables={})["codes"].values())
    assert not any(sharding.run_jobs({"straight": build(2)}, two, "cpu_ddp")["codes"].values())
    weights = read_weights(one / "straight")
    resumed = read_weights(one / "resumed by two workers")
    assert all(torch.equal(tensor, weights[key]) for key, tensor in resumed.items())
    assert measure_weight_gap(one / "straight", two / "straight") < 1e-5
    losses = [[event["loss"] for event in read_rows(run / "straight" / "metrics.jsonl")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == KEYS["max_steps"]
