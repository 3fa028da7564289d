"""Tensor parallelism on two ranks by the public launch file, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    assert_resumed,
    assert_same_run,
    build_jobs,
    in_bf16,
    measure_weight_gap,
    read_weights,
)
from tests.distributed.matrix import LAYOUTS
from tests.rows import read_events, read_rows

from recipes_lib.commands.weights.export import export_checkpoint

pytestmark = pytest.mark.multiprocess
LAYOUT = LAYOUTS["TP, 2"]
PACKED, TIED = "sft packed", "pretrain tied"


@pytest.fixture(scope="module")
def jobs(inputs: Path) -> dict[str, sharding.Job]:
    return build_jobs(inputs, {name: CELLS[name] for name in (PACKED, TIED)}, LAYOUT.data_size)


@pytest.fixture(scope="module")
def runs(alone: Path, jobs: dict[str, sharding.Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    resumed = {
        "resumed": {**jobs[PACKED], "copy_of": folder / PACKED, "step": 2},
        "from one": {**jobs[TIED], "copy_of": alone / TIED, "step": 2},
    }
    LAYOUT.run({**jobs, **resumed}, folder)
    return folder


@pytest.mark.parametrize("cell", [PACKED, TIED])
def test_tensor_parallel_run_matches_one_process(runs: Path, alone: Path, cell: str) -> None:
    """Token counts included: rows that both ranks compute count once."""
    assert_same_run(alone / cell, runs / cell)


def test_checkpoint_files_contain_half_of_every_matrix(runs: Path) -> None:
    checkpoint, whole = runs / PACKED / "checkpoint-2", read_weights(runs / PACKED)
    for states in ("model_shards", "optimizer_shards"):
        files = sorted((checkpoint / states).glob("*.safetensors"))
        assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    parameter = whole[name.rpartition(" of ")[2]]
                    if tensors.get_tensor(name).ndim > 1:
                        assert 2 * tensors.get_tensor(name).numel() == parameter.numel(), name
    record = json.loads((checkpoint / "COMPLETE.json").read_text())
    assert (record["engine"], record["world_size"], record["data_size"]) == ("FSDP", 2, 1)
    assert whole["lm_head.weight"].shape == (512, 64)


def test_resumed_run_reproduces_weights(runs: Path) -> None:
    assert_resumed(runs / PACKED, runs / "resumed")


def test_checkpoint_is_resumed_in_other_layout(runs: Path, alone: Path, inputs: Path, tmp_path: Path) -> None:
    assert_resumed(alone / TIED, runs / "from one", 1e-5)
    job = build_jobs(inputs, {PACKED: CELLS[PACKED]}, 1)[PACKED]
    sharding.run_jobs({"back": {**job, "copy_of": runs / PACKED, "step": 2}}, tmp_path)
    assert_resumed(alone / PACKED, tmp_path / "back", 1e-5)


@pytest.mark.parametrize("cell", [PACKED, TIED])
def test_exported_checkpoint_matches_one_process(runs: Path, alone: Path, cell: str, tmp_path: Path) -> None:
    export_checkpoint(runs / cell / "checkpoint-2", tmp_path / "out")
    assert measure_weight_gap(alone / cell / "checkpoint-2", tmp_path / "out") <= 1e-5


@pytest.mark.slow
def test_bf16_run_matches_one_process_up_to_rounding(
    jobs: dict[str, sharding.Job], alone: Path, tmp_path: Path
) -> None:
    LAYOUT.run({"bf16": in_bf16(jobs[PACKED])}, tmp_path)
    expected, losses = (
        [event[name] for event in read_rows(run / "metrics.jsonl") for name in ("loss", "eval_loss") if name in event]
        for run in (alone / "bf16", tmp_path / "bf16")
    )
    assert losses == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_nan_loss_on_one_rank_stops_all_before_update(jobs: dict[str, sharding.Job], tmp_path: Path) -> None:
    ended = LAYOUT.run({"nan": {**jobs[PACKED], "fault": "nan loss"}}, tmp_path)
    assert ended["codes"] == {"nan": 3}
    message = "step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan"
    assert ended["output"].count(message) == 2
    assert len(read_events(tmp_path / "nan")) == 1
