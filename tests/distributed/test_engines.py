"""Generation engines beside a policy sharded by FSDP2 over two ranks: weights of every iteration, without gathering."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.distributed.cells import FULL_PRECISION
from tests.distributed.test_ppo import build_groups
from tests.forked import ROOT, find_free_port, run_forked
from tests.rl import keys_task
from tests.rl.vllm_fake import ASKED_AT
from tests.rows import read_events
from tests.test_accelerate_configs import read_environment

RATE = {"learning_rate": 1e-3, "use_vllm": True}


def run_jobs(folder: Path, names: Collection[str]) -> tuple[Path, dict[str, Any]]:
    """Run jobs on two ranks beside a fake server; return the folder of the runs and their exit codes."""
    policy = keys_task.write_policy(folder / "policy", 0, num_steps=30)
    keys_task.write_prompts(folder / "prompts.jsonl", 100, seed=5)
    port = find_free_port()
    served = {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{port}"}

    def build(**keys: Any) -> sharding.Job:
        return build_groups(folder, 2, **RATE | keys)

    jobs: dict[str, sharding.Job] = {
        "colocated": build(vllm_enable_sleep_mode=True),
        "adapter": build(use_peft=True, learning_rate=3e-3),
        "server": build(**served),
        "ahead": build(**served, max_staleness=1, max_steps=6),
        # An iteration generates at most eight tokens: step 12 is in the second one.
        "preempted": {**build(num_sample_prompts=0), "variables": {ASKED_AT: "12"}},
    }
    jobs = {name: jobs[name] for name in names}
    of_file = read_environment(ROOT / "accelerate_configs" / "fsdp2.yaml", "--num_processes=2", *FULL_PRECISION)
    _, *arguments = sharding.prepare_jobs(jobs, folder / "two")
    variables = {**of_file, "SERVER": f"{policy} {port}"}
    output = run_forked("tests.rl.vllm_fake", *arguments, variables=variables, num_processes=2)
    return folder / "two", sharding.read_end(folder / "two", output)["codes"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return run_jobs(tmp_path_factory.mktemp("runs"), ("colocated", "ahead", "preempted"))


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return run_jobs(tmp_path_factory.mktemp("more_runs"), ("adapter", "server"))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("runs", "colocated"),
        *(pytest.param("more_runs", name, marks=pytest.mark.slow) for name in ("adapter", "server")),
    ],
)
def test_engine_has_weights_of_each_iteration(request: pytest.FixtureRequest, fixture: str, name: str) -> None:
    folder, codes = request.getfixturevalue(fixture)
    assert codes[name] == 0
    events = read_events(folder / name)
    assert [event["step"] for event in events] == [2, 4]
    for event in events:
        assert abs(event["rollout/engine_mismatch_kl"]) < 1e-5
        assert event["rollout/is_weight_max"] == pytest.approx(1, abs=1e-4)
    # The weights have changed, so those of the first iteration would be detected in the second.
    assert events[-1]["kl"] > 1e-3


@pytest.mark.multiprocess
def test_asynchronous_sampling_is_off_policy_by_one_iteration(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, codes = runs
    assert codes["ahead"] == 0
    events = read_events(folder / "ahead")
    assert [event["rollout/off_policy_share"] for event in events] == [0, 1, 1]
    assert [abs(event["rollout/is_weight_max"] - 1) > 1e-3 for event in events] == [False, True, True]


@pytest.mark.multiprocess
def test_preemption_of_one_rank_while_sampling_stops_all(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, codes = runs
    assert codes["preempted"] == [75, 0]
    assert json.loads((folder / "preempted" / "run.json").read_text())["resumed_from"] == "checkpoint-2"
    assert [event["step"] for event in read_events(folder / "preempted")] == [2, 4]
