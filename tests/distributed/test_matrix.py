"""The table of equal numbers, made again, and that what is broken shows in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.distributed import matrix
from tests.distributed.cells import (
    CELLS,
    HOST_ADAM_TOLERANCE,
    MUON_TOLERANCE,
    build_jobs,
    measure_gaps,
    needs_compiler,
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
def test_a_gap_is_the_largest_and_what_is_no_number_is_farther_than_any(
    tmp_path: Path, other: dict[str, float], gaps: dict[str, float]
) -> None:
    assert measure_gaps(write_run(tmp_path / "one"), write_run(tmp_path / "two", **other)) == gaps


def test_every_cell_runs_or_has_its_reason() -> None:
    """Whole models run in every layout; what groups refuse is more than one model, not more."""
    for layout, how in matrix.LAYOUTS.items():
        cells = matrix.list_cells(layout).keys()
        assert {"sft packed", "sft padded", "pretrain tied", "recomputed"} <= cells
        assert len({"reward", "lora padded"} & cells) == (0 if how.data_size < how.num_processes else 2)
    assert matrix.list_cells("HSDP, 2 x 2").keys() == matrix.ALL_CELLS.keys()
    assert "orthogonalises" in str(matrix.find_reason("muon", "ZeRO-1, 2"))


def test_the_table_tells_reasons() -> None:
    told = matrix.format_table({"sft packed": dict.fromkeys(matrix.LAYOUTS, 1e-7), "muon": {"DDP, 2": math.inf}})
    _, _, packed, muon, _, *reasons = told.splitlines()
    assert packed.count("1e-07") == len(matrix.LAYOUTS)
    assert muon.startswith("| muon | stopped by its own checks |  | a |  |")
    assert [reason[:5] for reason in reasons] == ["- a: ", "- b: "]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(matrix.LAYOUTS["FSDP2 offload, 2"], id="FSDP2 offload", marks=pytest.mark.slow),
        pytest.param(matrix.LAYOUTS["ZeRO-3, 2"], id="ZeRO-3", marks=needs_compiler),
        pytest.param(matrix.share("zero3_sp", "sp", 1), id="ZeRO-3 x SP", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_a_run_gives_the_same_numbers_in_a_layout(
    layout: matrix.Layout, inputs: Path, alone: Path, tmp_path: Path
) -> None:
    """What every test run has time for, besides layouts with files of their own; launchers make the whole table."""
    layout.run(build_jobs(inputs, {"sft packed": CELLS["sft packed"]}, layout.data_size), tmp_path)
    gaps = measure_gaps(alone / "sft packed", tmp_path / "sft packed")
    assert not {what: gap for what, gap in gaps.items() if not gap <= 1e-5}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_recipe_gives_the_same_numbers_in_every_layout_unless_it_is_broken(tmp_path: Path) -> None:
    table = matrix.measure(tmp_path, list(matrix.ALL_CELLS))
    assert list(table) == [*matrix.ALL_CELLS, matrix.RESUMED, *matrix.CONTROLS]
    readers = [layout for layout in matrix.LAYOUTS if not matrix.is_of_deepspeed(layout)]
    assert list(table[matrix.RESUMED]) == readers[1:]
    assert max(table[matrix.RESUMED].values()) <= 1e-5
    for cell in matrix.ALL_CELLS:
        assert list(table[cell]) == [layout for layout in matrix.LAYOUTS if cell in matrix.list_cells(layout)]
        for layout, gap in table[cell].items():
            of_layout = HOST_ADAM_TOLERANCE if layout == "ZeRO-3 offload, 2" else 1e-5
            assert gap <= (MUON_TOLERANCE if cell == "muon" else of_layout), (cell, layout)
    for fault in matrix.CONTROLS:
        assert min(table[fault].values()) > 1e-3, fault
