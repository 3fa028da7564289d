"""Replay, EWC and KL divergence to the base under DDP and FSDP2, compared with one process; exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import sharding
from tests.distributed.cells import (
    FULL_PRECISION,
    FURTHER_CELLS,
    assert_resumed,
    build_jobs,
    measure_gaps,
)

FIGURES = {"ewc_penalty", "kl_to_base"}
CELL, ADAPTER = "sft remembering", "lora remembering"


@pytest.fixture(scope="module")
def one(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the single-process runs."""
    folder = tmp_path_factory.mktemp("one")
    result = sharding.run_jobs(build_jobs(inputs, {name: FURTHER_CELLS[name] for name in (CELL, ADAPTER)}, 1), folder)
    assert set(result["codes"].values()) == {0}, result
    return folder


def test_resumed_run_reproduces_weights(inputs: Path, one: Path, tmp_path: Path) -> None:
    job = build_jobs(inputs, {CELL: FURTHER_CELLS[CELL]}, 1)[CELL]
    sharding.run_jobs({"resumed": {**job, "copy_of": one / CELL, "step": 2}}, tmp_path)
    assert_resumed(one / CELL, tmp_path / "resumed")


@pytest.mark.multiprocess
@pytest.mark.parametrize("file", [pytest.param("cpu_ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_processes_match_one(inputs: Path, one: Path, tmp_path: Path, file: str) -> None:
    jobs = build_jobs(inputs, {name: FURTHER_CELLS[name] for name in (CELL, ADAPTER)}, 2)
    jobs["resumed"] = {**jobs[CELL], "copy_of": one / CELL, "step": 2}
    result = sharding.run_jobs(jobs, tmp_path, file, *FULL_PRECISION)
    assert set(result["codes"].values()) == {0}, result
    for cell in (CELL, ADAPTER):
        gaps = measure_gaps(one / cell, tmp_path / cell)
        assert not {name: gap for name, gap in gaps.items() if not gap <= 1e-5}, cell
        assert (FIGURES if cell == CELL else {"kl_to_base"}) <= gaps.keys()
    assert_resumed(one / CELL, tmp_path / "resumed", 1e-5)
