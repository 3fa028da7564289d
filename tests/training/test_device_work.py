"""Kernels and host syncs of an optimizer step, counted on a simulated device.

Every sync leaves a GPU idle. The bounds may only become lower.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from tests.distributed.cells import write_inputs
from tests.faults import recipe_runs
from tests.forked import run_forked
from tests.simulated_device import SIMULATED
from tests.training.device_work import UPSTREAM

QUIET = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_steps": 1000,
    "num_sample_prompts": 0,
    "use_cpu": "false",
    "max_steps": 4,
    "optim": "adamw_torch",
    "gradient_accumulation_steps": 2,
}
JOBS: dict[str, dict[str, Any]] = {
    "sft": {"attn_implementation": "varlen"},
    "pretrain": {"attn_implementation": "varlen", "cross_document_attention": "true"},
    "sft unpacked": {"attn_implementation": "varlen", "packing": "false"},
    "dpo": {},
    "dpo flat": {"attn_implementation": "varlen"},
    "reward": {},
    "distill": {"attn_implementation": "varlen"},
    "ppo": {"num_mini_batches": 4, "max_steps": 4},
}
SINGLE = "pretrain without accumulation"
LEARNERS = [*(name for name in JOBS if name != "ppo"), "policy of ppo", "critic of ppo"]
MAX_SYNCS = 2
"""Host syncs per step: the number of terms over all ranks, and the values that the guard checks; in PPO, metrics and
norm."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("work")
    write_inputs(folder)
    jobs = {}
    for name, more in JOBS.items():
        recipe = name.split()[0]
        base = recipe_runs.make_keys(folder, "sft" if recipe == "distill" else recipe)
        keys = {**base, **QUIET, **more}
        if recipe == "distill":
            keys["teacher_model_name_or_path"] = folder / "teacher"
        without = [
            "save_steps",
            "eval_steps",
            "save_total_limit",
            *(["num_sample_prompts"] if name == "reward" else []),
        ]
        keys = {key: str(value) for key, value in keys.items() if key not in without}
        jobs[name] = {"stage": recipe, "keys": keys}
    # Without accumulation, the guard's own kernels have the largest share.
    layers = json.dumps({"model_type": "llama"} | recipe_runs.SIZES | {"num_hidden_layers": 12})
    alone = {"gradient_accumulation_steps": "1", "model_config": layers}
    single = jobs["pretrain"] | {"keys": jobs["pretrain"]["keys"] | alone}
    jobs |= {SINGLE: single, UPSTREAM: single | {"stage": UPSTREAM}}
    run_forked("tests.training.device_work", folder / "runs", json.dumps(jobs), variables=SIMULATED, num_processes=None)
    found: dict[str, Any] = json.loads((folder / "runs" / "work.json").read_text())
    return found


@pytest.mark.parametrize("learner", LEARNERS)
def test_host_syncs_do_not_grow_with_gradient_accumulation(work: dict[str, Any], learner: str) -> None:
    """A sync per micro-batch would exceed the bound."""
    syncs = work[learner]["waits"]
    assert sum(syncs.values()) <= MAX_SYNCS, syncs


@pytest.mark.parametrize("learner", LEARNERS)
def test_batches_are_copied_without_host_sync(work: dict[str, Any], learner: str) -> None:
    assert not work[learner]["copies"]


@pytest.mark.parametrize("learner", LEARNERS)
def test_gradients_of_chosen_positions_are_added_without_sorting(work: dict[str, Any], learner: str) -> None:
    """As those of ``index_select``; ``states[positions]`` sorts the positions in the backward pass."""
    assert not {name for name in work[learner]["kernels"] if "index_put" in name}


def test_step_launches_no_more_kernels_than_transformers_trainer(work: dict[str, Any]) -> None:
    ours, theirs = (work[run]["kernels"] for run in (SINGLE, UPSTREAM))
    assert sum(ours.values()) <= sum(theirs.values()), Counter(ours) - Counter(theirs)
    assert sum(work[UPSTREAM]["waits"].values()) > 0
