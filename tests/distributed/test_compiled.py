"""Layers compiled one by one, under FSDP2 and DDP, compared with eager layers on one process."""

from __future__ import annotations

import re

import pytest
from tests.distributed import sharding
from tests.distributed.cells import CELLS, FULL_PRECISION, assert_same_run, build_jobs

COMPILED = {"torch_compile": "true", "torch_compile_backend": "aot_eager"}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("file", "options"), [("fsdp2", FULL_PRECISION), ("cpu_ddp", ())])
def test_compiled_layers_match_one_eager_process(inputs, alone, tmp_path, file, options) -> None:
    cell = {"sft packed": CELLS["sft packed"]}
    jobs = {name: {**job, "keys": {**job["keys"], **COMPILED}} for name, job in build_jobs(inputs, cell, 2).items()}
    ended = sharding.run_jobs(jobs, tmp_path, file, *options)
    assert re.search(r"torch\.compile of 2 layers made [1-9]\d* graphs?", ended["output"])
    assert_same_run(alone / "sft packed", tmp_path / "sft packed")
