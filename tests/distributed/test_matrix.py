"""The matrix of recipes and layouts: its measures, its reasons of incompatibility, and (slow) the matrix itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.distributed import matrix
from tests.distributed.cells import (
    CELLS,
    GRPO_TOLERANCE,
    HOST_ADAM_TOLERANCE,
    MUON_TOLERANCE,
    assert_resumed,
    assert_same_run,
    build_jobs,
    in_bf16,
    measure_gaps,
    resume,
)
from tests.rows import write_rows


def write_run(folder: Path, *, loss: float = 2.0, weight: float = 0.5) -> Path:
    folder.mkdir()
    events = [{"kind": "train", "loss": value} for value in (4.0, 3.0, loss, 1.0, 1.5)]
    write_rows(folder / "metrics.jsonl", events)
    save_file({"a": torch.ones(2), "b": torch.tensor([1.0, weight]), "c": torch.ones(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("other", "gaps"),
    [
        ({}, {"loss": 0, "weights": 0}),
        ({"loss": 3.0, "weight": 0.25}, {"loss": 0.5, "weights": 0.25}),
        ({"loss": math.nan, "weight": math.nan}, {"loss": math.inf, "weights": math.inf}),
    ],
)
def test_measure_gaps_returns_largest_differences(tmp_path, other, gaps) -> None:
    assert measure_gaps(write_run(tmp_path / "one"), write_run(tmp_path / "two", **other)) == gaps


def test_cells_run_or_are_incompatible() -> None:
    """Full models run in every layout; groups of ranks reject reward models and adapters."""
    for layout, how in matrix.LAYOUTS.items():
        cells = matrix.list_cells(layout).keys()
        assert {"sft packed", "sft padded", "pretrain tied", "recomputed"} <= cells
        assert len({"reward", "lora padded"} & cells) == (0 if how.data_size < how.num_processes else 2)
    assert matrix.list_cells("HSDP, 2 x 2").keys() == matrix.ALL_CELLS.keys()
    assert "orthogonalises" in str(matrix.find_reason("muon", "ZeRO-1, 2"))


def test_table_lists_reasons_of_incompatible_cells() -> None:
    output = matrix.format_table({"sft packed": dict.fromkeys(matrix.LAYOUTS, 1e-7), "muon": {"DDP, 2": math.inf}})
    _, _, packed, muon, _, *reasons = output.splitlines()
    assert packed.count("1e-07") == len(matrix.LAYOUTS)
    assert muon.startswith("| muon | stopped by a check |  | a |  |")
    assert [reason[:5] for reason in reasons] == ["- a: ", "- b: "]


@pytest.mark.multiprocess
def test_zero3_matches_one_process(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """With forked ranks; the matrix uses launchers and all layouts."""
    matrix.LAYOUTS["ZeRO-3, 2"].run(build_jobs(inputs, {"sft packed": CELLS["sft packed"]}, 2), tmp_path)
    assert_same_run(alone / "sft packed", tmp_path / "sft packed")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["DDP, 2", "FSDP2, 2", "TP, 2", "CP, 2", "ZeRO-2, 2", "ZeRO-3, 2"])
def test_every_recipe_runs_and_resumes_bit_equal_in_bf16(layout: str, inputs: Path, tmp_path: Path) -> None:
    """The precision of the shipped launch files; their checks before, during and after training must allow for it."""
    how = matrix.LAYOUTS[layout]
    jobs = build_jobs(inputs, matrix.list_cells(layout), how.data_size)
    jobs = {name: in_bf16(job) for name, job in jobs.items()}
    assert how.run(jobs, tmp_path / "whole")["codes"] == dict.fromkeys(jobs, 0)
    # In RL, three steps are fewer than an iteration's, and have no checkpoint between.
    cut = {name: resume(job, tmp_path / "whole" / name) for name, job in jobs.items()}
    cut = {name: job for name, job in cut.items() if (job["copy_of"] / "checkpoint-2").is_dir()}
    assert len(cut) >= 5
    how.run(cut, tmp_path / "resumed")
    for name in cut:
        assert_resumed(tmp_path / "whole" / name, tmp_path / "resumed" / name)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_matrix_matches_one_process_except_for_planted_faults(tmp_path: Path) -> None:
    table = matrix.measure(tmp_path, list(matrix.ALL_CELLS))
    assert list(table) == [*matrix.ALL_CELLS, matrix.RESUMED, *matrix.CONTROLS]
    readers = [layout for layout in matrix.LAYOUTS if not matrix.is_of_deepspeed(layout)]
    assert list(table[matrix.RESUMED]) == readers[1:]
    assert max(table[matrix.RESUMED].values()) <= 1e-5
    for cell in matrix.ALL_CELLS:
        assert list(table[cell]) == [layout for layout in matrix.LAYOUTS if cell in matrix.list_cells(layout)]
        for layout, gap in table[cell].items():
            of_layout = HOST_ADAM_TOLERANCE if layout == "ZeRO-3 offload, 2" else 1e-5
            if cell == "grpo":
                gaps = measure_gaps(tmp_path / "one process" / cell, tmp_path / layout / cell)
                assert gaps.pop("weights") <= GRPO_TOLERANCE, layout
                gap = max(gaps.values())
            assert gap <= (MUON_TOLERANCE if cell == "muon" else of_layout), (cell, layout)
    for fault in matrix.CONTROLS:
        assert min(table[fault].values()) > 1e-3, fault
