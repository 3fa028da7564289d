"""The table of equal numbers, made again, and that what is broken shows in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.distributed import matrix
from tests.distributed.cells import MUON_TOLERANCE, measure_gaps


def write_run(folder: Path, *, loss: float = 2.0, weight: float = 0.5) -> Path:
    folder.mkdir()
    events = [{"kind": "train", "loss": value} for value in (4.0, 3.0, loss, 1.0, 1.5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_stage_gives_the_same_numbers_in_every_layout_unless_it_is_broken(tmp_path: Path) -> None:
    table = matrix.measure(tmp_path, list(matrix.ALL_CELLS))
    assert list(table) == [*matrix.ALL_CELLS, matrix.RESUMED, *matrix.CONTROLS]
    readers = [layout for layout in matrix.LAYOUTS if not matrix.is_of_deepspeed(layout)]
    assert list(table[matrix.RESUMED]) == readers[1:]
    assert max(table[matrix.RESUMED].values()) <= 1e-5
    for cell in matrix.ALL_CELLS:
        tolerance = MUON_TOLERANCE if cell == "muon" else 1e-5
        assert list(table[cell]) == [layout for layout in matrix.LAYOUTS if matrix.runs_in(cell, layout)]
        assert not {layout: gap for layout, gap in table[cell].items() if not gap <= tolerance}, cell
    for fault in matrix.CONTROLS:
        assert min(table[fault].values()) > 1e-3, fault
