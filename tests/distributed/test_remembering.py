"""Replay, EWC and KL divergence to the base under FSDP2, compared with one process; exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import sharding
from tests.distributed.cells import FULL_PRECISION, FURTHER_CELLS, assert_resumed, assert_same_run, build_jobs, resume

CELL = "sft remembering"


@pytest.fixture(scope="module")
def one(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a single-process run of ``CELL``, and of the same run resumed."""
    folder = tmp_path_factory.mktemp("one")
    job = build_jobs(inputs, {CELL: FURTHER_CELLS[CELL]}, 1)[CELL]
    sharding.run_jobs({CELL: job, "resumed": resume(job, folder / CELL)}, folder)
    return folder


def test_resumed_run_reproduces_weights(one: Path) -> None:
    assert_resumed(one / CELL, one / "resumed")


@pytest.mark.multiprocess
def test_two_processes_match_one(inputs: Path, one: Path, tmp_path: Path) -> None:
    job = build_jobs(inputs, {CELL: FURTHER_CELLS[CELL]}, 2)[CELL]
    jobs = {CELL: job, "resumed": resume(job, one / CELL)}
    sharding.run_jobs(jobs, tmp_path, "fsdp2", *FULL_PRECISION)
    assert {"ewc_penalty", "kl_to_base"} <= assert_same_run(one / CELL, tmp_path / CELL)
    assert_resumed(one / CELL, tmp_path / "resumed", 1e-5)
