"""Context parallelism on two ranks by the public launch file, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.cells import CELLS, assert_resumed, assert_same_run, build_jobs
from tests.distributed.matrix import LAYOUTS

pytestmark = pytest.mark.multiprocess
LAYOUT = LAYOUTS["CP, 2"]
CELL = "sft packed"


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder of the runs on two ranks, and their exit codes and output."""
    folder = tmp_path_factory.mktemp("runs")
    job = build_jobs(inputs, {CELL: CELLS[CELL]}, LAYOUT.data_size)[CELL]
    jobs = {
        CELL: job,
        "resumed": {**job, "copy_of": folder / CELL, "step": 2},
        "nan": {**job, "fault": "nan loss"},
    }
    return folder, LAYOUT.run(jobs, folder)


def test_context_parallel_run_matches_one_process(runs: tuple[Path, Any], alone: Path) -> None:
    assert_same_run(alone / CELL, runs[0] / CELL)


def test_resumed_run_reproduces_weights(runs: tuple[Path, Any]) -> None:
    assert_resumed(runs[0] / CELL, runs[0] / "resumed")


def test_nan_loss_on_one_rank_stops_all_before_update(runs: tuple[Path, Any]) -> None:
    _, ended = runs
    assert ended["codes"] == {CELL: 0, "resumed": 0, "nan": 3}
    message = "step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan"
    assert ended["output"].count(message) == 2


@pytest.mark.slow
def test_checkpoint_of_one_process_is_resumed(inputs: Path, alone: Path, tmp_path: Path) -> None:
    jobs = build_jobs(inputs, {name: CELLS[name] for name in (CELL, "pretrain tied")}, LAYOUT.data_size)
    LAYOUT.run({name: {**job, "copy_of": alone / name, "step": 2} for name, job in jobs.items()}, tmp_path)
    for name in jobs:
        assert_resumed(alone / name, tmp_path / name, 1e-5)
