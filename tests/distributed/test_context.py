"""Rows shared by two processes by the users' launch file: the numbers and checkpoints of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.cells import CELLS, build_jobs, measure_gaps, read_weights
from tests.distributed.matrix import LAYOUTS

pytestmark = pytest.mark.multiprocess
LAYOUT = LAYOUTS["CP, 2"]
OURS = {name: CELLS[name] for name in ("sft packed", "pretrain tied")}


@pytest.fixture(scope="module")
def runs(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "one").symlink_to(alone)
    jobs = build_jobs(inputs, OURS, LAYOUT.data_size)
    first = jobs["sft packed"]
    jobs["resumed"] = {**first, "copy_of": folder / "two" / "sft packed", "step": 2}
    jobs["from one"] = {**first, "copy_of": alone / "sft packed", "step": 2}
    jobs["nan"] = {**first, "fault": "nan loss"}
    return folder, LAYOUT.run(jobs, folder / "two")


@pytest.mark.parametrize("cell", OURS)
def test_shared_rows_give_the_numbers_of_one_process(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    folder, _ = runs
    gaps = measure_gaps(folder / "one" / cell, folder / "two" / cell)
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}


def test_a_run_that_goes_on_gets_the_very_weights(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    straight, resumed = (read_weights(folder / "two" / name) for name in ("sft packed", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert json.loads((folder / "two" / "resumed" / "run.json").read_text())["resumed_from"] == "checkpoint-2"


def test_a_checkpoint_of_one_process_goes_on(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    straight, got = read_weights(folder / "one" / "sft packed"), read_weights(folder / "two" / "from one")
    assert json.loads((folder / "two" / "from one" / "run.json").read_text())["resumed_from"] == "checkpoint-2"
    for name, tensor in straight.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5)


def test_a_loss_that_is_none_on_one_process_stops_both_before_the_update(runs: tuple[Path, dict[str, Any]]) -> None:
    _, two = runs
    assert [code for code in two["codes"].values() if code] == [two["codes"]["nan"]] == [3]
    assert two["told"].count("step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan") == 2
