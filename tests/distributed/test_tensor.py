"""Tensors cut over two processes by the users' launch file: the numbers, checkpoints and models of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    build_jobs,
    in_bf16,
    measure_gaps,
    read_weights,
)
from tests.distributed.matrix import LAYOUTS
from tests.rows import read_events, read_rows

from recipes_lib.commands.weights.export import export_checkpoint

pytestmark = pytest.mark.multiprocess
LAYOUT = LAYOUTS["TP, 2"]
OURS = {name: CELLS[name] for name in ("sft packed", "pretrain tied")}


@pytest.fixture(scope="module")
def runs(inputs: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "one").symlink_to(alone)
    jobs = build_jobs(inputs, OURS, LAYOUT.data_size)
    first = jobs["sft packed"]
    jobs["bf16"] = in_bf16(first)
    jobs["resumed"] = {**first, "copy_of": folder / "two" / "sft packed", "step": 2}
    jobs["from one"] = {**first, "copy_of": alone / "sft packed", "step": 2}
    jobs["nan"] = {**first, "fault": "nan loss"}
    two = LAYOUT.run(jobs, folder / "two")
    back = {**build_jobs(inputs, OURS, 1)["sft packed"], "copy_of": folder / "two" / "sft packed", "step": 2}
    sharding.run_jobs({"from two": back}, folder / "back")
    return folder, two


@pytest.mark.parametrize("cell", OURS)
def test_cut_tensors_give_the_numbers_of_one_process(runs: tuple[Path, dict[str, Any]], cell: str) -> None:
    """Counts of tokens among them: rows that two processes both compute count once."""
    folder, _ = runs
    gaps = measure_gaps(folder / "one" / cell, folder / "two" / cell)
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}


def test_no_process_has_a_whole_matrix(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    checkpoint = folder / "two" / "sft packed" / "checkpoint-2"
    whole = read_weights(folder / "two" / "sft packed")
    for states in ("model_shards", "optimizer_shards"):
        files = sorted((checkpoint / states).glob("*.safetensors"))
        assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is not a mapping)
                    parameter = whole[name.rpartition(" of ")[2]]
                    if tensors.get_tensor(name).ndim > 1:
                        assert 2 * tensors.get_tensor(name).numel() == parameter.numel(), name
    record = json.loads((checkpoint / "COMPLETE.json").read_text())
    assert (record["engine"], record["world_size"], record["data_size"]) == ("FSDP", 2, 1)
    assert whole["lm_head.weight"].shape == (512, 64)


def test_a_run_that_goes_on_gets_the_very_weights(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    straight, resumed = (read_weights(folder / "two" / name) for name in ("sft packed", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert json.loads((folder / "two" / "resumed" / "run.json").read_text())["resumed_from"] == "checkpoint-2"


@pytest.mark.parametrize("resumed", ["back/from two", "two/from one"])
def test_a_checkpoint_goes_on_in_the_other_layout(runs: tuple[Path, dict[str, Any]], resumed: str) -> None:
    folder, _ = runs
    straight, got = read_weights(folder / "one" / "sft packed"), read_weights(folder / resumed)
    assert json.loads((folder / resumed / "run.json").read_text())["resumed_from"] == "checkpoint-2"
    assert straight.keys() == got.keys()
    for name, tensor in straight.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cell", ["sft packed", "pretrain tied"])
def test_an_exported_checkpoint_is_the_model_of_one_process(
    runs: tuple[Path, dict[str, Any]], cell: str, tmp_path: Path
) -> None:
    folder, _ = runs
    export_checkpoint(folder / "two" / cell / "checkpoint-2", tmp_path / "out")
    expected, got = read_weights(folder / "one" / cell / "checkpoint-2"), read_weights(tmp_path / "out")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_in_bf16_sums_over_processes_are_rounded_and_no_more(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    expected, got = (
        [
            event[name]
            for event in read_rows(folder / place / "bf16" / "metrics.jsonl")
            for name in ("loss", "eval_loss")
            if name in event
        ]
        for place in ("one", "two")
    )
    assert got == pytest.approx(expected, rel=2e-3)


def test_a_loss_that_is_none_on_one_process_stops_both_before_the_update(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, two = runs
    assert [code for code in two["codes"].values() if code] == [two["codes"]["nan"]] == [3]
    assert two["told"].count("step 2 was stopped before its update: the loss of micro-batch 1 of rank 1 is nan") == 2
    assert len(read_events(folder / "two" / "nan")) == 1
