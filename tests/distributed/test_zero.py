"""DeepSpeed ZeRO on two gloo ranks by the public launch files: precision, guards, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.distributed.cells import CELLS, FULL_PRECISION, build_jobs, in_bf16
from tests.distributed.matrix import ALL_CELLS

# That losses and weights match one process, and that runs resume bit-equal, is tested in test_matrix.py.
pytestmark = [pytest.mark.multiprocess]
IN_BF16 = ("dpo stored", "lora packed")


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    jobs = build_jobs(inputs, {"pretrain tied": CELLS["pretrain tied"], "nan": CELLS["sft packed"]}, 2)
    jobs["nan"]["fault"] = "nan loss"
    return folder, sharding.run_jobs(jobs, folder, "zero3", *FULL_PRECISION)


def test_run_in_the_precision_of_the_launch_file_agrees_with_reference_and_reloaded_adapter(inputs, tmp_path) -> None:
    """In bf16: stored log-probabilities of the reference stay in float32, and a saved adapter is compared in bf16."""
    jobs = build_jobs(inputs, {name: ALL_CELLS[name] for name in IN_BF16}, 2)
    ended = sharding.run_jobs({name: in_bf16(job) for name, job in jobs.items()}, tmp_path, "zero2")
    assert ended["codes"] == dict.fromkeys(IN_BF16, 0)
    assert "policy and reference agree" in ended["output"]


@pytest.mark.slow
def test_nan_loss_stops_all_after_update(runs: tuple[Path, dict[str, Any]]) -> None:
    _, ended = runs
    assert [code for code in ended["codes"].values() if code] == [ended["codes"]["nan"]] == [3]
    assert ended["output"].count("step 2 was stopped after its update, which DeepSpeed makes first: ") == 2


@pytest.mark.slow
def test_metrics_unavailable_under_deepspeed_are_absent(runs, alone) -> None:
    """DeepSpeed updates and partitions the weights before their change could be measured."""
    folder, ended = runs
    assert "update_ratio" in (alone / "pretrain tied" / "metrics.jsonl").read_text()
    assert "update_ratio" not in (folder / "pretrain tied" / "metrics.jsonl").read_text()
    assert "is deprecated. Please use" not in ended["output"]
