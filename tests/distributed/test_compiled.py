"""Layers that are compiled one by one learn in each layout what eager ones learn in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.distributed import sharding
from tests.distributed.cells import CELLS, FULL_PRECISION, build_jobs, measure_gaps

COMPILED = {"torch_compile": "true", "torch_compile_backend": "aot_eager"}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("file", "options"), [("fsdp2", FULL_PRECISION), ("cpu_ddp", ())])
def test_compiled_layers_have_the_numbers_of_one_process(
    inputs: Path, tmp_path: Path, file: str, options: tuple[str, ...]
) -> None:
    cell = {"sft packed": CELLS["sft packed"]}
    sharding.run_jobs(build_jobs(inputs, cell, 1), tmp_path / "one")
    jobs = {name: {**job, "keys": {**job["keys"], **COMPILED}} for name, job in build_jobs(inputs, cell, 2).items()}
    ended = sharding.run_jobs(jobs, tmp_path / "two", file, *options)
    assert re.search(r"torch\.compile of 2 layers made [1-9]\d* graphs", ended["told"])
    gaps = measure_gaps(tmp_path / "one" / "sft packed", tmp_path / "two" / "sft packed")
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}
