"""Pipeline parallelism of pretraining on gloo ranks, compared with one process: every schedule, checkpoints, guards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import (
    MUON_TOLERANCE,
    assert_resumed,
    assert_same_run,
    measure_weight_gap,
    read_weights,
    resume,
)
from tests.distributed.pipelines import CELLS, METRICS, SLOW_CELLS, build_job, build_rollback
from tests.rows import read_events

from recipes_lib.commands.weights import export_checkpoint
from recipes_lib.training.guards.step_guard import read_rollbacks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the single-process runs."""
    folder = tmp_path_factory.mktemp("alone")
    sharding.run_jobs({cell: build_job(inputs, cell) for cell in CELLS}, folder)
    return folder


@pytest.fixture(scope="module")
def two(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder of the runs in two stages, and their exit codes and output."""
    folder = tmp_path_factory.mktemp("two")
    jobs = {cell: build_job(inputs, cell, 2) for cell in CELLS}
    jobs["resumed"] = resume(jobs["tied"], folder / "tied")
    jobs["from one"] = resume(jobs["packed"], alone / "packed")
    jobs |= build_rollback(inputs, 2, save_steps=1)
    jobs["nan"] = {**jobs["packed"], "fault": "nan in the first stage"}
    jobs["tied apart"] = {**jobs["tied"], "fault": "no sums over stages"}
    return folder, sharding.run_jobs(jobs, folder, "cpu_ddp")


@pytest.mark.parametrize("cell", CELLS)
def test_pipeline_run_matches_one_process(alone: Path, two: tuple[Path, Any], cell: str) -> None:
    folder, _ = two
    assert assert_same_run(alone / cell, folder / cell) >= METRICS
    assert json.loads((folder / cell / "run.json").read_text())["pipeline_stages"] == 2


def test_missing_sum_of_tied_gradients_is_detected(alone: Path, two: tuple[Path, Any]) -> None:
    assert measure_weight_gap(alone / "tied", two[0] / "tied apart") > 1e-3


def test_each_rank_saves_its_layers_under_usual_names(alone: Path, two: tuple[Path, Any]) -> None:
    saved = []
    for file in sorted((two[0] / "tied" / "checkpoint-2" / "model_shards").iterdir()):
        with safe_open(file, framework="pt") as tensors:
            saved.append(set(tensors.keys()))
    assert not saved[0] & saved[1]
    assert saved[0] | saved[1] == read_weights(alone / "tied" / "checkpoint-2").keys()
    assert {"model.layers.1.mlp.up_proj.weight"} <= saved[0]
    assert {"model.layers.2.mlp.up_proj.weight", "model.norm.weight"} <= saved[1]


def test_resumed_run_reproduces_weights(two: tuple[Path, Any]) -> None:
    assert_resumed(two[0] / "tied", two[0] / "resumed")


def test_rollback_reproduces_run_without_skipped_rows(two: tuple[Path, Any]) -> None:
    folder, _ = two
    (made,) = read_rollbacks(folder / "spike")
    assert (made.step, made.back_to, made.skipped) == (sharding.SPIKE_STEP, 1, sharding.SKIPPED_ROWS)
    weights, expected = (read_weights(folder / name) for name in ("spike", "without skipped rows"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_checkpoint_is_resumed_in_other_layout(inputs, alone, two, tmp_path) -> None:
    """The optimizer states too: with fresh ones the third step differs."""
    folder, _ = two
    assert_resumed(alone / "packed", folder / "from one", 1e-5)
    sharding.run_jobs({"back": resume(build_job(inputs, "tied"), folder / "tied")}, tmp_path)
    assert_resumed(alone / "tied", tmp_path / "back", 1e-5)
    for cell in ("packed", "tied"):
        assert measure_weight_gap(alone / cell, alone / cell / "checkpoint-2") > 1e-4, "the third step changes nothing"


def test_exported_checkpoint_matches_one_process(alone: Path, two: tuple[Path, Any], tmp_path: Path) -> None:
    export_checkpoint(two[0] / "tied" / "checkpoint-2", tmp_path / "out")
    assert measure_weight_gap(alone / "tied" / "checkpoint-2", tmp_path / "out") < 1e-5


def test_nan_gradient_in_one_stage_stops_all_before_update(two: tuple[Path, Any]) -> None:
    folder, ended = two
    assert {name: code for name, code in ended["codes"].items() if code} == {"nan": 3}
    assert ended["output"].count("on rank 0 the gradient of model.embed_tokens.weight is not finite") == 2
    assert len(read_events(folder / "nan")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "pipeline: 2 stages by 1f1b, 4 micro-batches a step; the bubble adds 25% of compute time",
        "2 stages of 2 chunks each by interleaved, 4 micro-batches a step; the bubble adds 12%",
        "process 1 of 2: ",
        "stage 1 of 2",
    ],
)
def test_bubble_and_stages_are_logged(two: tuple[Path, Any], line: str) -> None:
    assert line in two[1]["output"]


def test_start_check_has_loss_of_whole_model(two: tuple[Path, Any]) -> None:
    folder, ended = two
    losses = [float(loss) for loss in re.findall(r"two rows have the loss (\d+\.\d+)", ended["output"])]
    assert losses
    assert losses == pytest.approx([read_events(folder / "packed")[0]["loss"]] * len(losses), rel=0.2)


@pytest.mark.slow
def test_four_processes_form_one_or_two_pipelines(inputs: Path, alone: Path, tmp_path: Path) -> None:
    slow = tmp_path / "alone"
    sharding.run_jobs({cell: build_job(inputs, cell) for cell in SLOW_CELLS}, slow)
    jobs = {f"{cell}, long": build_job(inputs, cell, 4) for cell in ("packed", "tied", "recomputed")}
    both = CELLS.keys() | SLOW_CELLS.keys()
    jobs |= {f"{cell}, twice": build_job(inputs, cell, 2, 2) for cell in both}
    jobs["tied, twice, from one"] = resume(jobs["tied, twice"], alone / "tied")
    jobs["packed, long, from twice"] = resume(jobs["packed, long"], tmp_path / "four" / "packed, twice")
    ended = sharding.run_jobs(jobs, tmp_path / "four", "cpu_ddp", num_processes=4)
    assert not any(ended["codes"].values())
    for name in jobs:
        cell = name.partition(",")[0]
        one = (alone if cell in CELLS else slow) / cell
        if "from" in name:
            assert measure_weight_gap(one, tmp_path / "four" / name) <= 1e-5, name
        else:
            assert_same_run(one, tmp_path / "four" / name, MUON_TOLERANCE if cell == "muon" else 1e-5)
