"""Tensor and context parallelism on two ranks by the public launch files, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    read_losses,
    read_weights,
    resume,
)
from tests.distributed.matrix import LAYOUTS
from tests.faults.recipe_runs import SIZES
from tests.rows import read_events

from recipes_lib.commands.weights import export_checkpoint

pytestmark = pytest.mark.multiprocess
PACKED, TIED = "sft packed", "pretrain tied"
CHOSEN = {PACKED: CELLS[PACKED], TIED: CELLS[TIED]}
TENSOR = "TP, 2"
PLANS = {
    # Query and key norms, whose gradients are summed over the ranks; projections whose inputs or outputs are gathered.
    f"pretrain {model_type}": ("pretrain", 1, {"model_config": json.dumps({"model_type": model_type} | SIZES | more)})
    for model_type, more in (("qwen3", {"num_key_value_heads": 2, "head_dim": 8}), ("glm4", {"num_key_value_heads": 2}))
}
"""Cells of architectures whose plan has other styles than those of Llama."""


@pytest.fixture(scope="module", params=[TENSOR, "CP, 2"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(
    layout: str, inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Folder of the runs on two ranks, and their exit codes and output."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = build_jobs(inputs, CHOSEN, LAYOUTS[layout].data_size)
    jobs |= {
        "resumed": resume(jobs[PACKED], folder / PACKED),
        "from one": resume(jobs[TIED], alone / TIED),
        "nan": {**jobs[PACKED], "fault": "nan loss"},
    }
    return folder, LAYOUTS[layout].run(jobs, folder)


@pytest.mark.parametrize("cell", CHOSEN)
def test_run_matches_one_process(runs: tuple[Path, Any], alone: Path, cell: str) -> None:
    """Token counts included: rows that both ranks compute count once."""
    assert_same_run(alone / cell, runs[0] / cell)


def test_checkpoint_files_contain_half_of_every_matrix(runs: tuple[Path, Any]) -> None:
    checkpoint, whole = runs[0] / PACKED / "checkpoint-2", read_weights(runs[0] / PACKED)
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


def test_resumed_run_reproduces_weights(runs: tuple[Path, Any]) -> None:
    assert_resumed(runs[0] / PACKED, runs[0] / "resumed")


def test_checkpoint_is_resumed_in_other_layout(runs, alone, inputs, tmp_path) -> None:
    assert_resumed(alone / TIED, runs[0] / "from one", 1e-5)
    job = build_jobs(inputs, CHOSEN, 1)[PACKED]
    sharding.run_jobs({"back": resume(job, runs[0] / PACKED)}, tmp_path)
    assert_resumed(alone / PACKED, tmp_path / "back", 1e-5)


@pytest.mark.parametrize("cell", CHOSEN)
def test_exported_checkpoint_matches_one_process(runs, alone, cell, tmp_path) -> None:
    export_checkpoint(runs[0] / cell / "checkpoint-2", tmp_path / "out")
    assert measure_weight_gap(alone / cell / "checkpoint-2", tmp_path / "out") <= 1e-5


def test_nan_loss_on_one_rank_stops_all_before_update(runs: tuple[Path, Any]) -> None:
    folder, ended = runs
    assert {name: code for name, code in ended["codes"].items() if code} == {"nan": 3}
    message = "step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan"
    assert ended["output"].count(message) == 2
    assert len(read_events(folder / "nan")) == 1


def test_other_plans_match_one_process(inputs: Path, tmp_path: Path) -> None:
    sharding.run_jobs(build_jobs(inputs, PLANS, 1), tmp_path / "alone")
    LAYOUTS[TENSOR].run(build_jobs(inputs, PLANS, 1), tmp_path / "split")
    for cell in PLANS:
        # Adam divides gradients by their magnitude: those near zero differ.
        assert_same_run(tmp_path / "alone" / cell, tmp_path / "split" / cell, 1e-4)


@pytest.mark.slow
def test_tensor_parallel_bf16_matches_one_process_up_to_rounding(inputs: Path, alone: Path, tmp_path: Path) -> None:
    job = build_jobs(inputs, CHOSEN, LAYOUTS[TENSOR].data_size)[PACKED]
    LAYOUTS[TENSOR].run({"bf16": in_bf16(job)}, tmp_path)
    assert read_losses(tmp_path / "bf16") == pytest.approx(read_losses(alone / "bf16"), rel=2e-3)
