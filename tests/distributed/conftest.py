"""Inputs of the distributed tests, and the single-process runs with which every layout is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import sharding
from tests.distributed.cells import CELLS, build_jobs, in_bf16, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with models, tokenizer and data of all cells."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the finished single-process runs of ``CELLS``, and ``bf16``: the first of them in bf16."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = build_jobs(inputs, CELLS, 1)
    sharding.run_jobs({**jobs, "bf16": in_bf16(jobs["sft packed"])}, folder)
    return folder
