"""Pipeline stages sharded by FSDP2 over their replicas, on four and eight ranks, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import (
    FULL_PRECISION,
    MUON_TOLERANCE,
    assert_resumed,
    assert_same_run,
    measure_weight_gap,
    read_weights,
    resume,
)
from tests.distributed.pipelines import CELLS, METRICS, SLOW_CELLS, build_job, build_rollback

from recipes_lib.training.guards.step_guard import read_rollbacks

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
LAUNCH = ("fsdp2", *FULL_PRECISION)
# `parallelism_config` of fsdp2_tp.yaml for eight ranks in two stages.
MESH = ("fsdp2_tp", *FULL_PRECISION, "--parallelism_config_dp_shard_size=2", "--parallelism_config_tp_size=2")
# In bf16, FSDP2 rounds activations between layers, which autocast keeps in fp32.
TOLERANCES = {"muon": MUON_TOLERANCE, "bf16": 5e-3}


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same run on one rank, and on four ranks in two pipelines of two stages."""
    folder = tmp_path_factory.mktemp("runs")
    sharding.run_jobs({"tied": build_job(inputs, "tied")}, folder / "one")
    four = {"tied": build_job(inputs, "tied", 2, 2), **build_rollback(inputs, 2, 2, save_steps=2)}
    sharding.run_jobs(four, folder / "four", *LAUNCH, num_processes=4)
    return folder


def test_sharded_stages_match_one_process(runs: Path) -> None:
    assert assert_same_run(runs / "one" / "tied", runs / "four" / "tied") >= METRICS


def test_each_rank_saves_half_of_its_stage(runs: Path) -> None:
    whole = read_weights(runs / "one" / "tied")
    checkpoint = runs / "four" / "tied" / "checkpoint-2"
    for states in ("model_shards", "optimizer_shards"):
        files = sorted((checkpoint / states).glob("*.safetensors"))
        assert [file.name[:11] for file in files] == [f"shard-{number:05d}" for number in (1, 2, 3, 4)]
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    shard = tensors.get_tensor(name)
                    assert shard.ndim == 0 or 2 * shard.numel() == whole[name.rpartition(" of ")[2]].numel(), name
    record = json.loads((checkpoint / "COMPLETE.json").read_text())
    assert (record["engine"], record["world_size"], record["data_size"]) == ("FSDP", 4, 2)


def test_checkpoint_is_resumed_in_both_layouts(inputs: Path, runs: Path, tmp_path: Path) -> None:
    job = build_job(inputs, "tied", 2, 2)
    jobs = {f"from {count}": resume(job, runs / count / "tied") for count in ("one", "four")}
    sharding.run_jobs(jobs, tmp_path, *LAUNCH, num_processes=4)
    sharding.run_jobs({"back": resume(build_job(inputs, "tied"), runs / "four" / "tied")}, tmp_path)
    for name in (*jobs, "back"):
        assert_resumed(runs / "one" / "tied", tmp_path / name, 1e-5)
    assert_resumed(runs / "four" / "tied", tmp_path / "from four")


def test_rollback_to_beginning_reproduces_weights(runs: Path) -> None:
    (made,) = read_rollbacks(runs / "four" / "spike")
    assert (made.back_to, made.skipped) == (0, sharding.SKIPPED_ROWS)
    weights, expected = (read_weights(runs / "four" / name) for name in ("spike", "without skipped rows"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_other_schedules_and_precisions_match_one_process(inputs: Path, tmp_path: Path) -> None:
    cells = [cell for cell in CELLS | SLOW_CELLS if cell != "tied"]
    narrow = {"bf16": "true"}
    one = {cell: build_job(inputs, cell) for cell in cells} | {"bf16": build_job(inputs, "packed", **narrow)}
    sharding.run_jobs(one, tmp_path / "one")
    four = {cell: build_job(inputs, cell, 2, 2) for cell in cells}
    four["bf16"] = build_job(inputs, "packed", 2, 2, **narrow)
    sharding.run_jobs(four, tmp_path / "four", *LAUNCH, num_processes=4)
    for cell in four:
        assert_same_run(tmp_path / "one" / cell, tmp_path / "four" / cell, TOLERANCES.get(cell, 1e-5))


def test_pipeline_tensor_and_data_parallelism_match_one_process(inputs: Path, runs: Path, tmp_path: Path) -> None:
    """Two stages, each on two tensor-parallel ranks, sharded by FSDP2 over two replicas; also resumed."""
    one = {"packed": build_job(inputs, "packed")}
    sharding.run_jobs(one, tmp_path / "one")
    jobs = {cell: build_job(inputs, cell, 2, 2) for cell in ("tied", "packed")}
    jobs |= {f"tied, from {count}": resume(jobs["tied"], runs / count / "tied") for count in ("one", "four")}
    jobs["tied, resumed"] = resume(jobs["tied"], tmp_path / "eight" / "tied")
    ended = sharding.run_jobs(jobs, tmp_path / "eight", *MESH, num_processes=8)
    assert not any(ended["codes"].values())
    for name in jobs:
        alone = (runs if name.startswith("tied") else tmp_path) / "one" / name.partition(",")[0]
        if "," not in name:
            assert_same_run(alone, tmp_path / "eight" / name)
        assert measure_weight_gap(alone, tmp_path / "eight" / name) < 1e-5, name
    sharding.run_jobs({"back": resume(build_job(inputs, "tied"), tmp_path / "eight" / "tied")}, tmp_path)
    assert measure_weight_gap(runs / "one" / "tied", tmp_path / "back") < 1e-5
    record = json.loads((tmp_path / "eight" / "tied" / "checkpoint-2" / "COMPLETE.json").read_text())
    assert (record["engine"], record["world_size"], record["data_size"]) == ("FSDP", 8, 2)
