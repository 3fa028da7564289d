"""DeepSpeed's ZeRO by the users' launch files over gloo: what it shares out gives the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    FULL_PRECISION,
    build_jobs,
    measure_gaps,
    measure_weight_gap,
    needs_compiler,
)
from tests.distributed.matrix import share

# Every test run does one of these, in test_matrix.
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, needs_compiler]
CHOSEN = {name: CELLS[name] for name in ("sft packed", "pretrain tied", "lora padded", "reward")}


@pytest.fixture(scope="module")
def runs(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "one").symlink_to(alone)
    jobs = build_jobs(inputs, CHOSEN, 2)
    jobs["nan"] = {**jobs["sft packed"], "fault": "nan loss"}
    jobs["resumed"] = {**jobs["sft packed"], "copy_of": folder / "zero3" / "sft packed", "step": 2}
    return folder, sharding.run_jobs(jobs, folder / "zero3", "zero3", *FULL_PRECISION)


@pytest.mark.parametrize("cell", CHOSEN)
def test_shares_of_zero_3_give_the_numbers_of_one_process(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    """Random weights and a fresh reward head among them, and the checks of the start, which run before the engine."""
    folder, ended = runs
    assert not ended["codes"][cell]
    gaps = measure_gaps(folder / "one" / cell, folder / "zero3" / cell)
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}
    assert {"loss", "grad_norm", "eval_loss", "weights"} <= gaps.keys()


def test_so_do_rows_that_two_processes_share(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """Each attends with half of the heads to all that are packed into a row."""
    jobs = build_jobs(inputs, {name: CELLS[name] for name in ("sft packed", "pretrain tied")}, 1)
    share("zero3_sp", "sp", 1).run(jobs, tmp_path)
    for name in jobs:
        gaps = measure_gaps(alone / name, tmp_path / name)
        assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}, name


def test_a_run_goes_on_from_its_shares(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    assert json.loads((folder / "zero3" / "resumed" / "run.json").read_text())["resumed_from"] == "checkpoint-2"
    assert measure_weight_gap(folder / "one" / "sft packed", folder / "zero3" / "resumed") < 1e-5


def test_a_loss_that_is_none_stops_both_behind_the_update(runs: tuple[Path, dict[str, Any]]) -> None:
    _, ended = runs
    assert [code for code in ended["codes"].values() if code] == [ended["codes"]["nan"]] == [3]
    assert ended["told"].count("step 2 was stopped after its update, which DeepSpeed makes first: ") == 2


def test_no_figure_is_told_that_deepspeed_hides(runs: tuple[Path, dict[str, Any]]) -> None:
    """Weights have been updated, and are empty, by the time that their change could be measured."""
    folder, ended = runs
    assert "update_ratio" in (folder / "one" / "pretrain tied" / "metrics.jsonl").read_text()
    assert "update_ratio" not in (folder / "zero3" / "pretrain tied" / "metrics.jsonl").read_text()
    assert "is deprecated. Please use" not in ended["told"]
