"""Replay, EWC and the divergence to the base compute under DDP and FSDP2 what one process does, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed import sharding
from tests.distributed.cells import FULL_PRECISION, FURTHER_CELLS, build_jobs, measure_gaps, read_weights

FIGURES = {"ewc_penalty", "kl_to_base"}
CELL, ADAPTER = "sft remembering", "lora remembering"


@pytest.fixture(scope="module")
def one(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished runs of one process."""
    folder = tmp_path_factory.mktemp("one")
    told = sharding.run_jobs(build_jobs(inputs, {name: FURTHER_CELLS[name] for name in (CELL, ADAPTER)}, 1), folder)
    assert set(told["codes"].values()) == {0}, told
    return folder


def test_a_run_that_is_resumed_has_the_weights_of_one_that_never_stopped(
    inputs: Path, one: Path, tmp_path: Path
) -> None:
    job = build_jobs(inputs, {CELL: FURTHER_CELLS[CELL]}, 1)[CELL]
    sharding.run_jobs({"resumed": {**job, "copy_of": one / CELL, "step": 2}}, tmp_path)
    straight, resumed = read_weights(one / CELL), read_weights(tmp_path / "resumed")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


@pytest.mark.multiprocess
@pytest.mark.parametrize("file", [pytest.param("cpu_ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_processes_remember_as_one_does(inputs: Path, one: Path, tmp_path: Path, file: str) -> None:
    jobs = build_jobs(inputs, {name: FURTHER_CELLS[name] for name in (CELL, ADAPTER)}, 2)
    jobs["resumed"] = {**jobs[CELL], "copy_of": one / CELL, "step": 2}
    told = sharding.run_jobs(jobs, tmp_path, file, *FULL_PRECISION)
    assert set(told["codes"].values()) == {0}, told
    for cell in (CELL, ADAPTER):
        gaps = measure_gaps(one / cell, tmp_path / cell)
        assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}, cell
        assert (FIGURES if cell == CELL else {"kl_to_base"}) <= gaps.keys()
    for name, tensor in read_weights(tmp_path / "resumed").items():
        torch.testing.assert_close(tensor, read_weights(one / CELL)[name], rtol=0, atol=1e-5, msg=name)
