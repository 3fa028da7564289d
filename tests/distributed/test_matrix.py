"""The table of equal numbers, made again, and that what is broken shows in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import matrix
from tests.distributed.cells import MUON_TOLERANCE


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_stage_gives_the_same_numbers_in_every_layout_unless_it_is_broken(tmp_path: Path) -> None:
    table = matrix.measure(tmp_path, list(matrix.ALL_CELLS))
    assert list(table) == [*matrix.ALL_CELLS, matrix.RESUMED, *matrix.CONTROLS]
    assert len(table[matrix.RESUMED]) == len(matrix.LAYOUTS) - 1
    assert max(table[matrix.RESUMED].values()) <= 1e-5
    for cell in matrix.ALL_CELLS:
        tolerance = MUON_TOLERANCE if cell == "muon" else 1e-5
        assert list(table[cell]) == list(matrix.LAYOUTS)
        assert not {layout: gap for layout, gap in table[cell].items() if not gap <= tolerance}, cell
    for fault in matrix.CONTROLS:
        assert min(table[fault].values()) > 1e-3, fault
