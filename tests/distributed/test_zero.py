"""DeepSpeed ZeRO-3 on two gloo ranks by the public launch files, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed import sharding
from tests.distributed.cells import CELLS, FULL_PRECISION, assert_resumed, assert_same_run, build_jobs, in_bf16, resume
from tests.distributed.matrix import ALL_CELLS, share

# `make test` runs one cell in full precision, in test_matrix.py, and those of ``IN_BF16``.
pytestmark = [pytest.mark.multiprocess]
IN_BF16 = ("dpo stored", "lora packed")
CHOSEN = {name: CELLS[name] for name in ("sft packed", "pretrain tied", "lora padded", "reward")}


@pytest.fixture(scope="module")
def runs(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "one").symlink_to(alone)
    jobs = build_jobs(inputs, CHOSEN, 2)
    jobs["nan"] = {**jobs["sft packed"], "fault": "nan loss"}
    jobs["resumed"] = resume(jobs["sft packed"], folder / "zero3" / "sft packed")
    return folder, sharding.run_jobs(jobs, folder / "zero3", "zero3", *FULL_PRECISION)


def test_run_in_the_precision_of_the_launch_file_agrees_with_reference_and_reloaded_adapter(inputs, tmp_path) -> None:
    """In bf16: stored log-probabilities of the reference stay in float32, and a saved adapter is compared in bf16."""
    jobs = build_jobs(inputs, {name: ALL_CELLS[name] for name in IN_BF16}, 2)
    ended = sharding.run_jobs({name: in_bf16(job) for name, job in jobs.items()}, tmp_path, "zero2")
    assert ended["codes"] == dict.fromkeys(IN_BF16, 0)
    assert "policy and reference agree" in ended["output"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CHOSEN)
def test_zero3_run_matches_one_process(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    """Includes random weights, a new reward head, and the initial checks, which run before the engine is built."""
    folder, ended = runs
    assert not ended["codes"][cell]
    assert {"loss", "grad_norm", "eval_loss"} <= assert_same_run(folder / "one" / cell, folder / "zero3" / cell)


@pytest.mark.slow
def test_zero3_sequence_parallel_run_matches_one_process(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """Ulysses: each rank computes half of the attention heads for whole rows."""
    jobs = build_jobs(inputs, {name: CELLS[name] for name in ("sft packed", "pretrain tied")}, 1)
    share("zero3_sp", "sp", 1).run(jobs, tmp_path)
    for name in jobs:
        assert_same_run(alone / name, tmp_path / name)


@pytest.mark.slow
def test_resumed_run_matches_one_process(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    assert_resumed(folder / "one" / "sft packed", folder / "zero3" / "resumed", 1e-5)


@pytest.mark.slow
def test_nan_loss_stops_all_after_update(runs: tuple[Path, dict[str, Any]]) -> None:
    _, ended = runs
    assert [code for code in ended["codes"].values() if code] == [ended["codes"]["nan"]] == [3]
    assert ended["output"].count("step 2 was stopped after its update, which DeepSpeed makes first: ") == 2


@pytest.mark.slow
def test_metrics_unavailable_under_deepspeed_are_absent(runs: tuple[Path, dict[str, Any]]) -> None:
    """DeepSpeed updates and partitions the weights before their change could be measured."""
    folder, ended = runs
    assert "update_ratio" in (folder / "one" / "pretrain tied" / "metrics.jsonl").read_text()
    assert "update_ratio" not in (folder / "zero3" / "pretrain tied" / "metrics.jsonl").read_text()
    assert "is deprecated. Please use" not in ended["output"]
