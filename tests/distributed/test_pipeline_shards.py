"""Stages whose weights FSDP2 shares out to their replicas, on four processes: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import FULL_PRECISION, measure_gaps, measure_weight_gap, read_weights
from tests.distributed.pipelines import CELLS, MUON_TOLERANCE, SLOW_CELLS, build_job, build_rollback, resume
from tests.faults import recipe_runs

from recipes_lib.training.guards.replay_check import read_rollbacks

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
LAUNCH = ("fsdp2", *FULL_PRECISION)
# In bfloat16 FSDP2 rounds what runs through the layers, which autocast keeps wider.
# What `parallelism_config` of fsdp2_tp.yaml says of eight ranks in two stages.
MESH = ("fsdp2_tp", *FULL_PRECISION, "--parallelism_config_dp_shard_size=2", "--parallelism_config_tp_size=2")
TOLERANCES = {"muon": MUON_TOLERANCE, "bf16": 5e-3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by one process, and by four in two pipelines of two stages."""
    folder = tmp_path_factory.mktemp("runs")
    sharding.run_jobs({"tied": build_job(inputs, "tied")}, folder / "one")
    four = {"tied": build_job(inputs, "tied", 2, 2), **build_rollback(inputs, 2, 2, save_steps=2)}
    sharding.run_jobs(four, folder / "four", *LAUNCH, num_processes=4)
    return folder


def test_shared_stages_give_the_numbers_of_one_process(runs: Path) -> None:
    gaps = measure_gaps(runs / "one" / "tied", runs / "four" / "tied")
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}
    assert {"eval_bits_per_byte", "grad_norm", "parameter_norm", "update_ratio", "num_target_tokens"} <= gaps.keys()


def test_each_process_writes_half_of_its_stage(runs: Path) -> None:
    whole = read_weights(runs / "one" / "tied")
    checkpoint = runs / "four" / "tied" / "checkpoint-2"
    for states in ("model_shards", "optimizer_shards"):
        files = sorted((checkpoint / states).glob("*.safetensors"))
        assert [file.name[:11] for file in files] == [f"shard-{number:05d}" for number in (1, 2, 3, 4)]
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is not a mapping)
                    shard = tensors.get_tensor(name)
                    assert shard.ndim == 0 or 2 * shard.numel() == whole[name.rpartition(" of ")[2]].numel(), name
    record = json.loads((checkpoint / "COMPLETE.json").read_text())
    assert (record["engine"], record["world_size"], record["data_size"]) == ("FSDP", 4, 2)


def test_a_checkpoint_goes_on_here_and_in_one_process(inputs: Path, runs: Path, tmp_path: Path) -> None:
    job = build_job(inputs, "tied", 2, 2)
    jobs = {f"from {count}": resume(job, runs / count / "tied") for count in ("one", "four")}
    sharding.run_jobs(jobs, tmp_path, *LAUNCH, num_processes=4)
    sharding.run_jobs({"back": resume(build_job(inputs, "tied"), runs / "four" / "tied")}, tmp_path)
    for name in (*jobs, "back"):
        assert json.loads((tmp_path / name / "run.json").read_text())["resumed_from"] == "checkpoint-2"
        assert measure_weight_gap(runs / "one" / "tied", tmp_path / name) < 1e-5
    straight, resumed = read_weights(runs / "four" / "tied"), read_weights(tmp_path / "from four")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_a_rollback_to_the_beginning_leaves_the_very_weights(runs: Path) -> None:
    (made,) = read_rollbacks(runs / "four" / "spike").made
    assert (made.back_to, made.skipped) == (0, sharding.LEFT_OUT)
    weights, expected = (read_weights(runs / "four" / name) for name in ("spike", "never saw it"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_so_do_all_other_runs(inputs: Path, tmp_path: Path) -> None:
    cells = [cell for cell in CELLS | SLOW_CELLS if cell != "tied"]
    narrow = {"bf16": "true"}
    one = {cell: build_job(inputs, cell) for cell in cells} | {"bf16": build_job(inputs, "packed", **narrow)}
    sharding.run_jobs(one, tmp_path / "one")
    four = {cell: build_job(inputs, cell, 2, 2) for cell in cells}
    four["bf16"] = build_job(inputs, "packed", 2, 2, **narrow)
    sharding.run_jobs(four, tmp_path / "four", *LAUNCH, num_processes=4)
    for cell in four:
        gap = max(measure_gaps(tmp_path / "one" / cell, tmp_path / "four" / cell).values())
        assert gap <= TOLERANCES.get(cell, 1e-5), (cell, gap)


def test_pipeline_tensor_and_data_parallelism_together_give_the_numbers_of_one_process(
    inputs: Path, runs: Path, tmp_path: Path
) -> None:
    """Two stages, each over two tensor-parallel ranks, sharded by FSDP2 over two replicas; from a checkpoint, too."""
    one = {"packed": build_job(inputs, "packed")}
    sharding.run_jobs(one, tmp_path / "one")
    jobs = {cell: build_job(inputs, cell, 2, 2) for cell in ("tied", "packed")}
    jobs |= {f"tied, from {count}": resume(jobs["tied"], runs / count / "tied") for count in ("one", "four")}
    jobs["tied, resumed"] = resume(jobs["tied"], tmp_path / "eight" / "tied")
    ended = sharding.run_jobs(jobs, tmp_path / "eight", *MESH, num_processes=8)
    assert not any(ended["codes"].values())
    for name in jobs:
        alone = (runs if name.startswith("tied") else tmp_path) / "one" / name.partition(",")[0]
        gaps = measure_gaps(alone, tmp_path / "eight" / name) if "," not in name else {}
        assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}, name
        assert measure_weight_gap(alone, tmp_path / "eight" / name) < 1e-5, name
    sharding.run_jobs({"back": resume(build_job(inputs, "tied"), tmp_path / "eight" / "tied")}, tmp_path)
    assert measure_weight_gap(runs / "one" / "tied", tmp_path / "back") < 1e-5
    record = json.loads((tmp_path / "eight" / "tied" / "checkpoint-2" / "COMPLETE.json").read_text())
    assert (record["engine"], record["world_size"], record["data_size"]) == ("FSDP", 8, 2)
