"""Pretraining in stages over gloo: every schedule trains, evaluates, saves and goes on as one process does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import measure_gaps, measure_weight_gap, read_weights
from tests.distributed.pipelines import CELLS, MUON_TOLERANCE, SLOW_CELLS, build_job, build_rollback, resume
from tests.faults import recipe_runs
from tests.rows import read_events

from recipes_lib.commands.weights.export import export_checkpoint
from recipes_lib.training.guards.replay_check import read_rollbacks


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    recipe_runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    sharding.run_jobs({cell: build_job(inputs, cell) for cell in CELLS}, folder)
    return folder


@pytest.fixture(scope="module")
def two(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    jobs = {cell: build_job(inputs, cell, 2) for cell in CELLS}
    for cell in ("packed", "tied"):
        jobs[f"{cell}, resumed"] = resume(jobs[cell], folder / cell)
        jobs[f"{cell}, from one"] = resume(jobs[cell], alone / cell)
    jobs |= build_rollback(inputs, 2, save_steps=1)
    jobs["nan"] = {**jobs["packed"], "fault": "nan in the first stage"}
    jobs["tied apart"] = {**jobs["tied"], "fault": "no sums over stages"}
    return folder, sharding.run_jobs(jobs, folder, "cpu_ddp")


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", CELLS)
def test_stages_give_the_numbers_of_one_process(alone: Path, two: tuple[Path, Any], cell: str) -> None:
    """Losses, norms, held-out figures, those of the weights, and the final model."""
    folder, _ = two
    gaps = measure_gaps(alone / cell, folder / cell)
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}
    assert {"eval_bits_per_byte", "grad_norm", "parameter_norm", "update_ratio", "num_target_tokens"} <= gaps.keys()
    assert json.loads((folder / cell / "run.json").read_text())["pipeline_stages"] == 2


@pytest.mark.multiprocess
def test_tied_embeddings_whose_gradients_were_not_added_up_would_be_seen(alone: Path, two: tuple[Path, Any]) -> None:
    folder, _ = two
    assert measure_weight_gap(alone / "tied", folder / "tied apart") > 1e-3


@pytest.mark.multiprocess
def test_each_process_writes_what_it_holds_under_the_usual_names(alone: Path, two: tuple[Path, Any]) -> None:
    folder, _ = two
    held = []
    for file in sorted((folder / "tied" / "checkpoint-2" / "model_shards").iterdir()):
        with safe_open(file, framework="pt") as tensors:
            held.append(set(tensors.keys()))
    assert not held[0] & held[1]
    assert held[0] | held[1] == read_weights(alone / "tied" / "checkpoint-2").keys()
    assert {"model.layers.1.mlp.up_proj.weight"} <= held[0]
    assert {"model.layers.2.mlp.up_proj.weight", "model.norm.weight"} <= held[1]


@pytest.mark.multiprocess
@pytest.mark.parametrize("cell", ["packed", "tied"])
def test_a_run_that_goes_on_gets_the_very_weights(two: tuple[Path, Any], cell: str) -> None:
    folder, _ = two
    straight, resumed = (read_weights(folder / name) for name in (cell, f"{cell}, resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert json.loads((folder / f"{cell}, resumed" / "run.json").read_text())["resumed_from"] == "checkpoint-2"


@pytest.mark.multiprocess
def test_a_rollback_leaves_the_very_weights_of_a_run_that_never_saw_the_rows(two: tuple[Path, Any]) -> None:
    folder, _ = two
    (made,) = read_rollbacks(folder / "spike").made
    assert (made.step, made.back_to, made.skipped) == (sharding.SPIKE_STEP, 1, sharding.LEFT_OUT)
    weights, expected = (read_weights(folder / name) for name in ("spike", "never saw it"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.multiprocess
def test_a_checkpoint_goes_on_in_the_other_layout(
    inputs: Path, alone: Path, two: tuple[Path, Any], tmp_path: Path
) -> None:
    """What the optimizer remembers, too: without it the next step would be another one."""
    folder, _ = two
    cells = ("packed", "tied")
    sharding.run_jobs({cell: resume(build_job(inputs, cell), folder / cell) for cell in cells}, tmp_path)
    for cell in cells:
        for run in (tmp_path / cell, folder / f"{cell}, from one"):
            assert json.loads((run / "run.json").read_text())["resumed_from"] == "checkpoint-2"
            assert measure_weight_gap(alone / cell, run) < 1e-5
        assert measure_weight_gap(alone / cell, alone / cell / "checkpoint-2") > 1e-4, "the step in between matters"


@pytest.mark.multiprocess
def test_an_exported_checkpoint_is_the_model_of_one_process(alone: Path, two: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = two
    export_checkpoint(folder / "tied" / "checkpoint-2", tmp_path / "out")
    assert measure_weight_gap(alone / "tied" / "checkpoint-2", tmp_path / "out") < 1e-5


@pytest.mark.multiprocess
def test_a_gradient_that_is_none_in_one_stage_stops_all_before_the_update(two: tuple[Path, Any]) -> None:
    folder, ended = two
    assert [code for code in ended["codes"].values() if code] == [ended["codes"]["nan"]] == [3]
    assert ended["told"].count("on rank 0 the gradient of model.embed_tokens.weight is not finite") == 2
    assert len(read_events(folder / "nan")) == 1


@pytest.mark.multiprocess
def test_the_user_is_told_what_stands_still_and_what_is_left_out(two: tuple[Path, Any]) -> None:
    _, ended = two
    assert "pipeline: 2 stages by 1f1b, 4 micro-batches a step; the bubble adds 25% of compute time" in ended["told"]
    assert "2 stages of 2 chunks each by interleaved, 4 micro-batches a step; the bubble adds 12%" in ended["told"]
    assert "process 1 of 2: " in ended["told"]
    assert "stage 1 of 2" in ended["told"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_four_processes_are_one_pipeline_or_two_side_by_side(inputs: Path, alone: Path, tmp_path: Path) -> None:
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
        is_whole = "from" not in name
        gap = max(measure_gaps(one, tmp_path / "four" / name).values()) if is_whole else math.nan
        tolerance = MUON_TOLERANCE if cell == "muon" else 1e-5
        assert not is_whole or gap <= tolerance, (name, gap)
        assert measure_weight_gap(one, tmp_path / "four" / name) <= tolerance, name
